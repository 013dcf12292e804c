"""The trainer: the loop around the step."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import numpy as np

from faststep._random import mlx_key
from faststep._records import number as value_of
from faststep._step import Step, call_with, whole_number
from faststep.checkpoints import Checkpoint, CheckpointError, Checkpoints
from faststep.data import Interrupted, epochs_of, seconds_of
from faststep.loggers import Logger, Progress
from faststep.metrics import LossWithMetrics, Metric, scalars
from faststep.training import _bad_batches, _callback, _hang, _ids, _run_folder
from faststep.training._clock import Clock
from faststep.training._errors import Phase, TrainingError, phase_of_step, tagged
from faststep.training._guard import Guard, Tried
from faststep.training._hang import OnHang
from faststep.training._heartbeat import Heartbeat
from faststep.training._monitor import Monitor
from faststep.training._result import Reason, Result, TrainingProgress
from faststep.training._run_log import Log, length_of
from faststep.training._signals import Signals
from faststep.training._validate import Evaluation, evaluate, evaluating
from faststep.training._window import Window, reopen, rows_of

_END = object()
Start = Literal["newest", "new", "best"] | int


class Trainer:
    """Trains: epochs or steps, validation, checkpoints from which it goes on exactly, logs.

    A step of the trainer is one update: `step.accumulate` batches, or what is left of them at the end of an epoch.

    **Metrics** are the scalars in a dict that the loss function returns beside the loss, `(loss, {"accuracy": ...})`
    (with `weighted=True`: `(loss, weight, {...})`), and what `metrics` computes. They are averaged as the loss is,
    over the steps of an interval and over a validation, and stay on the device until they are logged.

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
        metrics: Mapping[str, Metric] | None = None,
        monitor: str = "val/loss",
        mode: Literal["min", "max"] | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
        stop_after_bad: int = 10,
        update_ratio_every: int = 0,
        memory_limit: int | None = None,
        hang_timeout: float | None = 600.0,
        on_hang: OnHang = "report",
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
            metrics: Functions by name, each `metric(outputs, *batch)` and a scalar: `outputs` is what the loss function
                returns beside the loss, `(loss, outputs)`, or `(loss, weight, outputs)` with `weighted=True`. They are
                traced with the loss, by `step.loss_fn`, which is replaced. `faststep.metrics` has `accuracy()`, and
                `perplexity()`, which needs no outputs.
            monitor: The value by which the best checkpoint is found, and `patience` judges: "val/loss", or "val/" and
                the name of a metric.
            mode: "min": a smaller value of `monitor` is better. "max": a larger one. None: "min" for the loss and the
                perplexity; for others it has to be given.
            patience: Stop when so many validations in a row have brought no better value; None: never.
            min_delta: By how much a better value has to differ.
            stop_after_bad: Stop when so many batches in a row were skipped, and write a bundle with which it can be
                reproduced; 0: never.
            update_ratio_every: Steps between two measurements of the update's norm by that of the weights; 0: never.
            memory_limit: From so many bytes on MLX waits for work under way before it takes more
                (`mx.set_memory_limit`, in the whole process). None: leave it.
            hang_timeout: Seconds without progress (no batch, no step, no validated batch) after which a report is
                written to `run/hang-STEP.txt` and shown: the stage, the batch, memory, the stacks of all threads. None:
                never.
            on_hang: "report": go on waiting after that. "exit": end the process with exit code 5, so that whoever
                watches it can start it again from the newest checkpoint.
            checkpoint_every: Steps between two checkpoints, or epochs: "1 epoch"; 0: at the end and at the best
                validation only.
            keep_last: Keep so many of the newest checkpoints.
            keep_best: Keep so many of those with the best value of `monitor`.
            config: What goes into the log as the configuration.

        Raises:
            TypeError: `step` or `loader` is something else, a metric is no function, or a number is none.
            ValueError: Neither `steps` nor `epochs` is given, a number is out of its range, or `mode` is missing.
        """
        if not isinstance(step, Step):
            raise TypeError(f"step: expected a faststep.Step, got {type(step).__name__}")
        if missing := [name for name in ("epoch", "position", "state", "load_state") if not hasattr(loader, name)]:
            raise TypeError(
                f"loader: expected a faststep.data.Loader, got {type(loader).__name__} without {', '.join(missing)}"
            )
        if steps is None and epochs is None and max_time is None:
            raise ValueError("steps, epochs, max_time: expected at least one of them, got none")
        if on_hang not in get_args(OnHang):
            raise ValueError(f"on_hang: expected one of {', '.join(get_args(OnHang))}, got {on_hang!r}")
        if hang_timeout is not None and seconds_of(hang_timeout) is None:
            raise ValueError(f"hang_timeout: expected a number of seconds above 0, got {hang_timeout!r}")
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
        self.monitor = Monitor(monitor, mode, min_delta)
        if metrics is not None:
            step.loss_fn = LossWithMetrics(step.loss_fn, metrics, weighted=step.options.weighted)
        self.step, self.loader, self.validation, self.run = step, loader, validation, Path(run)
        self.steps, self.epochs, self.callbacks = steps, epochs, list(callbacks)
        self.log_every, self.validate_every, self.checkpoint_every = log_every, validate_every, checkpoint_every
        self.validation_batches, self.patience = validation_batches, patience
        self.stop_after_bad, self.update_ratio_every = stop_after_bad, update_ratio_every
        self.config, self.memory_limit = config, memory_limit
        self.max_time, self.validate_at_start = max_time, validate_at_start
        self.hang_timeout, self.on_hang = hang_timeout, on_hang
        self._loggers = loggers
        self.checkpoints = Checkpoints(
            self.run / "checkpoints",
            keep_last=keep_last,
            keep_best=keep_best,
            best=self.monitor.mode,
            on_damaged=lambda checkpoint: self._damaged.append(checkpoint),
        )
        self._damaged: list[Checkpoint] = []  # passed over; the log is told when it is open
        self._phase_of_step = phase_of_step(step.loss_fn)
        self._log: Log | None = None
        self._begin()

    # resets the progress; returns the signals to listen to
    def _begin(self) -> Signals:
        self._progress, self._reason = TrainingProgress(monitor=self.monitor.name, mode=self.monitor.mode), None
        self.validated: Evaluation | None = None
        self.clock, self._began = Clock(), time.perf_counter()
        self._validated = self._saved = self._metric = None
        self._checked, self._lost = False, list[str]()
        self._signals = Signals(lambda: bool(getattr(self.loader, "reading", False)))
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
        """The best value of what is monitored, the validation loss by default; None before the first one."""
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

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values of your own at the current step, for callbacks: records of the kind "values".

        Args:
            values: Numbers, scalars of MLX, or texts, by name: names such as "samples/length" are tags of TensorBoard.
                Nothing waits for an array before the step itself is logged. A text is an event of that name.

        Raises:
            TypeError: A value is neither a scalar nor a text.
            RuntimeError: No training is under way.
        """
        if self._log is None:
            raise RuntimeError("log: expected a call while the trainer trains, got one outside of it")
        for name, value in values.items():
            plain = isinstance(value, int | float | str | np.number)
            if not plain and not (isinstance(value, mx.array) and value.size == 1):
                raise TypeError(f"log: {name}: expected a number, a scalar array or a text, got {value!r:.60}")
        scalars = {name: value for name, value in values.items() if not isinstance(value, str)}
        if scalars:
            self._log.values(scalars)
        for name in values.keys() - scalars.keys():
            self._log.event(name, values[name], "info")

    def train(self, start: Start = "newest") -> Result:
        """Train to the end, from a checkpoint in the run's folder.

        The first SIGINT or SIGTERM ends the training behind the batch under way, with a checkpoint; `Result.reason`
        tells. A `Loader` that is still waited for five seconds later is left in the middle of that batch, which is
        taken again on resume. The second signal does what it does otherwise.

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
        with _run_folder.locked(self.run), _ids.guarded(), self._begin():
            _run_folder.check(self.run, self.step.model, self.step.optimizer)
            self.checkpoints.check()
            resumed = self._resume(start)
            loggers = self._loggers() if callable(self._loggers) else self._loggers
            if self.memory_limit is not None:
                mx.set_memory_limit(self.memory_limit)
            self._log = Log(self, [Progress()] if loggers is None else loggers)
            try:
                hangs = functools.partial(_hang.report, self, self._log.event)
                parts = self.clock, self.loader, self._log.event, self._signals
                with Heartbeat(*parts, hang_timeout=self.hang_timeout, on_hang=hangs):
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
                self._log = None

    @property
    def _logs(self) -> Log:
        assert self._log is not None, "the log is open while the trainer trains"
        return self._log

    # the error that ends the training is the one to be raised
    def _wait_anyway(self) -> None:
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._logs.event("checkpoint", str(error), "error")

    def _train(self, resumed: bool) -> Result:
        self._guard = Guard(self.stop_after_bad, self.step.options.in_flight, self._progress.row)
        self._logs.start(resumed)
        while self._damaged:
            self._logs.damaged(self._damaged.pop(0))
        for name in self._lost:
            self._logs.event("callback", f"the checkpoint has a state of {name}, which is no callback of this training")
        self._tell("on_start")
        if self.validate_at_start and not resumed:
            self._validate()
        while not self._finished():
            self._epoch()
        if self._signals.received is not None:
            self._logs.event("signal", f"{self._signals.received.name}: saving, then leaving")
        elif self.number != self._validated:
            self._validate()
        if self.number != self._saved or self._progress.window:
            self._save()
        with self._tagged("checkpoint"), self.clock.phase("checkpoint"):
            self.checkpoints.wait()
        self._logs.tell_interval()
        result = self._result()
        self._tell("on_end", result)
        self._logs.tell_steps()
        self._logs.end(result.reason)
        return result

    def _result(self) -> Result:
        interval, validated, progress = self._logs.interval, self.validated, self._progress
        values = {"train/loss": interval.loss, **{f"train/{name}": each for name, each in interval.metrics.items()}}
        if validated is not None:
            values |= {"val/loss": validated.loss, **{f"val/{name}": each for name, each in validated.metrics.items()}}
        metrics = {name: each for name, each in values.items() if each is not None}
        kept = {each.number: each.path for each in self.checkpoints.list()}
        best = None if progress.best_step is None else kept.get(progress.best_step)
        last = kept.get(max(kept, default=0))
        return Result(self._reason or "done", self.number, interval.loss, progress.best, metrics, last, best)

    # one epoch, or what is left of it
    def _epoch(self) -> None:
        epoch, any_batch = self.loader.epoch + 1, self.loader.position > 0
        try:
            for batch, samples, tokens in self._batches():
                any_batch = True
                self._train_on(batch, epoch, samples, tokens)
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
        self._at_intervals(epoch)

    # with how many samples and tokens each has
    def _batches(self) -> Iterator[tuple[Any, int, int]]:
        batches, before = iter(self.loader), getattr(self.loader, "stats", None)
        if hasattr(self.loader, "on_wait"):
            self.loader.on_wait = self._on_wait
        try:
            while True:
                with self.clock.phase("data"), self._tagged("data"):
                    batch = next(batches, _END)
                if batch is _END:
                    return
                if before is None:
                    yield batch, rows_of(batch), 0
                else:
                    now = self.loader.stats
                    yield batch, now.items - before.items, now.tokens - before.tokens
                    before = now
        finally:
            if hasattr(self.loader, "on_wait"):
                self.loader.on_wait = None
            if hasattr(batches, "close"):
                batches.close()

    # a worker that hangs does not keep a signal from ending the training
    def _on_wait(self, seconds: float) -> None:
        if self._signals.received is not None:
            raise Interrupted

    def _train_on(self, batch: Any, epoch: int, samples: int, tokens: int) -> None:
        window = self._progress.window = self._progress.window or Window(epoch)
        key, position = mlx_key(), self.loader.position - 1
        self._logs.ratio.before(self.number)
        with self.clock.phase("step"), tagged(self._phase_of_step, self._where):
            output = call_with(batch, self.step)
        if not self._checked:
            self._check(output.aux, samples)
        window.add(output, samples, tokens)
        self._judge(Tried(batch, key, output, epoch, position))
        if len(window) >= self.step.accumulate:
            self._end_window(window)

    # what can be known once a batch has been trained on
    def _check(self, aux: tuple[Any, ...], samples: int) -> None:
        self._checked = True
        if self.validation is not None:
            try:
                self.monitor.check(["loss", *scalars(aux), *getattr(self.step.loss_fn, "of_loss", {})])
            except ValueError as error:
                raise TrainingError(str(error), phase="validation", **self._where()) from None
        size = getattr(self.loader, "batch_size", None)
        if isinstance(size, int) and samples < size and length_of(self.loader) == 1:
            text = f"batch_size is {size}, and there are {samples} samples: all of them are one batch"
            self._logs.event("batch_size", text)

    def _judge(self, tried: Tried) -> None:
        if self.step.options.nonfinite == "allow":
            return
        self._count_bad(self._guard.push(tried))
        if self._guard.full:
            raise self._give_up(tried)

    def _count_bad(self, bad: list[Tried]) -> None:
        for each in bad:
            self._why = self._explained(each)
            self._logs.event("skipped", f"batch {each.position} of epoch {each.epoch} was skipped: {self._why}")
        self._progress.skipped, self._progress.row = self._progress.skipped + len(bad), self._guard.row

    # a loss may have an `explain(value, *batch)` that says why a batch is bad
    def _explained(self, tried: Tried) -> str:
        loss = value_of(tried.output.loss)
        loss_fn = getattr(self.step.loss_fn, "loss_fn", self.step.loss_fn)  # of a `LossWithMetrics`
        explain = getattr(loss_fn, "explain", None)
        words = explain and call_with(tried.batch, functools.partial(explain, loss))
        return words or _ids.explain(loss, self.step.model, tried.batch) or f"loss {loss:.6g}"

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
        self._logs.on_update(window)
        self._tell("on_step", progress.number)
        self._at_intervals()

    # behind a step, or behind so many epochs
    def _at_intervals(self, epochs: int = 0) -> None:
        validated = self._validated == self.number and self._metric is not None  # by the process before, at its end
        if _is_due(self.validate_every, self.number, epochs) and not validated:
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
        progress = self._progress
        with evaluating(self.step):
            with self.clock.phase("validation"), self._tagged("validation"):
                began = time.perf_counter()
                found = evaluate(self.step, self.validation, self.validation_batches, self.clock.touch)
                seconds, value = time.perf_counter() - began, self.monitor.value(found)
            self._validated, self.validated, self._metric = progress.number, found, value
            best = self.monitor.improves(value, progress.best)
            progress.best, progress.stale = (value, 0) if best else (progress.best, progress.stale + 1)
            progress.best_step = progress.number if best else progress.best_step
            self._logs.tell_steps()
            fields = found._asdict() | {"seconds": seconds, "best": best, "epoch": self._last_epoch()}
            self._logs.write("validation", fields | {"monitor": self.monitor.name, "value": value})
            if math.isnan(found.loss):
                self._logs.event("validation", f"the validation loss is NaN, over {found.batches} batches")
            self._tell("on_validation", found.loss, best)
        if best or self._saved == progress.number or self.checkpoints.would_keep(value):
            self._save()
        if self._is_stale() and self._reason is None:
            text = f"no better {self.monitor.name} than {progress.best} in {progress.stale} validations"
            self._logs.event("early_stop", text, "info")
            self._reason = "early_stop"

    # that of the last batch, from 1
    def _last_epoch(self) -> int:
        return int(self.loader.epoch + (self.loader.position > 0 or self.loader.epoch == 0))

    def _is_stale(self) -> bool:
        return self.patience is not None and self._progress.stale >= self.patience

    def _save(self) -> None:
        metric = self._metric if self._validated == self.number else None
        with self.clock.phase("checkpoint"), self._tagged("checkpoint"):
            self._logs.tell_steps()
            self._count_bad(self._guard.settle())
            began, progress = time.perf_counter(), self._progress
            progress.seconds, self._began = self.seconds, began
            numbers = progress.state() | {"callbacks": _callback.states(self.callbacks)}
            path = self.checkpoints.save(self.step, self.loader, number=progress.number, numbers=numbers, metric=metric)
            pause = time.perf_counter() - began
        self._saved = progress.number
        self._logs.write("checkpoint", {"path": str(path), "pause": pause, "metric": metric})
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
        window, states = numbers.pop("window"), numbers.pop("callbacks")
        with self._tagged("callback"):
            self._lost = _callback.load_states(self.callbacks, states)
        now = {"monitor": self.monitor.name, "mode": self.monitor.mode}
        if now != {name: numbers[name] for name in now}:  # the best so far is of something else
            numbers |= {**now, "best": None, "best_step": None, "stale": 0}
        self._progress = TrainingProgress(**numbers)
        self._progress.window = None if window is None else reopen(window)
        self._saved, self._metric = self.number, found.metric
        self._validated = None if found.metric is None else self.number  # it may have been killed in between
        self._reason = "early_stop" if self._is_stale() else None
        return True

    def _tell(self, method: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            with self._tagged("callback"):
                getattr(callback, method)(self, *arguments)

    def _tagged(self, phase: Phase) -> Any:
        return tagged(lambda error: phase, self._where)

    def _where(self) -> dict[str, int]:
        return {"step": self.number, "epoch": self.loader.epoch + 1, "batch": max(0, self.loader.position - 1)}


def _is_due(every: int | str, step: int, epochs: int) -> bool:
    """Return whether an interval in steps or epochs has ended, after a step (`epochs` is 0) or so many epochs."""
    of_epochs = epochs_of(every)
    if of_epochs is not None:
        return epochs > 0 and epochs % of_epochs == 0
    return not epochs and bool(every) and step % int(every) == 0


class Callback:
    """Methods that are called in the course of a training; a subclass overrides what it needs.

    `trainer.step` is the `faststep.Step`, `trainer.number` says how many steps are made, `trainer.log` logs values, and
    `trainer.stop()` ends the training behind the step under way. An exception ends it too, as a `TrainingError` of the
    phase "callback".

    A callback that has `state` (plain JSON values) and `load_state(state)` is saved with each checkpoint, and goes on
    from there: `load_state` is called before `on_start` then.

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
        """Called after a validation with the mean loss, and whether it is the best so far.

        The model is as validation has it: in evaluation mode, with the average of the weights where there is one; what
        is drawn of `mx.random` here does not change the training. The metrics are in `trainer.validated.metrics`.
        """

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Called when a checkpoint has been taken; it may not be written yet."""

    def on_end(self, trainer: Trainer, result: Result) -> None:
        """Called when training has ended, whatever the reason."""
