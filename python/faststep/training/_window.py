"""A step of the trainer: the batches of one update, whose results stay on the device until they are logged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from faststep._records import number
from faststep._step import StepOutput
from faststep.metrics import Average, of_loss, scalars


class _Lazy(NamedTuple):
    """The scalars of one batch, on the device: nothing else that a loss returns is kept until it is logged."""

    loss: mx.array | None  # None where it comes with the update, over all ranks
    weight: Any
    skipped: mx.array | bool
    metrics: dict[str, Any]


@dataclass
class Window:
    """The batches of one update.

    Attributes:
        epoch: The epoch, from 1.
        batches: How many there are.
        skipped: How many of those that were read were skipped.
        average: Loss and metrics of those that were read.
        samples: Samples in them.
        tokens: Tokens in them, 0 where the data does not say so.
        wait: Seconds that were waited for data.
        seconds: All of its time.
        time: When it was made, in Unix seconds.
        rate: The learning rate, a scalar on the device; None where it is unknown.
    """

    epoch: int
    batches: int = 0
    skipped: int = 0
    average: Average = field(default_factory=Average)
    samples: int = 0
    tokens: int = 0
    wait: float = 0.0
    seconds: float = 0.0
    time: float = 0.0
    rate: Any = None
    _norm: mx.array | None = None
    _unread: list[_Lazy] = field(default_factory=list)

    def __len__(self) -> int:
        return self.batches

    def add(self, output: StepOutput, samples: int, tokens: int, ranks: int = 1) -> None:
        """Add what the step gave for a batch, and how much was in it on one of the ranks."""
        loss = None if ranks > 1 and output.updated is False else output.loss
        self._unread.append(_Lazy(loss, output.weight, output.skipped, scalars(output.aux)))
        self._norm = output.grad_norm
        self.batches, self.samples = self.batches + 1, self.samples + ranks * samples
        self.tokens += ranks * tokens

    def read(self) -> None:
        """Read what is on the device; wait for it."""
        whole = 0.0  # the weight of what the next loss is a mean over
        for lazy in self._unread:
            if bool(lazy.skipped):
                self.skipped += 1
                continue
            weight = 1.0 if lazy.weight is None else number(lazy.weight)
            whole += weight
            if lazy.loss is not None:
                self.average.add({"loss": number(lazy.loss)}, whole)
                whole = 0.0
            self.average.add({name: number(value) for name, value in lazy.metrics.items()}, weight)
        self._unread = []

    def record(self, loss_fn: Any) -> dict[str, Any]:
        """Return the record of the step for loggers; wait for it."""
        self.read()
        loss, metrics = self.average.read()
        metrics |= of_loss(loss_fn, loss)
        tokens = {"tokens": self.tokens} if self.tokens else {}
        return {
            "epoch": self.epoch,
            "loss": loss,
            **({"metrics": metrics} if metrics else {}),
            "grad_norm": None if self._norm is None else number(self._norm),
            "learning_rate": None if self.rate is None else number(self.rate),
            "batches": self.batches,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "wait": self.wait,
            "samples": self.samples,
            **tokens,
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of a window that is open; waits for its batches."""
        self.read()
        kept = ("epoch", "batches", "skipped", "samples", "tokens")
        return {"average": self.average.sums, **{name: getattr(self, name) for name in kept}}


def reopen(state: dict[str, Any]) -> Window:
    """Return the window that was open when `state` was taken."""
    return Window(**{**state, "average": Average(state["average"])})


def arrays_of(batch: Any) -> Iterator[mx.array]:
    """Return the arrays of a batch, in its order."""
    leaves: Any = tree_flatten(batch)
    return (leaf for _, leaf in leaves if isinstance(leaf, mx.array))


def rows_of(batch: Any) -> int:
    """Return the samples of a batch: the length of its first array that has one, 1 without such an array."""
    return next((array.shape[0] for array in arrays_of(batch) if array.ndim), 1)
