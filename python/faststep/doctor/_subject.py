"""Subject of a diagnosis: the user's model, optimizer, loss and data, and batches of them that the rungs share."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.optimizers import Optimizer

TAKEN = 8  # batches that the rungs train on, again and again


@dataclass
class Subject:
    """A training as its parts.

    Attributes:
        model: The model.
        optimizer: The optimizer.
        loss_fn: The loss function.
        batches: The data.
        validation: Data of a validation; None: the batches that were taken.
        options: Options of `Step`, without `accumulate`.
        own_step: The user's own step, called with a batch; None where there is none.
        folder: Where checkpoints are tried.
        taken: The first batches, in their order.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_fn: Callable[..., Any]
    batches: Iterable[Any]
    validation: Iterable[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    own_step: Callable[..., Any] | None = None
    folder: Path | None = None
    taken: list[Any] = field(default_factory=list)

    def some(self) -> list[Any]:
        """Return the first batches; the data are read once for them."""
        if not self.taken:
            self.taken = list(itertools.islice(self.batches, TAKEN))
        return self.taken

    def fresh(self) -> Iterator[Any]:
        """Yield new batches; the first ones where a generator has no more."""
        batch = None
        for batch in self.batches:
            yield batch
        if batch is None:
            yield from self.taken


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what is no container in a tree, each with its place: `x`, `batch["ids"][0]`."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from leaves(part, f"{name}[{place}]")
    else:
        yield name, value


def arguments(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch by the arguments of the loss: a tuple's by position, a dict's by name."""
    if isinstance(batch, dict):
        for key, value in batch.items():
            yield from leaves(value, str(key))
    elif isinstance(batch, tuple):
        for place, value in enumerate(batch):
            yield from leaves(value, f"argument {place}")
    else:
        yield from leaves(batch, "argument 0")


def argument_names(loss_fn: Callable[..., Any]) -> list[str]:
    """Return the names of a loss function's positional arguments after the model; none where they are not known."""
    try:
        function = getattr(loss_fn, "loss_fn", loss_fn)  # of a `LossWithMetrics`
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [each.name for each in parameters if each.kind in kinds]
