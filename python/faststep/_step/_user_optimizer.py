"""Steps kept with an optimizer, and optimizers that are no `mlx.optimizers.Optimizer`: objects with an `update`."""

from __future__ import annotations

import weakref
from typing import Any, cast

from mlx.optimizers import Optimizer

CACHE = "_faststep"  # its name in the instance dict


class StepCache(dict[str, Any]):
    """Programs that `fast_step` keeps with an optimizer, not with a module: they may lead back to the optimizer.

    Of an optimizer of no class of MLX's it hangs at the model: a user's code goes over the attributes of such
    (`Own(**vars(it))`). Where one does, it finds an empty dict, which trees and files leave out, as do copies.

    Attributes:
        programs: The programs.
        warned: The pairs of a model and an optimizer whose options have changed again and again, as a warning says.
    """

    __slots__ = ("__weakref__", "_of", "programs", "warned")

    def __init__(self, of: Any) -> None:
        """Begin without anything."""
        super().__init__()
        self._of = weakref.ref(of)
        self.programs: dict[Any, Any] = {}
        self.warned: set[Any] = set()

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        """Become an empty dict."""
        return dict, ()

    @staticmethod
    def at(model: Any, optimizer: Any) -> StepCache | None:
        """Return what is kept of an optimizer and a model, if anything is; shallow copies show what is not theirs."""
        of = optimizer if isinstance(optimizer, Optimizer) else model
        found = getattr(of, "__dict__", {}).get(CACHE)
        return found if isinstance(found, StepCache) and found._of() is of else None

    @classmethod
    def made_at(cls, model: Any, optimizer: Any) -> StepCache:
        """Return what is kept, made where there is nothing."""
        if (found := cls.at(model, optimizer)) is None:
            of = optimizer if isinstance(optimizer, Optimizer) else model
            found = vars(of)[CACHE] = cls(of)
        return found


class OwnOptimizer(Optimizer):
    """Stand-in for a user's object: it keeps the object's attributes alive, and not the object.

    Attributes:
        attributes: The attributes of the object: the same dict, so that both see what an update makes of them.
    """

    def __init__(self, own: Any) -> None:
        """Share the attributes."""
        Optimizer.__init__(self)
        self._own = weakref.ref(own)
        self.follow()

    def follow(self) -> None:
        """Share the attributes of the object, whose instance dict may be another one now (`own.__dict__ = saved`)."""
        self.attributes = vars(self.own)

    @property
    def own(self) -> Any:
        """The user's object."""
        return self._own()

    def init(self, parameters: dict[str, Any]) -> None:
        """Make nothing: what the object keeps is its own affair."""
        self._initialized = True

    def update(self, model: Any, gradients: dict[str, Any]) -> None:
        """Call the object's own update."""
        self.own.update(model, gradients)

    @property  # type: ignore[misc]
    def learning_rate(self) -> Any:
        """The object's own, if it has one."""
        return self.own.learning_rate

    def __getattr__(self, name: str) -> Any:
        """Look up what only the object has."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.own, name)


_known: weakref.WeakValueDictionary[int, OwnOptimizer] = weakref.WeakValueDictionary()  # by the object's identity


def as_optimizer(optimizer: Any) -> Optimizer:
    """Return an optimizer as it is, and of any other object with an `update` and attributes always the same one."""
    if isinstance(optimizer, Optimizer | dict | type) or not _updates(optimizer):  # a model is a dict, too
        return cast(Optimizer, optimizer)
    known = _known.get(id(optimizer))
    if known is None or known.own is not optimizer:
        kind = type(optimizer)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        known = _known[id(optimizer)] = type(kind.__name__, (OwnOptimizer,), names)(optimizer)
    return known


def _updates(optimizer: Any) -> bool:
    has_attributes = hasattr(optimizer, "__dict__") and hasattr(type(optimizer), "__weakref__")
    return has_attributes and callable(getattr(optimizer, "update", None))
