"""The trainer as its user sees it: options, start and stop, and the callbacks."""

from __future__ import annotations

import contextlib
import difflib
import functools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import numpy as np

from faststep._files import numbered
from faststep._step import Step, whole_number
from faststep.checkpoints import Checkpoints
from faststep.data import epochs_of, seconds_of
from faststep.loggers import Logger, Progress
from faststep.metrics import LossWithMetrics, Metric
from faststep.training import _hang, _ids, _made_of, _rates, _run_folder
from faststep.training._errors import phase_of_step
from faststep.training._guard import without_warning
from faststep.training._hang import OnHang
from faststep.training._heartbeat import Heartbeat
from faststep.training._loop import Loop, Resume
from faststep.training._monitor import Monitor
from faststep.training._result import Result
from faststep.training._run_log import Log
from faststep.training._trial import FEW, OneBatch


class Trainer(Loop):
    """Trains: epochs or steps, validation, checkpoints from which it goes on exactly, logs.

    A step of the trainer is one update: `step.accumulate` batches, or what is left of them at the end of an epoch.

    **Metrics** are the scalars in a dict that the loss function returns beside the loss, `(loss, {"accuracy": ...})`
    (with `weighted=True`: `(loss, weight, {...})`), and what `metrics` computes. They are averaged as the loss is,
    over the steps of an interval and over a validation, and stay on the device until they are logged.

    **Ranks.** With a step that has a `group`, each rank makes a trainer, with a loader that is shared (`rank`,
    `world_size`). Rank 0 has the run's folder, log and checkpoints; all of them end behind the same step.

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
        load_best_at_end: bool = False,
        fast_dev_run: bool = False,
        overfit_one_batch: bool = False,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Check the arguments; nothing is read or written before `train`.

        Args:
            step: The step, with its model, optimizer, loss function and options.
            loader: A `faststep.data.Loader`, or any iterable over one epoch at a time with the same `epoch`,
                `position`, `state` and `load_state`.
            run: The folder for log and checkpoints; it is made if it is missing. `{n}` in its name stands for the next
                free number: "runs/cnn-{n}" is runs/cnn-1, then runs/cnn-2.
            steps: Stop after so many steps in all. None: by `epochs` or `max_time` alone.
            epochs: Stop after so many epochs.
            max_time: Stop after so many seconds of training, the time before a resume included.
            validation: Batches for validation, which can be iterated again and again.
            callbacks: Objects that are called during the training.
            loggers: Objects that get the log's records beside `run/log.jsonl`; or a function that makes them, which is
                called when the folder is locked and the checkpoint is restored, before anything is written. None: a
                progress display.
            log_every: Steps between two records of the log; there is one every 5 seconds, too.
            validate_every: Steps between two validations, or epochs: "1 epoch"; 0: at the end only.
            validate_at_start: Validate before the first step too.
            validation_batches: Validate on so many batches at most.
            metrics: Functions by name, each `metric(outputs, *batch)` and a scalar: `outputs` is what the loss function
                returns beside the loss, `(loss, outputs)`, or `(loss, weight, outputs)` with `weighted=True`. They are
                computed with the loss: `step.loss_fn` is replaced. `faststep.metrics` has `accuracy()`,
                `perplexity()`, which needs no outputs, and metrics of all predictions of a validation.
            monitor: The value that decides which checkpoint is the best, and when `patience` is over: "val/loss", or
                "val/" and the name of a metric.
            mode: "min": a smaller value of `monitor` is better. "max": a larger one. None: "min" for the loss and the
                perplexity; for others it has to be given.
            patience: Stop when so many validations in a row have brought no better value; None: never.
            min_delta: By how much a better value has to differ.
            stop_after_bad: Stop when so many batches in a row were skipped, and write a bundle that reproduces the last
                one; 0: never.
            update_ratio_every: Steps between two measurements of the norm of the update over that of the weights; 0:
                never.
            memory_limit: Above so many bytes MLX waits for running work before it takes more memory
                (`mx.set_memory_limit`, in the whole process). None: leave it.
            hang_timeout: Seconds without progress (no batch, no step, no validated batch) after which a report is
                written to `run/hang-STEP.txt` and shown: the stage, the batch, memory, the stacks of all threads. None:
                never.
            on_hang: "report": go on waiting after that. "exit": end the process with exit code 5, so that a supervisor
                can restart it from the newest checkpoint.
            checkpoint_every: Steps between two checkpoints, or epochs: "1 epoch"; 0: at the end and at the best
                validation only.
            keep_last: Keep so many of the newest checkpoints.
            keep_best: Keep so many of those with the best value of `monitor`.
            load_best_at_end: When the training has ended, load the weights of the best checkpoint into the model (their
                average, if there is one), for the code after `train`.
            fast_dev_run: Try everything out: four steps, a validation of two batches and a checkpoint, in a temporary
                folder in place of `run`, which is deleted with the trainer. `steps`, `epochs` and intervals are
                ignored.
            overfit_one_batch: Train on the first batch again and again, without validation: if model and loss are
                right, the loss goes to nearly zero.
            config: The configuration to put into the log.

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
        if overfit_one_batch:
            loader, validation, patience = OneBatch(loader), None, None
        self.monitor = Monitor(monitor, mode, min_delta)
        if metrics is not None:
            step.loss_fn = LossWithMetrics(step.loss_fn, metrics, weighted=step.options.weighted)
        self.step, self.loader, self.validation = step, loader, validation
        self.run = Path(numbered(str(run)))
        self.ranks = step.ranks
        self._refuse_unshared()
        self.steps, self.epochs, self.callbacks = steps, epochs, list(callbacks)
        self.log_every, self.validate_every, self.checkpoint_every = log_every, validate_every, checkpoint_every
        self.validation_batches, self.patience = validation_batches, patience
        self.stop_after_bad, self.update_ratio_every = stop_after_bad, update_ratio_every
        self.config, self.memory_limit = config, memory_limit
        self.max_time, self.validate_at_start = max_time, validate_at_start
        self.load_best_at_end = load_best_at_end
        self.hang_timeout, self.on_hang = hang_timeout, on_hang
        self._loggers = loggers
        if fast_dev_run:
            self.run = Path(tempfile.mkdtemp())
            weakref.finalize(self, shutil.rmtree, self.run, ignore_errors=True)
            vars(self).update(FEW)
        self.checkpoints = Checkpoints(
            self.run / "checkpoints",
            keep_last=keep_last,
            keep_best=keep_best,
            best=self.monitor.mode,
            on_damaged=lambda checkpoint: self._damaged.append(checkpoint),
        )
        self._damaged = []
        self._rates, self._made = _rates.given(step.optimizer), _made_of.made_of(step)
        self._phase_of_step = phase_of_step(step.loss_fn)
        self._log = None
        self._begin()

    def _refuse_unshared(self) -> None:
        """Refuse a loader that gives all ranks the same batches, or of ranks that share a model others to each."""
        if self.step.is_fully_sharded:
            raise ValueError(
                "step: expected a model without modules of nn.fully_shard, which wait for each other at each batch, a "
                "validation's too: train it in a loop of your own"
            )
        for name, loader in {"loader": self.loader, "validation": self.validation}.items():
            shared = getattr(loader, "world_size", None)
            if shared is not None and shared != self.ranks.loaders:
                if self.ranks.same_batch:
                    wanted = "the same on all ranks, which share a model, Loader(...) without rank and world_size"
                else:
                    options = f"rank={self.ranks.rank}, world_size={self.ranks.size}"
                    wanted = f"one that is shared by the ranks of the step, Loader(..., {options})"
                raise ValueError(f"{name}: expected {wanted}, got one with world_size={shared}")

    def stop(self) -> None:
        """End the training after the current step, with a checkpoint; with a group that of all ranks."""
        self._asked = True
        if self.ranks.size == 1:
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

    def train(self, resume: Resume = "auto") -> Result:
        """Train to the end, from a checkpoint in the run's folder.

        The first SIGINT or SIGTERM ends the training after the current batch, with a checkpoint; `Result.reason` says
        so. If it still waits for the `Loader` five seconds later, it drops that batch, and a resume takes it again. The
        second signal has its usual effect.

        Args:
            resume: "auto": continue from the newest valid checkpoint in `run`, or begin if there is none. The log says
                what has changed (the loss, the optimizer's settings, options, rates), and if nothing is left to train.
                True: the same, but refuse a folder without checkpoints. False: begin, and refuse a folder with
                checkpoints. "best", or the number of a step: continue from that checkpoint; later ones are moved to
                `run/checkpoints_set_aside`.

        Returns:
            How it ended.

        Raises:
            TrainingError: Something failed; it tells where, and its cause is the exception itself.
            RunError: Another process trains in the same folder, or the folder cannot be used. Nothing has changed.
            CheckpointError: There is no such checkpoint, or it is of another training. Nothing has changed.
            ValueError: `resume` is something else.
        """
        first = self.ranks.rank == 0  # which has the folder
        folder = _run_folder.locked(self.run) if first else contextlib.nullcontext()
        with folder, _ids.guarded(), without_warning(), self._begin(), self._told():
            if first:
                _run_folder.check(self.run, self.step.model, self.step.optimizer)
                self.checkpoints.check()
            resumed = self._resume(resume)
            given = self._loggers if first else []
            loggers = given() if callable(given) else given
            if self.memory_limit is not None:
                mx.set_memory_limit(self.memory_limit)
            self._log = Log(self, [Progress()] if loggers is None else loggers)
            try:
                hangs = functools.partial(_hang.report, self, self._log.event)
                parts = self.clock, self.loader, self._log.event, self._signals
                with Heartbeat(*parts, hang_timeout=self.hang_timeout, on_hang=hangs), self._told(), self._logged():
                    return self._train(resumed)
            finally:
                self._log.close()
                self._log = None


class Callback:
    """Methods that are called in the course of a training; a subclass overrides what it needs.

    `trainer.step` is the `faststep.Step`, `trainer.number` says how many steps are made, `trainer.log` logs values, and
    `trainer.stop()` ends the training after the current step. An exception ends it too, as a `TrainingError` of the
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

    def __init_subclass__(cls, **named: Any) -> None:
        """Refuse a method whose name is nearly that of one of these: it would never be called.

        Raises:
            TypeError: There is one.
        """
        super().__init_subclass__(**named)
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            alike = difflib.get_close_matches(name, known, 1, 0.85)
            if name.startswith("on_") and name not in known and alike:
                raise TypeError(f"{cls.__name__}.{name}: nothing calls it; did you mean {alike[0]}?")

    def on_start(self, trainer: Trainer) -> None:
        """Called when training begins, or goes on from a checkpoint."""

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        """Called before the first batch of an epoch with its number, from 1; not where a resume goes on within it."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """Called after the last batch of an epoch, and after the validation and checkpoint that are due there."""

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
