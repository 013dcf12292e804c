"""A search for a learning rate: a few steps with a rate that rises from each to the next.

Smith, "Cyclical Learning Rates for Training Neural Networks" (2017, https://arxiv.org/abs/1506.01186).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from faststep._records import number
from faststep._step import Step, call_with
from faststep.training import _rates

_KEPT = 0.9  # of the smoothed loss, from step to step
_FALLEN = 0.95  # of the first losses, below which the least one is one
_DIVERGED, _SURE = 4.0, 5  # times the least loss, which ends the search; behind so many steps


class FoundRate(NamedTuple):
    """Result of a search.

    Attributes:
        rates: The learning rate of each step.
        losses: The loss of each step, smoothed over those before it.
        diverged: Whether the search ended because the loss rose to a multiple of the least one, or was not finite.
    """

    rates: list[float]
    losses: list[float]
    diverged: bool

    @property
    def best(self) -> float | None:
        """The rate with the least loss, behind which the loss rises; None where it has hardly fallen."""
        least = min(self.losses, default=0.0)
        return self.rates[self.losses.index(least)] if least < _FALLEN * min(self.losses[:3], default=0.0) else None

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate with the least loss, which has room to both sides; None where the loss has not fallen."""
        return None if self.best is None else self.best / 10


def find_rate(
    step: Step, batches: Iterable[Any], *, low: float = 1e-7, high: float = 1.0, steps: int = 100
) -> FoundRate:
    """Train some steps with a learning rate that rises by the same factor each time.

    Model and optimizer are trained meanwhile: take new ones for the training itself. Of an optimizer that consists of
    several, the rates keep their ratios, and the first one's are told.

    Args:
        step: The step, whose optimizer has constant learning rates.
        batches: What it is trained on, again from the beginning where they end.
        low: The first rate.
        high: The last one.
        steps: How many updates, three at least.

    Raises:
        ValueError: A rate is scheduled or missing, or the arguments fit no search.
    """
    if not 0 < low < high or steps < 3:
        raise ValueError(f"expected 0 < low < high and 3 steps or more, got {low}, {high} and {steps}")
    parts = list(_rates.parts(step.optimizer))
    given = [_rates.rate_of(each) for each in parts]
    if None in given or 0.0 in given or any(_rates.schedule_of(each) is not None for each in parts):
        raise ValueError("find_rate: expected constant learning rates above 0, got a schedule, 0 or none")
    endless = itertools.chain.from_iterable(itertools.repeat(batches))
    rates: list[float] = []
    losses: list[float] = []
    average, diverged = 0.0, False
    for count in range(steps):
        rate = low * (high / low) ** (count / (steps - 1))
        for part, each in zip(parts, given, strict=True):
            part.learning_rate = rate * each / given[0]
        loss = _train(step, [next(endless) for _ in range(step.accumulate)])
        average = _KEPT * average + (1 - _KEPT) * loss
        smoothed = average / (1 - _KEPT ** (count + 1))
        diverged = not math.isfinite(loss) or (count >= _SURE and smoothed > _DIVERGED * max(min(losses), 1e-9))
        if diverged:
            break
        rates.append(rate)
        losses.append(smoothed)
    return FoundRate(rates, losses, diverged)


def _train(step: Step, window: list[Any]) -> float:
    """Train on a window; return its mean loss, infinity where a batch was skipped."""
    outputs = [call_with(batch, step) for batch in window]
    losses = [math.inf if bool(each.skipped) else number(each.loss) for each in outputs]
    return sum(losses) / len(losses)
