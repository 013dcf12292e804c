"""Interval records: means, rates and memory of the steps since the last one."""

from __future__ import annotations

import time
from typing import Any

from faststep._step import Step
from faststep._watch import memory
from faststep.metrics import Average, of_loss
from faststep.training._clock import Clock
from faststep.training._window import Window

_SECONDS = 5.0  # that make an interval, however few the steps


class Interval:
    """The steps since the last interval.

    Attributes:
        loss: Their mean loss; that of the last interval where there has been none since. None at first.
        metrics: The means of their metrics, in the same way.
        told: The last step of the last interval that was told.
    """

    def __init__(self, clock: Clock, every: int) -> None:
        """Start an interval.

        Args:
            clock: Where the time goes.
            every: An interval ends with each multiple of so many steps.
        """
        self.told: int | None = None
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self._clock, self._every = clock, every
        self._waited, self._lapped = 0.0, time.perf_counter()
        self._average = Average()
        self._norm: float | None = None
        self._count = self._samples = self._tokens = 0
        self._epoch: int | None = None
        self._number = 0
        self._rate: float | None = None
        self._first = True  # the first step traces, and compiles kernels: it is told at once, without rates

    def lap(self, window: Window, number: int) -> None:
        """Put into the window of a step the seconds since the last one, those waited for data, and all; count it."""
        now, waited = time.perf_counter(), self._clock.total("data")
        window.wait, window.seconds, window.time = waited - self._waited, now - self._lapped, time.time()
        self._waited, self._lapped = waited, now
        self._count, self._epoch = self._count + 1, window.epoch
        self._number = number
        self._samples, self._tokens = self._samples + window.samples, self._tokens + window.tokens

    def add(self, window: Window, record: dict[str, Any]) -> None:
        """Add a step that has been read, with its record."""
        self._average.join(window.average)
        self._norm = record["grad_norm"] if record["grad_norm"] is not None else self._norm
        self._rate = record["learning_rate"]

    def behind(self, in_flight: int) -> int | None:
        """Return how many of the last steps come after the interval, where it is over; None where it is not.

        Those steps may still be running, and nothing waits for them: an interval is reported that many steps after its
        end. One that ends because of its time waits, which costs little then.
        """
        if self._first or self._clock.elapsed >= _SECONDS:
            return 0
        last = self._number - in_flight
        return in_flight if last > (self.told or 0) and last % self._every == 0 else None

    def record(self, step: Step, loader: Any, left: int | None, skipped: int) -> dict[str, Any]:
        """Return the record of the interval, and start the next.

        Args:
            step: The step.
            loader: The loader.
            left: Steps to go, None where it is unknown.
            skipped: Batches that were skipped in all.
        """
        passed, count = self._clock.elapsed, self._count
        training = passed - self._clock.total("validation") - self._clock.total("checkpoint")
        counts = {"steps": count, "samples": self._samples, "tokens": self._tokens}
        known = not self._first and training > 0
        rates = {f"{name}_per_second": each / training for name, each in counts.items() if each and known}
        loss, metrics = self._average.read()
        metrics |= of_loss(step.loss_fn, loss)
        if loss is not None:
            self.loss, self.metrics = loss, metrics
        record: dict[str, Any] = {
            "epoch": epoch_of(loader) if self._epoch is None else self._epoch,
            "batch": loader.position,
            "loss": loss,
            **({"metrics": metrics} if metrics else {}),
            "grad_norm": self._norm,
            "learning_rate": self._rate,
            **rates,
            "seconds": self._clock.read(),
            "memory": memory(),
            "skipped": skipped,
            "traces": step.stats.traced,
            "padding": getattr(getattr(loader, "stats", None), "efficiency", None),
            "eta": left * passed / count if left is not None and count and known else None,
        }
        self._average, self._norm, self._first = Average(), None, False
        self._count = self._samples = self._tokens = 0
        self._waited = 0.0
        return record


def epoch_of(loader: Any) -> int:
    """Return the epoch of the last batch, from 1."""
    return int(loader.epoch + (loader.position > 0 or loader.epoch == 0))


def learning_rate(optimizer: Any) -> Any:
    """Return the current learning rate, lazy; of the first one, where there are several optimizers.

    It is read behind `Optimizer.state`, which would bring all moments up to date; the step itself keeps the rate so.
    """
    while hasattr(optimizer, "optimizers"):
        optimizer = optimizer.optimizers[0]
    return vars(optimizer).get("_state", {}).get("learning_rate")
