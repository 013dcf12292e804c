"""Interval records: means, rates and memory of the steps since the last one."""

from __future__ import annotations

import time
from typing import Any

from faststep._step import Step
from faststep.training._clock import Clock, memory
from faststep.training._window import mean

_SECONDS = 5.0  # that make an interval, however few the steps


class Interval:
    """The steps since the last interval.

    Attributes:
        loss: Their mean loss; that of the last interval where there has been none since. None at first.
    """

    def __init__(self, clock: Clock, every: int) -> None:
        """Start an interval.

        Args:
            clock: Where the time goes.
            every: Steps of an interval.
        """
        self.loss: float | None = None
        self._clock, self._every = clock, every
        self._waited, self._lapped = 0.0, time.perf_counter()
        self._steps: list[dict[str, Any]] = []
        self._count = 0

    def lap(self) -> tuple[float, float]:
        """Return the seconds since the last call: those waited for data, and all."""
        now, waited = time.perf_counter(), self._clock.total("data")
        wait, seconds = waited - self._waited, now - self._lapped
        self._waited, self._lapped = waited, now
        self._count += 1
        return wait, seconds

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of a step."""
        self._steps.append(record)

    def due(self) -> bool:
        """Whether the interval is over."""
        return self._count >= self._every or self._clock.elapsed >= _SECONDS

    def record(self, step: Step, loader: Any, left: int | None, skipped: int) -> dict[str, Any]:
        """Return the record of the interval, and start the next.

        Args:
            step: The step.
            loader: The loader.
            left: Steps to go, None where it is unknown.
            skipped: Batches that were skipped in all.
        """
        passed, count, steps = self._clock.elapsed, self._count, self._steps
        loss = mean([(each["loss"], each["batches"] - each["skipped"]) for each in steps if each["loss"] is not None])
        self.loss = self.loss if loss is None else loss
        norms = [each["grad_norm"] for each in steps if each["grad_norm"] is not None]
        items = sum(each["items"] for each in steps)
        spent = sum(each["seconds"] for each in steps)
        record: dict[str, Any] = {
            "epoch": loader.epoch,
            "batch": loader.position,
            "loss": loss,
            "grad_norm": norms[-1] if norms else None,
            "learning_rate": learning_rate(step.optimizer),
            "steps_per_second": count / passed if count else None,
            "items_per_second": items / spent if spent else None,
            "seconds": self._clock.read(),
            "memory": memory(),
            "skipped": skipped,
            "traces": step.stats.traced,
            "padding": getattr(getattr(loader, "stats", None), "efficiency", None),
            "eta": left * passed / count if left is not None and count else None,
        }
        self._steps, self._count, self._waited = [], 0, 0.0
        return record


def learning_rate(optimizer: Any) -> float | None:
    """Return the current learning rate; of the first one, where there are several optimizers."""
    while hasattr(optimizer, "optimizers"):
        optimizer = optimizer.optimizers[0]
    rate = getattr(optimizer, "learning_rate", None)
    return None if rate is None else float(rate)
