"""The trainer: the loop around the step."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from faststep._random import mlx_key
from faststep._records import number as value_of
from faststep._step import Step, call_with, whole_number
from faststep.checkpoints import Checkpoint, CheckpointError, Checkpoints
from faststep.data import Interrupted, epochs_of, seconds_of
from faststep.loggers import Logger, Progress
from faststep.training import _bad_batches, _run_folder
from faststep.training._clock import Clock
from faststep.training._errors import Phase, TrainingError, phase_of_step, tagged
from faststep.training._guard import Guard, Tried
from faststep.training._result import Reason, Result, TrainingProgress
from faststep.training._run_log import Log
from faststep.training._signals import Signals
from faststep.training._validate import validate
from faststep.training._window import Window, reopen

_END = object()
Start = Literal["newest", "new", "best"] | int


class Trainer:
    """Trains: epochs or steps, validation, checkpoints from which it goes on exactly, logs.

    A step of the trainer is one update: `step.accumulate` batches, or what is left of them at the end of an epoch.

    Example:
        >>> import tempfile
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np
        >>> from faststep import Step
        >>> from faststep.data import Loader
        >>> from faststep.training import Trainer
        >>> model, x = nn.Linear(4, 1), np.ones((64, 4), np.float32)
        >>> step = Step(model, optim.Adam(1e-2), lambda model, x: mx.square(model(x) - 1).mean())
        >>> loader = Loader(x, batch_size=8, shuffle=True, seed=0)
        >>> with tempfile.TemporaryDirectory() as run:
        ...     result = Trainer(step, loader, run=run, epochs=3, loggers=[]).train()
        >>> result.reason, result.steps
        ('done', 24)
    """

    _reason: Reason | None
    _validated: int | None  # the step of the last validation, and of the last checkpoint
    _saved: int | None
    _metric: float | None  # of the last validation

    def __init__(
        self,
        step: Step,
        loader: Any,
        *,
        run: str | Path,
        steps: int | None = None,
        epochs: int | None = None,
        max_time: float | None = None,
        validation: Iterable[Any] | None = None,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] | Callable[[], Sequence[Logger]] | None = None,
        log_every: int = 20,
        validate_every: int | str = 100,
        validate_at_start: bool = False,
        validation_batches: int | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
        stop_after_bad: int = 10,
        update_ratio_every: int = 0,
        memory_limit: int | None = None,
        checkpoint_every: int | str = 200,
        keep_last: int = 3,
        keep_best: int = 1,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Check the arguments; nothing is read or written before `train`.

        Args:
            step: The step, with its model, optimizer, loss function and options.
            loader: A `faststep.data.Loader`, or anything that can be iterated over an epoch at a time and has `epoch`,
                `position`, `state` and `load_state` as that has.
            run: The folder for log and checkpoints; it is made where it is missing.
            steps: Stop after so many steps in all. None: by `epochs` or `max_time` alone.
            epochs: Stop after so many epochs.
            max_time: Stop after so many seconds of training, in all the processes that take part.
            validation: Batches for validation, which can be iterated again and again.
            callbacks: Are called in the course of the training.
            loggers: Get the log's records beside `run/log.jsonl`; or a function that makes them, which is called when
                the folder is held and the checkpoint is restored, before anything is written. None: a progress display.
            log_every: Steps between two intervals of the log; 5 seconds make one too.
            validate_every: Steps between two validations, or epochs: "1 epoch"; 0: at the end only.
            validate_at_start: Validate before the first step too.
            validation_batches: Validate on so many batches at most.
            patience: Stop when so many validations in a row have brought no better loss; None: never.
            min_delta: By how much a better loss has to be lower.
            stop_after_bad: Stop when so many batches in a row were skipped, and write a bundle with which it can be
                reproduced; 0: never.
            update_ratio_every: Steps between two measurements of the update's norm by that of the weights; 0: never.
            memory_limit: From so many bytes on MLX waits for work under way before it takes more
                (`mx.set_memory_limit`, in the whole process). None: leave it.
            checkpoint_every: Steps between two checkpoints, or epochs: "1 epoch"; 0: at the end and at the best
                validation only.
            keep_last: Keep so many of the newest checkpoints.
            keep_best: Keep so many of those with the lowest validation loss.
            config: What goes into the log as the configuration.

        Raises:
            TypeError: `step` or `loader` is something else, or a number is none.
            ValueError: Neither `steps` nor `epochs` is given, or a number is out of its range.
        """
        if not isinstance(step, Step):
            raise TypeError(f"step: expected a faststep.Step, got {type(step).__name__}")
        if missing := [name for name in ("epoch", "position", "state", "load_state") if not hasattr(loader, name)]:
            raise TypeError(
                f"loader: expected a faststep.data.Loader, got {type(loader).__name__} without {', '.join(missing)}"
            )
        if steps is None and epochs is None and max_time is None:
            raise ValueError("steps, epochs, max_time: expected at least one of them, got none")
        if max_time is not None and seconds_of(max_time) is None:
            raise ValueError(f"max_time: expected a number of seconds above 0, got {max_time!r}")
        numbers: dict[str, Any] = {"log_every": (log_every, 1), "patience": (patience, 1)}
        cadences = {"validate_every": validate_every, "checkpoint_every": checkpoint_every}
        numbers |= {name: (every, 0) for name, every in cadences.items() if epochs_of(every) is None}
        numbers |= {"steps": (steps, 1), "epochs": (epochs, 1), "validation_batches": (validation_batches, 1)}
        numbers |= {"stop_after_bad": (stop_after_bad, 0)}
        numbers |= {"keep_last": (keep_last, 1), "keep_best": (keep_best, 0), "memory_limit": (memory_limit, 1)}
        for name, (value, least) in (numbers | {"update_ratio_every": (update_ratio_every, 0)}).items():
            if value is not None:
                whole_number(name, value, least)
        if patience is not None and validation is None:
            raise ValueError("patience: expected validation data for it, got none")
        self.step, self.loader, self.validation, self.run = step, loader, validation, Path(run)
        self.steps, self.epochs, self.callbacks = steps, epochs, list(callbacks)
        self.log_every, self.validate_every, self.checkpoint_every = log_every, validate_every, checkpoint_every
        self.validation_batches, self.patience, self.min_delta = validation_batches, patience, min_delta
        self.stop_after_bad, self.update_ratio_every = stop_after_bad, update_ratio_every
        self.config, self.memory_limit = config, memory_limit
        self.max_time, self.validate_at_start = max_time, validate_at_start
        self._loggers = loggers
        self.checkpoints = Checkpoints(
            self.run / "checkpoints",
            keep_last=keep_last,
            keep_best=keep_best,
            on_damaged=lambda checkpoint: self._damaged.append(checkpoint),
        )
        self._damaged: list[Checkpoint] = []  # passed over; the log is told when it is open
        self._phase_of_step = phase_of_step(step.loss_fn)
        self._begin()

    # resets the progress; returns the signals to listen to
    def _begin(self) -> Signals:
        self._progress, self._reason = TrainingProgress(), None
        self.clock, self._began = Clock(), time.perf_counter()
        self._validated = self._saved = self._metric = None
        self._signals = Signals()
        return self._signals

    @property
    def number(self) -> int:
        """The number of steps made so far."""
        return self._progress.number

    @property
    def skipped(self) -> int:
        """The number of batches skipped so far."""
        return self._progress.skipped

    @property
    def best(self) -> float | None:
        """The lowest validation loss, None before the first one."""
        return self._progress.best

    @property
    def seconds(self) -> float:
        """Seconds of training, in all the processes that took part."""
        return self._progress.seconds + time.perf_counter() - self._began

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that asked for the end, None where there was none."""
        return self._signals.received

    def stop(self) -> None:
        """End the training behind the step under way, with a checkpoint."""
        self._reason = self._reason or "callback"

    def train(self, start: Start = "newest") -> Result:
        """Train to the end, from a checkpoint in the run's folder.

        The first SIGINT or SIGTERM ends the training behind the batch under way, with a checkpoint; `Result.reason`
        tells. The second one does what it does otherwise.

        Args:
            start: "newest": go on from the newest valid checkpoint, begin where there is none. "new": begin, and refuse
                a folder with checkpoints. "best", or the number of a step: go on from that checkpoint; those behind
                it go to `run/checkpoints_set_aside`.

        Returns:
            How it ended.

        Raises:
            TrainingError: Something failed; it tells where, and its cause is the exception itself.
            RunError: Another process trains in the same folder, or the folder cannot be used. Nothing has changed.
            CheckpointError: There is no such checkpoint, or it is of another training. Nothing has changed.
        """
        with _run_folder.locked(self.run), self._begin():
            _run_folder.check(self.run, self.step.model, self.step.optimizer)
            self.checkpoints.check()
            resumed = self._resume(start)
            loggers = self._loggers() if callable(self._loggers) else self._loggers
            if self.memory_limit is not None:
                mx.set_memory_limit(self.memory_limit)
            self._log = Log(self, [Progress()] if loggers is None else loggers)
            try:
                return self._train(resumed)
            except BaseException as error:
                with contextlib.suppress(Exception):  # the step may have failed for good
                    self._log.tell_steps()
                self._log.event("error", f"{type(error).__name__}: {error}", "error")
                self._wait_anyway()
                self._log.end("error")
                raise
            finally:
                self._log.close()

    # the error that ends the training is the one to be raised
    def _wait_anyway(self) -> None:
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._log.event("checkpoint", str(error), "error")

    def _train(self, resumed: bool) -> Result:
        self._guard = Guard(self.stop_after_bad, self.step.options.in_flight, self._progress.row)
        self._log.start(resumed)
        while self._damaged:
            self._log.damaged(self._damaged.pop(0))
        self._tell("on_start")
        if self.validate_at_start and not resumed:
            self._validate()
        while not self._finished():
            self._epoch()
        if self._signals.received is not None:
            self._log.event("signal", f"{self._signals.received.name}: saving, then leaving")
        elif self.number != self._validated:
            self._validate()
        if self.number != self._saved or self._progress.window:
            self._save()
        with self._tagged("checkpoint"), self.clock.phase("checkpoint"):
            self.checkpoints.wait()
        self._log.tell_interval()
        result = Result(self._reason or "done", self.number, self._log.interval.loss, self._progress.best)
        self._log.end(result.reason)
        self._tell("on_end", result)
        return result

    # one epoch, or what is left of it
    def _epoch(self) -> None:
        epoch, any_batch = self.loader.epoch, self.loader.position > 0
        try:
            for batch in self._batches():
                any_batch = True
                self._train_on(batch, epoch)
                if self._finished():
                    return
        except Interrupted:
            return
        if not any_batch:
            raise TrainingError("the loader gave no batch", phase="data", **self._where())
        if self._progress.window is not None:
            with self._tagged("update"), self.clock.phase("step"):
                self.step.flush()
            self._end_window(self._progress.window)
        self._at_intervals(epoch + 1)

    def _batches(self) -> Iterator[Any]:
        batches = iter(self.loader)
        if hasattr(self.loader, "on_wait"):
            self.loader.on_wait = self._on_wait
        try:
            while True:
                with self.clock.phase("data"), self._tagged("data"):
                    batch = next(batches, _END)
                if batch is _END:
                    return
                yield batch
        finally:
            if hasattr(self.loader, "on_wait"):
                self.loader.on_wait = None
            if hasattr(batches, "close"):
                batches.close()

    # a worker that hangs does not keep a signal from ending the training
    def _on_wait(self, seconds: float) -> None:
        if self._signals.received is not None:
            raise Interrupted

    def _train_on(self, batch: Any, epoch: int) -> None:
        window = self._progress.window = self._progress.window or Window(epoch)
        key, position = mlx_key(), self.loader.position - 1
        self._log.ratio.before(self.number)
        with self.clock.phase("step"), tagged(self._phase_of_step, self._where):
            output = call_with(batch, self.step)
        window.add(batch, output)
        self._judge(Tried(batch, key, output, epoch, position))
        if len(window) >= self.step.accumulate:
            self._end_window(window)

    def _judge(self, tried: Tried) -> None:
        if self.step.options.nonfinite == "allow":
            return
        self._count_bad(self._guard.push(tried))
        if self._guard.full:
            raise self._give_up(tried)

    def _count_bad(self, bad: list[Tried]) -> None:
        for each in bad:
            self._why = self._explained(each)
            self._log.event("skipped", f"batch {each.position} of epoch {each.epoch} was skipped: {self._why}")
        self._progress.skipped, self._progress.row = self._progress.skipped + len(bad), self._guard.row

    # a loss may have an `explain(value, *batch)` that says why a batch is bad
    def _explained(self, tried: Tried) -> str:
        loss = value_of(tried.output.loss)
        explain = getattr(self.step.loss_fn, "explain", None)
        return (explain and call_with(tried.batch, functools.partial(explain, loss))) or f"loss {loss:.6g}"

    def _give_up(self, tried: Tried) -> TrainingError:
        self._save()
        with self._tagged("checkpoint"):
            self.checkpoints.wait()
            path = _bad_batches.write(self.run / "bundles", self.step, tried, self.number, self.config)
        text = (
            f"{self._guard.row} bad batches in a row were skipped, because loss or gradients are not finite or the "
            f"loss is above max_loss. The last one ({self._why}) is in {path}, with the weights and the random state "
            f"that it met: `faststep reproduce {path}`"
        )
        return TrainingError(text, phase="gradient", **self._where())

    # a window is full, or is all that is left of an epoch
    def _end_window(self, window: Window) -> None:
        progress = self._progress
        progress.window, progress.number = None, progress.number + 1
        self._log.on_update(window)
        self._tell("on_step", progress.number)
        self._at_intervals()

    # behind a step, or behind so many epochs
    def _at_intervals(self, epochs: int = 0) -> None:
        if _is_due(self.validate_every, self.number, epochs):
            self._validate()
        if _is_due(self.checkpoint_every, self.number, epochs) and self._saved != self.number:
            self._save()

    def _finished(self) -> bool:
        if self._reason is None and self._signals.received is not None:
            self._reason = "signal"
        if self._reason is None and self.max_time is not None and self.seconds >= self.max_time:
            self._reason = "max_time"
        enough = self.steps is not None and self.number >= self.steps
        enough = enough or (self.epochs is not None and self.loader.epoch >= self.epochs)
        return self._reason is not None or enough

    def _validate(self) -> None:
        if self.validation is None:
            return
        with self.clock.phase("validation"), self._tagged("validation"):
            began, progress = time.perf_counter(), self._progress
            loss, batches = validate(self.step, self.validation, self.validation_batches)
            seconds = time.perf_counter() - began
        self._validated, self._metric = progress.number, loss
        best = math.isfinite(loss) and (progress.best is None or loss < progress.best - self.min_delta)
        progress.best, progress.stale = (loss, 0) if best else (progress.best, progress.stale + 1)
        self._log.tell_steps()
        fields = {"loss": loss, "batches": batches, "seconds": seconds, "best": best, "epoch": self.loader.epoch}
        self._log.write("validation", fields)
        self._tell("on_validation", loss, best)
        if best or self._saved == progress.number or self.checkpoints.would_keep(loss):
            self._save()
        if self._is_stale() and self._reason is None:
            text = f"no better validation loss than {progress.best} in {progress.stale} validations"
            self._log.event("early_stop", text, "info")
            self._reason = "early_stop"

    def _is_stale(self) -> bool:
        return self.patience is not None and self._progress.stale >= self.patience

    def _save(self) -> None:
        metric = self._metric if self._validated == self.number else None
        with self.clock.phase("checkpoint"), self._tagged("checkpoint"):
            self._log.tell_steps()
            self._count_bad(self._guard.settle())
            began, progress = time.perf_counter(), self._progress
            progress.seconds, self._began = self.seconds, began
            path = self.checkpoints.save(
                self.step, self.loader, number=progress.number, numbers=progress.state(), metric=metric
            )
            pause = time.perf_counter() - began
        self._saved = progress.number
        self._log.write("checkpoint", {"path": str(path), "pause": pause, "metric": metric})
        self._tell("on_checkpoint", path)

    def _resume(self, start: Start) -> bool:
        found = None if start == "new" else self.checkpoints.restore(self.step, self.loader, start)
        if found is None:
            there = self.checkpoints.list()
            if there and start == "new":
                raise CheckpointError(f"{self.run}: there are checkpoints of another training")
            if there:
                raise CheckpointError(
                    f"{self.checkpoints.folder}: expected a valid checkpoint, found {len(there)} that are damaged; "
                    f"move the folder away to begin again. The newest: {there[-1].problem}"
                )
            return False
        numbers = dict(found.numbers)
        window = numbers.pop("window")
        self._progress = TrainingProgress(**numbers)
        self._progress.window = None if window is None else reopen(window, self.loader.epoch)
        self._saved = self._validated = self.number
        self._metric = found.metric
        self._reason = "early_stop" if self._is_stale() else None
        return True

    def _tell(self, method: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            with self._tagged("callback"):
                getattr(callback, method)(self, *arguments)

    def _tagged(self, phase: Phase) -> Any:
        return tagged(lambda error: phase, self._where)

    def _where(self) -> dict[str, int]:
        return {"step": self.number, "epoch": self.loader.epoch, "batch": max(0, self.loader.position - 1)}


def _is_due(every: int | str, step: int, epochs: int) -> bool:
    """Whether an interval in steps or epochs has ended, behind a step (`epochs` is 0) or behind so many epochs."""
    of_epochs = epochs_of(every)
    if of_epochs is not None:
        return epochs > 0 and epochs % of_epochs == 0
    return not epochs and bool(every) and step % int(every) == 0


class Callback:
    """Methods that are called in the course of a training; a subclass overrides what it needs.

    `trainer.step` is the `faststep.Step`, `trainer.number` says how many steps are made, and `trainer.stop()` ends the
    training behind the one under way. An exception ends it too, as a `TrainingError` of the phase "callback".

    Example:
        >>> from faststep.training import Callback
        >>> class Unfreeze(Callback):
        ...     def on_step(self, trainer, number):
        ...         if number == 1000:
        ...             trainer.step.model.unfreeze()
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called when training begins, or goes on from a checkpoint."""

    def on_step(self, trainer: Trainer, number: int) -> None:
        """Called after each step with their number; the last ones may still be under way on the device."""

    def on_validation(self, trainer: Trainer, loss: float, best: bool) -> None:
        """Called after a validation with the mean loss, and whether it is the best so far."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Called when a checkpoint has been taken; it may not be written yet."""

    def on_end(self, trainer: Trainer, result: Result) -> None:
        """Called when training has ended, whatever the reason."""
