"""What hangs at an optimizer, and optimizers that are no `mlx.optimizers.Optimizer`: objects with an `update`."""

from __future__ import annotations

import weakref
from typing import Any, cast

from mlx.optimizers import Optimizer

HUNG = "_faststep"  # where it stands in the instance dict of an optimizer


class Hung(dict[str, Any]):
    """What is kept for an optimizer. It hangs there, not at a module: it may lead back to the optimizer and the model.

    Code of a user's that goes through the attributes of the optimizer finds an empty dict, which trees and files leave
    out.
    A copy or a pickle has an empty dict too.

    Attributes:
        own: What the step takes for the object, where that is no optimizer of MLX's.
        programs: What `fast_step` keeps of each model and set of options, with a weak reference to the model.
        models: How many models `fast_step` has seen with the optimizer.
        told: The identities of those of which it has warned that their options change again and again.
    """

    __slots__ = ("__weakref__", "_of", "models", "own", "programs", "told")

    def __init__(self, optimizer: Any) -> None:
        """Begin without anything."""
        super().__init__()
        self._of = weakref.ref(optimizer)
        self.own: OwnOptimizer | None = None
        self.programs: dict[Any, tuple[weakref.ref[Any], Any]] = {}
        self.models = 0
        self.told: set[int] = set()

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        """Become an empty dict."""
        return dict, ()

    @staticmethod
    def at(optimizer: Any) -> Hung | None:
        """Return what hangs at an optimizer, if anything does; a shallow copy shows what hangs at the first one."""
        found = getattr(optimizer, "__dict__", {}).get(HUNG)
        return found if isinstance(found, Hung) and found._of() is optimizer else None

    @classmethod
    def made_at(cls, optimizer: Any) -> Hung:
        """Return what hangs at an optimizer, made where there is nothing."""
        if (found := cls.at(optimizer)) is None:
            found = vars(optimizer)[HUNG] = cls(optimizer)
        return found


class OwnOptimizer(Optimizer):
    """What the step takes in the place of a user's object. It does not keep that alive, but its attributes.

    Attributes:
        attributes: The attributes of the object: the same dict, so that both see what an update makes of them.
    """

    def __init__(self, own: Any) -> None:
        """Share the attributes."""
        Optimizer.__init__(self)
        self._own = weakref.ref(own)
        self.attributes = vars(own)

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
        """That of the object, where it has one."""
        return self.own.learning_rate

    def __getattr__(self, name: str) -> Any:
        """Look up what only the object has."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.own, name)


def as_optimizer(optimizer: Any) -> Optimizer:
    """Return an optimizer as it is, and of any other object with an `update` and attributes always the same one."""
    if isinstance(optimizer, Optimizer | dict | type) or not _updates(optimizer):  # a model is a dict, too
        return cast(Optimizer, optimizer)
    hung = Hung.made_at(optimizer)
    if hung.own is None:
        kind = type(optimizer)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        hung.own = type(kind.__name__, (OwnOptimizer,), names)(optimizer)
    return hung.own


def _updates(optimizer: Any) -> bool:
    has_attributes = hasattr(optimizer, "__dict__") and hasattr(type(optimizer), "__weakref__")
    return has_attributes and callable(getattr(optimizer, "update", None))
