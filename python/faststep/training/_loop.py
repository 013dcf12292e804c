"""The loop of a training: epochs, windows, validations, checkpoints, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from faststep._random import mlx_key, mlx_seed
from faststep._records import number as value_of
from faststep._step import RankError, Ranks, Step, call_with
from faststep.checkpoints import Checkpoint, CheckpointError, Checkpoints
from faststep.data import Interrupted, epochs_of
from faststep.metrics import scalars
from faststep.training import _bad_batches, _callback, _ids, _made_of, _rates
from faststep.training._clock import Clock
from faststep.training._errors import Phase, TrainingError, tagged
from faststep.training._guard import Guard, Tried
from faststep.training._interval import epoch_of
from faststep.training._monitor import Monitor
from faststep.training._result import Reason, Result, TrainingProgress
from faststep.training._run_log import Log, length_of
from faststep.training._signals import Signals
from faststep.training._validate import Evaluation, evaluate, evaluating
from faststep.training._window import Window, reopen, rows_of

_END = object()
_WISHES: tuple[Reason | None, ...] = (None, "signal", "max_time", "callback")  # what a rank asks all for, by number
Resume = Literal["auto", "best"] | bool | int


class Loop:
    """The part of a `Trainer` that runs: its state over one training, and all that happens between start and end."""

    step: Step
    loader: Any
    run: Path
    validation: Iterable[Any] | None
    callbacks: list[Any]
    steps: int | None
    epochs: int | None
    max_time: float | None
    validate_every: int | str
    validate_at_start: bool
    load_best_at_end: bool
    validation_batches: int | None
    patience: int | None
    stop_after_bad: int
    checkpoint_every: int | str
    config: dict[str, Any] | None
    monitor: Monitor
    checkpoints: Checkpoints
    ranks: Ranks
    _rates: list[float | None]  # that the optimizer was made with
    _made: dict[str, dict[str, Any]]
    _damaged: list[Checkpoint]  # passed over; the log is told when it is open
    _phase_of_step: Callable[[BaseException], Phase]
    _log: Log | None
    _reason: Reason | None
    _asked: bool  # a callback asked for the end
    _validated: int | None  # the step of the last validation, and of the last checkpoint
    _saved: int | None
    _metric: float | None  # of the last validation

    # resets the progress; returns the signals to listen to
    def _begin(self) -> Signals:
        self._progress, self._reason = TrainingProgress(monitor=self.monitor.name, mode=self.monitor.mode), None
        self.validated: Evaluation | None = None
        self.clock, self._began = Clock(), time.perf_counter()
        self._validated = self._saved = self._metric = None
        self._checked, self._lost = False, list[str]()
        self._changed, self._differs = list[str](), list[str]()  # rates; and what else is not as it was
        self._asked = False
        alone = self.ranks.size == 1  # a rank leaves at an update, with the others
        self._signals = Signals(lambda: alone and bool(getattr(self.loader, "reading", False)))
        return self._signals

    # an error is told to the other ranks, but for one that they have too: a ring that is lost would wait for ever
    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not isinstance(error.__cause__ or error, RankError):
                self.ranks.fail()
            raise

    # an error is in the log before other ranks are waited for
    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the step may have failed for good
                self._logs.tell_steps()
            self._logs.event("error", f"{type(error).__name__}: {error}", "error")
            self._wait_anyway()
            self._logs.end("error")
            raise

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
        for text in self._changed:
            self._logs.event("learning_rate", text)
        for text in self._differs:
            self._logs.event("resume", f"{text}; to start a new training, use another folder")
        if resumed and self._finished():
            self._logs.event("resume", self._nothing_left())
        self._tell("on_start")
        if self.validate_at_start and not resumed:
            self._validate()
        while not self._finished():
            self._epoch()
        signal_ends = self._signals.received is not None if self.ranks.size == 1 else self._reason == "signal"
        if signal_ends:
            name = "a signal to another rank" if self._signals.received is None else self._signals.received.name
            self._logs.event("signal", f"{name}: saving, then leaving")
        elif self.number != self._validated:
            self._validate()
        if self.number != self._saved or self._progress.window:
            self._save()
        with self._tagged("checkpoint"), self.clock.phase("checkpoint"):
            self.checkpoints.wait()
            self.ranks.agree(0)
            self.ranks.gather(None, "checkpoint")  # the folder is as it stays
        self._logs.tell_interval()
        result = self._result()
        if self.load_best_at_end and result.best_checkpoint is not None:
            average = self.step.options.ema_decay is not None
            weights = Checkpoint.at(result.best_checkpoint).weights(average=average)
            self.step.model.load_weights([(name, self.step.own_part(name, each)) for name, each in weights.items()])
        self._tell("on_end", result)
        self._logs.tell_steps()
        self._logs.end(result.reason)
        return result

    def _nothing_left(self) -> str:
        ends = {"steps": self.steps, "epochs": self.epochs, "max_time": self.max_time}
        given = ", ".join(f"{name}={value}" for name, value in ends.items() if value is not None)
        return (
            f"nothing is left to train: the checkpoint of step {self.number} is the end of this training "
            f"({self._reason or given}). To train on, raise it; to start a new training, use another folder"
        )

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
        if not any_batch:
            self._tell("on_epoch_start", epoch)
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
        self._tell("on_epoch_end", epoch)

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
        if self._signals.received is not None and self.ranks.size == 1:
            raise Interrupted

    def _train_on(self, batch: Any, epoch: int, samples: int, tokens: int) -> None:
        window = self._progress.window = self._progress.window or Window(epoch)
        key, position = mlx_key(), self.loader.position - 1
        self._logs.ratio.before(self.number)
        with self.clock.phase("step"), tagged(self._phase_of_step, self._where):
            output = call_with(batch, self.step)
        if not self._checked:
            self._check(output.aux, samples)
        window.add(output, samples, tokens, self.ranks.loaders)
        self._judge(Tried(batch, key, output, epoch, position))
        if len(window) >= self.step.accumulate:
            self._end_window(window)

    # what can be known once a batch has been trained on
    def _check(self, aux: tuple[Any, ...], samples: int) -> None:
        self._checked = True
        if self.validation is not None:
            try:
                loss_fn = self.step.loss_fn
                others = [name for kind in ("of_loss", "of_all") for name in getattr(loss_fn, kind, {})]
                self.monitor.check(["loss", *scalars(aux), *others])
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
            path = self.run / "bundles"
            with self.step.whole_optimizer():
                if self.ranks.rank == 0:
                    path = _bad_batches.write(path, self.step, tried, self.number, self.config)
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
        if self._reason is None:
            out_of_time = self.max_time is not None and self.seconds >= self.max_time
            asked = [self._signals.received is not None, out_of_time, self._asked]
            wish = next((number for number, each in enumerate(asked, start=1) if each), 0)
            self._reason = _WISHES[self.ranks.agree(wish)]
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
                limits = self.validation_batches, self.clock.touch
                found = evaluate(self.step, self.validation, *limits, ranks=self.ranks)
                seconds, value = time.perf_counter() - began, self.monitor.value(found)
            self._validated, self.validated, self._metric = progress.number, found, value
            best = self.monitor.improves(value, progress.best)
            progress.best, progress.stale = (value, 0) if best else (progress.best, progress.stale + 1)
            progress.best_step = progress.number if best else progress.best_step
            self._logs.tell_steps()
            fields = found._asdict() | {"seconds": seconds, "best": best, "epoch": epoch_of(self.loader)}
            self._logs.write("validation", fields | {"monitor": self.monitor.name, "value": value})
            if math.isnan(found.loss):
                self._logs.event("validation", f"the validation loss is NaN, over {found.batches} batches")
            self._tell("on_validation", found.loss, best)
        due = best or self._saved == progress.number
        if due or self.ranks.gather(self.ranks.rank == 0 and self.checkpoints.would_keep(value), "checkpoint")[0]:
            self._save()
        if self._is_stale() and self._reason is None:
            text = f"no better {self.monitor.name} than {progress.best} in {progress.stale} validations"
            self._logs.event("early_stop", text, "info")
            self._reason = "early_stop"

    def _is_stale(self) -> bool:
        return self.patience is not None and self._progress.stale >= self.patience

    def _save(self) -> None:
        metric = self._metric if self._validated == self.number else None
        with self.clock.phase("checkpoint"), self._tagged("checkpoint"):
            self._logs.tell_steps()
            self._count_bad(self._guard.settle())
            began, progress = time.perf_counter(), self._progress
            progress.seconds, self._began = self.seconds, began
            numbers = progress.state() | {"callbacks": _callback.states(self.callbacks), "rates": self._rates}
            if self.ranks.size > 1:
                numbers["random"] = self.ranks.gather(mlx_seed(), "checkpoint")
            numbers |= {"made": self._made}
            about: dict[str, Any] = {"numbers": numbers, "metric": metric, "healthy": not self._is_sick(metric)}
            path = self.checkpoints.folder
            with self.step.whole_optimizer():
                if self.ranks.rank == 0:
                    path = self.checkpoints.save(self.step, self.loader, number=progress.number, **about)
            pause = time.perf_counter() - began
        self._saved = progress.number
        self._logs.write("checkpoint", {"path": str(path), "pause": pause, "metric": metric})
        self._tell("on_checkpoint", path)

    # while batches are bad, or the last validation was
    def _is_sick(self, metric: float | None) -> bool:
        return self._progress.row > 0 or (metric is not None and not math.isfinite(metric))

    def _resume(self, resume: Resume) -> bool:
        if resume not in ("auto", "best") and not isinstance(resume, int):
            raise ValueError(f'resume: expected "auto", "best", True, False or the number of a step, got {resume!r}')
        found = self._restored(resume)
        if found is None:
            there = self.checkpoints.list() if self.ranks.rank == 0 else []
            if there and resume is False:
                raise CheckpointError(f"{self.run}: there are checkpoints of another training")
            if there:
                raise CheckpointError(
                    f"{self.checkpoints.folder}: expected a valid checkpoint, found {len(there)} that are damaged; "
                    f"move the folder away to begin again. The newest: {there[-1].problem}"
                )
            if resume is True:
                raise CheckpointError(f"{self.checkpoints.folder}: expected a checkpoint to go on from, found none")
            return False
        numbers = dict(found.numbers)
        self._seed(numbers.pop("random", []))
        window, states = numbers.pop("window"), numbers.pop("callbacks")
        self._changed = list(_rates.go_on(self.step.optimizer, self._rates, numbers.pop("rates", None)))
        self._differs = list(_made_of.differences(numbers.pop("made", {}), self._made))
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

    # the first rank chooses, and sets aside what is behind; the others take the same
    def _restored(self, resume: Resume) -> Checkpoint | None:
        found, which = None, "newest" if isinstance(resume, bool) or resume == "auto" else resume
        if resume is not False and self.ranks.rank == 0:
            found = self.checkpoints.restore(self.step, self.loader, which)
        chosen = self.ranks.gather(None if found is None else found.number, "checkpoint")[0]
        if self.ranks.rank > 0 and chosen is not None:
            found = self.checkpoints.restore(self.step, self.loader, chosen)
        return found

    # each rank goes on with its own random state; of a checkpoint of another number of ranks, with one like no other's
    def _seed(self, seeds: list[int]) -> None:
        rank = self.ranks.rank
        if self.ranks.loaders > 1:
            mx.random.seed(seeds[rank] if len(seeds) == self.ranks.size else mlx_seed() + rank)

    def _tell(self, method: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            with self._tagged("callback"):
                getattr(callback, method, _nothing)(self, *arguments)

    def _tagged(self, phase: Phase) -> Any:
        return tagged(lambda error: phase, self._where)

    def _where(self) -> dict[str, int]:
        return {"step": self.number, "epoch": self.loader.epoch + 1, "batch": max(0, self.loader.position - 1)}


def _nothing(*arguments: Any) -> None:
    """Do nothing: for a callback that is no `Callback` and has not all of the methods."""


def _is_due(every: int | str, step: int, epochs: int) -> bool:
    """Return whether an interval in steps or epochs has ended, after a step (`epochs` is 0) or so many epochs."""
    of_epochs = epochs_of(every)
    if of_epochs is not None:
        return epochs > 0 and epochs % of_epochs == 0
    return not epochs and bool(every) and step % int(every) == 0
