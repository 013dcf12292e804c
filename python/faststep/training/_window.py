"""A step of the trainer: the batches of one update, whose results stay on the device until they are logged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from faststep._records import number
from faststep._step import StepOutput


@dataclass
class Window:
    """The batches of one update.

    Attributes:
        epoch: The epoch, from 0.
        outputs: What the step gave for each batch, lazy.
        items: Elements of the first array of each batch, in all: the tokens, of a language model.
        wait: Seconds that were waited for data.
        seconds: All of its time.
        before: What was read of it before a checkpoint from which it goes on.
    """

    epoch: int
    outputs: list[StepOutput] = field(default_factory=list)
    items: int = 0
    wait: float = 0.0
    seconds: float = 0.0
    before: list[tuple[float, float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.before) + len(self.outputs)

    def add(self, batch: Any, output: StepOutput) -> None:
        """Add a batch and what the step gave for it."""
        self.outputs.append(output)
        self.items += next((array.size for array in arrays_of(batch)), 0)

    def read(self) -> list[tuple[float, float]]:
        """Return the loss and the weight of every batch, 0 for one that was skipped; waits for them."""
        return self.before + [_read(output) for output in self.outputs]

    def record(self) -> dict[str, Any]:
        """Return the record of the step for loggers; wait for it."""
        batches = self.read()
        norm = self.outputs[-1].grad_norm if self.outputs else None
        return {
            "epoch": self.epoch,
            "loss": mean(batches),
            "grad_norm": None if norm is None else number(norm),
            "batches": len(batches),
            "skipped": sum(weight == 0 for _, weight in batches),
            "seconds": self.seconds,
            "wait": self.wait,
            "items": self.items,
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of a window that is open; waits for its batches."""
        return {"batches": self.read(), "items": self.items}


def reopen(state: dict[str, Any], epoch: int) -> Window:
    """Return the window that was open when `state` was taken."""
    before = [(float(loss), float(weight)) for loss, weight in state["batches"]]
    return Window(epoch, items=state["items"], before=before)


def mean(batches: list[tuple[float, float]]) -> float | None:
    """Return the weighted mean of losses, None where nothing has weight."""
    total = math.fsum(weight for _, weight in batches)
    return math.fsum(loss * weight for loss, weight in batches if weight) / total if total else None


def _read(output: StepOutput) -> tuple[float, float]:
    if bool(output.skipped):
        return 0.0, 0.0
    return number(output.loss), 1.0 if output.weight is None else number(output.weight)


def arrays_of(batch: Any) -> Iterator[mx.array]:
    """Return the arrays of a batch, in its order."""
    leaves: Any = tree_flatten(batch)
    return (leaf for _, leaf in leaves if isinstance(leaf, mx.array))
