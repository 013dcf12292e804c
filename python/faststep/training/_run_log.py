"""The log of a run: the trainer's records, given to its loggers."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from faststep._native import environment
from faststep._records import number as value_of
from faststep._step import Step
from faststep.checkpoints import Checkpoint, Checkpoints
from faststep.loggers import JsonLines, Logger, Loggers
from faststep.training._clock import Clock, contention
from faststep.training._interval import Interval, epoch_of, learning_rate
from faststep.training._monitor import Monitor
from faststep.training._rank_times import RankTimes
from faststep.training._run_folder import LOG, counts
from faststep.training._update_ratio import UpdateRatio
from faststep.training._window import Window

_TRACES = 5  # traces that one interval logs


class Training(Protocol):
    """The part of a trainer that the log reads."""

    step: Step
    loader: Any
    validation: Any
    run: Path
    clock: Clock
    checkpoints: Checkpoints
    config: dict[str, Any] | None
    steps: int | None
    epochs: int | None
    log_every: int
    update_ratio_every: int
    monitor: Monitor

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
        """The best value of what is monitored."""


class Log:
    """The log of a run: `log.jsonl` in its folder, and other loggers beside.

    Attributes:
        interval: The steps since the last interval.
        ratio: How much updates change the weights.
    """

    def __init__(self, trainer: Training, loggers: Iterable[Logger]) -> None:
        """Open the file."""
        self._trainer = trainer
        first = trainer.step.ranks.rank == 0  # the others keep no log
        self._loggers = Loggers([JsonLines(trainer.run / LOG), *loggers] if first else [])
        self.interval = Interval(trainer.clock, trainer.log_every)
        self.ratio = UpdateRatio(trainer.step.model, trainer.update_ratio_every)
        self._rank_times = RankTimes(trainer.step.ranks)
        self._updates: deque[tuple[int, Window | dict[str, Any]]] = deque()  # steps and values not in the log yet
        self._crowded = False
        self._windows = 0  # steps among them
        self._read: int | None = None  # the last step that is in the log
        self._lock = threading.Lock()  # the heartbeat has a thread of its own
        self._traced = trainer.step.stats.traced

    def start(self, resumed: bool) -> None:
        """Log the start: what is trained, and where."""
        trainer = self._trainer
        plan: dict[str, Any] = {"resumed": resumed, "epoch": trainer.loader.epoch + 1, "config": trainer.config}
        plan |= {"steps": trainer.steps, "epochs": trainer.epochs, "batches_per_epoch": length_of(trainer.loader)}
        plan |= {"ranks": trainer.step.ranks.size} if trainer.step.ranks.size > 1 else {}
        plan |= {"accumulate": trainer.step.accumulate, "workers": getattr(trainer.loader, "workers", None)}
        loaders = {"train": trainer.loader, "validation": trainer.validation}
        data = dict(_summaries({name: getattr(each, "summary", None) for name, each in loaders.items()}))
        self.write("start", plan | environment() | counts(trainer.step.model) | ({"data": data} if data else {}))
        for name, each in data.items():
            for text in each.get("left_out", ()):
                self.event("data", f"{name}: {text}")
        self._tell_unweighted(data)
        self._tell_rounding()

    def _tell_unweighted(self, data: Mapping[str, Any]) -> None:
        """Tell where batches of other numbers of tokens count alike."""
        trainer = self._trainer
        windows = ["accumulated gradients"] * (trainer.step.accumulate > 1)
        means = windows + ["validations"] * (trainer.validation is not None)
        differ = any(each.get("shortest") != each.get("longest") for each in data.values())
        if means and differ and not trainer.step.options.weighted:
            text = f"in {' and '.join(means)} a batch of few tokens counts as much as one of many"
            self.event("weighted", f"{text}: step.weighted: true weighs them by their tokens")

    def _tell_rounding(self) -> None:
        """Tell where weights in half precision are updated as they are."""
        step = self._trainer.step
        if step.options.compute_dtype is None:
            parameters: Any = tree_flatten(step.model.trainable_parameters())
            halves = {name: each.dtype for name, each in parameters if each.dtype in (mx.bfloat16, mx.float16)}
            if halves:
                name, dtype = next(iter(halves.items()))
                kind = str(dtype).removeprefix("mlx.core.")
                self.event(
                    "precision",
                    f"{name}{', ...' if len(halves) > 1 else ''}: {kind} weights without float32 masters lose what an "
                    f"update changes by less than a step of {kind}: step.compute_dtype: {kind} keeps masters",
                )

    def on_update(self, window: Window) -> None:
        """Take the window of an update; log the interval when it is over."""
        self.interval.lap(window, self._trainer.number)
        window.rate = learning_rate(self._trainer.step.optimizer)
        self._updates.append((self._trainer.number, window))
        self._windows += 1
        self.ratio.after()
        behind = self.interval.behind(self._trainer.step.options.in_flight)
        if behind is not None:
            self.tell_interval(behind)

    def values(self, values: Mapping[str, Any]) -> None:
        """Take values of the user's own; they are read, and logged, when the step that they belong to is."""
        mx.async_eval([value for value in values.values() if isinstance(value, mx.array)])
        self._updates.append((self._trainer.number, {str(name): value for name, value in values.items()}))

    def tell_steps(self, behind: int = 0) -> None:
        """Log all steps but the last ones, which may still be under way; wait for them."""
        while self._updates and (self._windows > behind or not isinstance(self._updates[0][1], Window)):
            number, update = self._updates.popleft()
            if isinstance(update, Window):
                self._windows -= 1
                record = self.write("step", update.record(self._trainer.step.loss_fn), number, update.time)
                self.interval.add(update, record)
                self._read = number
            else:
                self.write("values", {"values": {name: value_of(value) for name, value in update.items()}}, number)

    def tell_interval(self, behind: int = 0) -> None:
        """Log the interval since the last one, up to so many steps before the last one, where it has any."""
        self.tell_steps(behind)
        self._tell_traces()
        self._tell_written()
        self._tell_contention()
        trainer = self._trainer
        last = self.interval.told = trainer.number if self._read is None else self._read
        record = self.interval.record(trainer.step, trainer.loader, self._left(), trainer.skipped)
        self.write("interval", record | self.ratio.read() | self._rank_times.take(), last)

    def event(self, what: str, text: str, level: Literal["info", "warning", "error"] = "warning") -> None:
        """Log an event."""
        self.write("event", {"what": what, "text": text, "level": level, "epoch": epoch_of(self._trainer.loader)})

    def damaged(self, checkpoint: Checkpoint) -> None:
        """Log a damaged checkpoint that was passed over."""
        self.event("torn_checkpoint", f"passed over a damaged checkpoint: {checkpoint.problem}")

    def end(self, reason: str) -> None:
        """Log the end of the training."""
        self._tell_written()
        trainer = self._trainer
        fields = {"reason": reason, "seconds": trainer.seconds, "loss": self.interval.loss, "best": trainer.best}
        self.write("end", fields | {"monitor": trainer.monitor.name})

    def write(
        self, kind: str, fields: dict[str, Any], number: int | None = None, at: float | None = None
    ) -> dict[str, Any]:
        """Pass a record to all loggers and return it; its step is the current one, and its time now, unless given."""
        step = self._trainer.number if number is None else number
        record = {"kind": kind, "time": time.time() if at is None else at, "step": step} | fields
        with self._lock:
            self._loggers.log(record)
        return record

    def close(self) -> None:
        """Close all loggers."""
        self._loggers.close()

    def _tell_written(self) -> None:
        for written in self._trainer.checkpoints.take_written():
            fields = {"path": str(written.path), "seconds": written.seconds, "bytes": written.bytes}
            self.write("checkpoint_written", fields)

    # once, and not for a GPU
    def _tell_contention(self) -> None:
        if self._crowded or mx.default_device().type != mx.cpu:
            return
        text = contention(os.getloadavg()[0], os.cpu_count() or 1)
        if text is not None:
            self._crowded = True
            self.event("threads", text, "info")

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
        length = length_of(trainer.loader)
        if trainer.epochs is not None and length is not None:
            ends.append(trainer.epochs * math.ceil(length / trainer.step.accumulate))
        return max(0, min(ends) - trainer.number) if ends else None


def _summaries(found: Mapping[str, dict[str, Any] | None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what datasets say of themselves, by name; of several that are mixed each."""
    for name, each in found.items():
        if each is not None and "sources" in each:
            yield from _summaries({f"{name} {i}": part for i, part in enumerate(each["sources"], start=1)})
        elif each is not None:
            yield name, each


def length_of(loader: Any) -> int | None:
    """Return the batches of an epoch, None where they are not known."""
    try:
        return len(loader)
    except TypeError:
        return None
