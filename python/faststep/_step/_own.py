"""Optimizers that are no `mlx.optimizers.Optimizer`: objects with an `update(model, gradients)`."""

from __future__ import annotations

import weakref
from typing import Any, cast

from mlx.optimizers import Optimizer


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


_known: dict[int, tuple[weakref.ref[Any], OwnOptimizer]] = {}  # by the identity of the object


def as_optimizer(optimizer: Any) -> Optimizer:
    """Return an optimizer as it is, and of any other object with an `update` and attributes always the same one."""
    if isinstance(optimizer, Optimizer | dict | type) or not _updates(optimizer):  # a model is a dict, too
        return cast(Optimizer, optimizer)
    key = id(optimizer)
    known = _known.get(key)
    if known is None or known[0]() is not optimizer:
        kind = type(optimizer)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        own = type(kind.__name__, (OwnOptimizer,), names)(optimizer)
        known = _known[key] = weakref.ref(optimizer, lambda gone: _forget(key, gone)), own
    return known[1]


def _updates(optimizer: Any) -> bool:
    has_attributes = hasattr(optimizer, "__dict__") and hasattr(type(optimizer), "__weakref__")
    return has_attributes and callable(getattr(optimizer, "update", None))


def _forget(key: int, gone: weakref.ref[Any]) -> None:
    if (known := _known.get(key)) and known[0] is gone:
        del _known[key]
