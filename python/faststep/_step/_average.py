"""Models that show their average at the moment (`Step.average`): no step, save or restore works on one."""

from __future__ import annotations

from collections import Counter

import mlx.nn as nn

_showing: Counter[int] = Counter()  # ids of models, by how many blocks show their average


def begin_showing(model: nn.Module) -> None:
    """Mark a model as showing its average; blocks nest."""
    _showing[id(model)] += 1


def end_showing(model: nn.Module) -> None:
    """Take back one `begin_showing`."""
    _showing[id(model)] -= 1
    if not _showing[id(model)]:
        del _showing[id(model)]


def shows_average(model: nn.Module) -> bool:
    """Return whether a model shows its average."""
    return id(model) in _showing


def refuse_average(model: nn.Module) -> None:
    """Refuse a step on a model that shows its average.

    Raises:
        RuntimeError: It does.
    """
    if shows_average(model):
        raise RuntimeError(
            "the model shows its average: expected steps after the `with step.average()` block, got one in it"
        )
