"""The log of a run: the trainer's records, given to its loggers."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

from faststep._native import environment
from faststep._step import Step
from faststep.checkpoints import Checkpoint, Checkpoints
from faststep.loggers import JsonLines, Logger, Loggers
from faststep.training._clock import Clock
from faststep.training._interval import Interval
from faststep.training._run_folder import LOG, counts
from faststep.training._update_ratio import UpdateRatio
from faststep.training._window import Window

_TRACES = 5  # traces that one interval logs


class Training(Protocol):
    """The part of a trainer that the log reads."""

    step: Step
    loader: Any
    run: Path
    clock: Clock
    checkpoints: Checkpoints
    config: dict[str, Any] | None
    steps: int | None
    epochs: int | None
    log_every: int
    update_ratio_every: int

    @property
    def number(self) -> int:
        """Steps made so far."""

    @property
    def skipped(self) -> int:
        """Batches skipped so far."""

    @property
    def seconds(self) -> float:
        """Seconds of training."""

    @property
    def best(self) -> float | None:
        """The best validation loss."""


class Log:
    """The log of a run: `log.jsonl` in its folder, and other loggers beside.

    Attributes:
        interval: The steps since the last interval.
        ratio: How much updates change the weights.
    """

    def __init__(self, trainer: Training, loggers: Iterable[Logger]) -> None:
        """Open the file."""
        self._trainer = trainer
        self._loggers = Loggers([JsonLines(trainer.run / LOG), *loggers])
        self.interval = Interval(trainer.clock, trainer.log_every)
        self.ratio = UpdateRatio(trainer.step.model, trainer.update_ratio_every)
        self._updates: deque[tuple[int, Window]] = deque()  # steps that are not in the log yet
        self._traced = trainer.step.stats.traced

    def start(self, resumed: bool) -> None:
        """Log the start: what is trained, and where."""
        trainer = self._trainer
        plan: dict[str, Any] = {"resumed": resumed, "epoch": trainer.loader.epoch, "config": trainer.config}
        plan |= {"steps": trainer.steps, "epochs": trainer.epochs, "batches_per_epoch": _length(trainer.loader)}
        plan |= {"accumulate": trainer.step.accumulate}
        self.write("start", plan | environment() | counts(trainer.step.model))

    def on_update(self, window: Window) -> None:
        """Take the window of an update; log the interval when it is over."""
        window.wait, window.seconds = self.interval.lap()
        self._updates.append((self._trainer.number, window))
        self.ratio.after()
        if self.interval.due():
            self.tell_interval(self._trainer.step.options.in_flight)

    def tell_steps(self, behind: int = 0) -> None:
        """Log all steps but the last ones, which may still be under way; wait for them."""
        while len(self._updates) > behind:
            number, window = self._updates.popleft()
            self.interval.add(self.write("step", window.record(), number))

    def tell_interval(self, behind: int = 0) -> None:
        """Log the interval since the last one."""
        self.tell_steps(behind)
        self._tell_traces()
        trainer = self._trainer
        for written in trainer.checkpoints.take_written():
            fields = {"path": str(written.path), "seconds": written.seconds, "bytes": written.bytes}
            self.write("checkpoint_written", fields)
        record = self.interval.record(trainer.step, trainer.loader, self._left(), trainer.skipped)
        self.write("interval", record | self.ratio.read())

    def event(self, what: str, text: str, level: Literal["info", "warning", "error"] = "warning") -> None:
        """Log an event."""
        self.write("event", {"what": what, "text": text, "level": level, "epoch": self._trainer.loader.epoch})

    def damaged(self, checkpoint: Checkpoint) -> None:
        """Log a damaged checkpoint that was passed over."""
        self.event("torn_checkpoint", f"passed over a damaged checkpoint: {checkpoint.problem}")

    def end(self, reason: str) -> None:
        """Log the end of the training."""
        trainer = self._trainer
        fields = {"reason": reason, "seconds": trainer.seconds, "loss": self.interval.loss, "best": trainer.best}
        self.write("end", fields)

    def write(self, kind: str, fields: dict[str, Any], number: int | None = None) -> dict[str, Any]:
        """Pass a record to all loggers and return it; its step is the current one unless given."""
        step = self._trainer.number if number is None else number
        record = {"kind": kind, "time": time.time(), "step": step} | fields
        self._loggers.log(record)
        return record

    def close(self) -> None:
        """Close all loggers."""
        self._loggers.close()

    def _tell_traces(self) -> None:
        stats = self._trainer.step.stats
        new = stats.traces[-min(_TRACES, stats.traced - self._traced) :] if stats.traced > self._traced else ()
        self._traced = stats.traced
        for trace in new:
            self.event("trace", f"traced in {trace.seconds:.2f} s: {trace.cause}", "info")

    # steps to go, where it can be known
    def _left(self) -> int | None:
        trainer = self._trainer
        ends = [] if trainer.steps is None else [trainer.steps]
        length = _length(trainer.loader)
        if trainer.epochs is not None and length is not None:
            ends.append(trainer.epochs * math.ceil(length / trainer.step.accumulate))
        return max(0, min(ends) - trainer.number) if ends else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
