"""A folder of checkpoints: saved off the step's path, kept by age and by metric, restored exactly."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from faststep._step import Step
from faststep.checkpoints import _folder, _snapshot, _write
from faststep.checkpoints._checkpoint import Checkpoint
from faststep.checkpoints._errors import CheckpointError, CheckpointWarning, Damaged
from faststep.checkpoints._manifest import read_manifest
from faststep.checkpoints._snapshot import Stateful

LARGEST_NUMBER = 10**18 - 1


@dataclass(frozen=True)
class Written:
    """A checkpoint that has been written.

    Attributes:
        path: Its folder.
        bytes: The bytes of its files.
        seconds: How long writing took, in the background or not.
    """

    path: Path
    bytes: int
    seconds: float


class Checkpoints:
    """The checkpoints of a run.

    `save` takes a snapshot and returns; a thread writes it beside its place, brings it to the disk and puts it there by
    one rename. A process that is killed at any moment leaves the checkpoints that it had. `restore` puts the newest
    valid one into a step: weights, optimizer state, what the step keeps, the random states of MLX (this thread's),
    `random` and `numpy.random`, and a loader's position, so that training goes on as if it had not stopped.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, tempfile
        >>> from faststep import Step
        >>> from faststep.checkpoints import Checkpoints
        >>> def new_step():
        ...     model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        ...     return Step(model, optim.Adam(learning_rate=1e-2), lambda model, x: model(x).square().mean())
        >>> step, x = new_step(), mx.random.normal((16, 4))
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Checkpoints(folder.name, keep_last=2) as checkpoints:
        ...     for number in range(1, 6):
        ...         loss = step(x).loss
        ...         path = checkpoints.save(step, number=number, numbers={"epoch": 0}, metric=loss.item())
        >>> uninterrupted = [step(x).loss.item() for _ in range(3)]

        In another process, later:

        >>> step = new_step()
        >>> found = Checkpoints(folder.name).restore(step)
        >>> found.number, found.numbers, found.path.name
        (5, {'epoch': 0}, 'step-00000005')
        >>> [step(x).loss.item() for _ in range(3)] == uninterrupted
        True
        >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_best: int = 1,
        best: Literal["min", "max"] = "min",
        background: bool = True,
        on_damaged: Callable[[Checkpoint], object] | None = None,
    ) -> None:
        """Name the folder; nothing is read or written before the first call.

        Args:
            folder: Where the checkpoints are; made at the first save. It may hold nothing else, hidden files aside.
            keep_last: How many of the newest are kept; None: all. The old ones go when the new one is in its place:
                the disk needs room for one more.
            keep_best: How many are kept beside them for their metric.
            best: "min": the smallest metric is the best, "max": the largest.
            background: Write in a thread. The snapshot shares the arrays of model and optimizer, which the next steps
                then replace rather than overwrite: until it is written, both take memory (on CUDA the snapshot is a
                copy on the device). Without, `save` writes before it returns.
            on_damaged: Called by `restore` for each checkpoint that is damaged and passed over, whose `problem` says
                in which way; None: a `CheckpointWarning`.

        Raises:
            TypeError: A number is none.
            ValueError: An option is out of its range.
        """
        if keep_last is not None and operator.index(keep_last) < 1:
            raise ValueError(f"keep_last: expected a number from 1 on or None, got {keep_last}")
        if operator.index(keep_best) < 0:
            raise ValueError(f"keep_best: expected a number from 0 on, got {keep_best}")
        if best not in ("min", "max"):
            raise ValueError(f'best: expected "min" or "max", got {best!r}')
        self.folder = Path(folder)
        self._keep = _write.Keep(keep_last, keep_best, best)
        self._background = background
        self._on_damaged = on_damaged or _warn
        self._writer = _Writer()
        weakref.finalize(self, _Writer.leave, self._writer)

    def save(
        self,
        step: Step,
        loader: Stateful | None = None,
        *,
        number: int,
        numbers: dict[str, Any] | None = None,
        metric: float | None = None,
        healthy: bool = True,
    ) -> Path:
        """Take a snapshot and have it written; call it in the thread that trains.

        One checkpoint is written at a time: while an earlier one is under way, this waits for it, so that never more
        than one snapshot is in memory. One of the same number is replaced.

        Args:
            step: The step, with its model and optimizer.
            loader: What else has a `state` and `load_state`, of plain JSON values: a `faststep.data.Loader`.
            number: The number of the checkpoint: that of the trainer's step, from 0 on.
            numbers: Whatever else is to be known afterwards: plain JSON values.
            metric: What the best are found by. None or not finite: never among the best.
            healthy: False while batches are bad: such checkpoints never push out the newest healthy one.

        Returns:
            The folder in which the checkpoint will be.

        Raises:
            CheckpointError: The checkpoint before this one could not be written, and this one has not been begun;
                or there is something in the step that cannot be saved; or the folder holds something else or
                newer checkpoints. What was there before is there still.
        """
        self.wait()
        number = operator.index(number)
        if not 0 <= number <= LARGEST_NUMBER:
            raise CheckpointError(f"number: expected one from 0 to {LARGEST_NUMBER}, got {number}")
        _folder.refuse_foreign(self.folder)
        self._refuse_older(number)
        snapshot = _snapshot.take(step, loader, number, numbers or {}, metric, healthy)
        place = _folder.path_of(self.folder, number)
        self._writer.start(lambda: _write.write(self.folder, snapshot, self._keep), place)
        if not self._background:
            self.wait()
        return place

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointError: It could not be.
        """
        self._writer.wait()

    def close(self) -> None:
        """Wait as `wait` does; saving again is allowed."""
        self.wait()

    def __enter__(self) -> Checkpoints:
        """Return the checkpoints."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until everything is written."""
        self.wait()

    def take_written(self) -> list[Written]:
        """Return what has been written since the last call of this, the oldest first."""
        return self._writer.take_written()

    def restore(
        self, step: Step, loader: Stateful | None = None, which: Literal["newest", "best"] | int = "newest"
    ) -> Checkpoint | None:
        """Put a checkpoint into a step and a loader, the newest valid one; call it in the thread that will train.

        Every file is read and compared with its SHA-256, every name, shape and dtype with the model's and the
        optimizer's, before anything is changed.

        Args:
            step: A step made as the one that was saved.
            loader: A loader made as the one that was saved; None: it is left alone.
            which: "best": the valid one with the best metric; a number: the checkpoint of that number. Later ones
                are then set aside (see `set_aside`), so that it is the newest one.

        Returns:
            The checkpoint, None where there is no valid one: `list` tells whether there are damaged ones.

        Raises:
            CheckpointError: It is of another model, optimizer or loader; the differences are named. Or there is none
                of that number, none with a metric. Nothing has changed.
        """
        self.wait()
        if which != "newest":
            return self._go_back(self._chosen(which), step, loader)
        self._clean()
        for number, path in _folder.numbered(self.folder):
            try:
                return Checkpoint(path, number).restore(step, loader)
            except Damaged as error:
                self._tell(path, str(error))
        return None

    def _chosen(self, which: Literal["best"] | int) -> Checkpoint:
        valid = [each for each in self.list() if each.problem is None]
        if which == "best":
            best = self._keep.best_of({each.path: each.metric for each in valid if each.metric is not None}, 1)
            found = [each for each in valid if each.path in best]
        else:
            found = [each for each in valid if each.number == which]
        if not found:
            what = "with a metric" if which == "best" else f"of step {which}"
            there = ", ".join(str(each.number) for each in valid) or "none"
            raise CheckpointError(f"{self.folder}: expected a valid checkpoint {what}; there are: {there}")
        return found[0]

    def _go_back(self, chosen: Checkpoint, step: Step, loader: Stateful | None) -> Checkpoint:
        found = chosen.restore(step, loader)
        self.set_aside([each for each in self.list() if each.number > found.number])
        return found

    def set_aside(self, checkpoints: Iterable[Checkpoint]) -> Path | None:
        """Move checkpoints of this folder to one of their own beside it: `checkpoints_set_aside/1`, 2 and so on.

        Returns:
            That folder, None where there was nothing to be moved.

        Raises:
            CheckpointError: They cannot be moved.
        """
        self.wait()
        moved = [each.path for each in checkpoints]
        if not moved:
            return None
        try:
            with _folder.locked(self.folder, _folder.PATIENCE):
                return _folder.set_aside(self.folder, moved)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: checkpoints cannot be set aside: {error.strerror}") from error

    def would_keep(self, metric: float) -> bool:
        """Return whether a checkpoint of this metric would be kept for it, among the `keep_best` best."""
        self.wait()
        metrics: dict[Path, float] = {}
        for _, path in _folder.numbered(self.folder):
            with contextlib.suppress(Damaged):
                if (other := read_manifest(path)["metric"]) is not None:
                    metrics[path] = other
        new = self.folder / "new"
        return math.isfinite(metric) and new in self._keep.best_of({**metrics, new: metric}, self._keep.best)

    def check(self) -> None:
        """Refuse a folder that `save` would refuse.

        Raises:
            CheckpointError: It holds something else than checkpoints, or cannot be written to.
        """
        _folder.refuse_foreign(self.folder)
        if self.folder.exists() and not os.access(self.folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"{self.folder}: expected a folder that can be written to")

    def list(self) -> list[Checkpoint]:
        """Return the checkpoints, the oldest first, damaged ones too: `problem` says so.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        found = []
        for number, path in reversed(_folder.numbered(self.folder)):
            try:
                checkpoint = Checkpoint.at(path)
            except CheckpointError as error:
                checkpoint = Checkpoint(path, number, problem=str(error))
            if checkpoint.problem is None or os.path.lexists(path):  # another process may have removed it meanwhile
                found.append(checkpoint)
        return found

    def _tell(self, path: Path, problem: str) -> None:
        """Report a damaged checkpoint."""
        for checkpoint in self.list():
            if checkpoint.path == path:
                self._on_damaged(replace(checkpoint, problem=problem))

    def _refuse_older(self, number: int) -> None:
        """Refuse a checkpoint that a later `restore` would not find, because there are newer ones."""
        for newer, path in _folder.numbered(self.folder):
            if newer <= number:
                return
            try:
                read_manifest(path)
            except Damaged:
                continue
            raise CheckpointError(
                f"{self.folder}: expected a number from {newer} on, which there is already, got {number}: restore "
                "before you go on, or choose another folder"
            )

    def _clean(self) -> None:
        """Remove what a process left that died while it wrote, unless another one is writing."""
        try:
            with _folder.locked(self.folder, 0) as alone:
                if alone:
                    _folder.clean(self.folder)
        except (OSError, CheckpointError):
            return  # there is no such folder, it is read-only, or another process is at work: reading goes on


class _Writer:
    """The thread that writes; the interpreter's exit waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # a Ctrl-C in `join` would let the thread pass for ended
        self._lock, self._left = threading.Lock(), False  # whether nobody will ask for errors any more
        self._error: Exception | None = None
        self._written: list[Written] = []

    def start(self, write: Callable[[], int], place: Path) -> None:
        self._done.clear()
        self._thread = threading.Thread(target=self._run, args=(write, place), name="faststep-checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], int], place: Path) -> None:
        start = time.perf_counter()
        time.sleep(0.001)  # lets `start` return at once, which else waits for the interpreter's lock
        try:
            size = write()
        except Exception as error:
            self._error = error
        else:
            self._written.append(Written(place, size, time.perf_counter() - start))
        finally:
            with self._lock:
                self._done.set()
                left = self._left
            if left:
                self._print()

    def wait(self) -> None:
        if self._thread is not None:
            self._done.wait()
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint was not written: {error!r}") from error

    def take_written(self) -> list[Written]:
        taken, self._written = self._written, []
        return taken

    def leave(self) -> None:
        """Print the error of a write that was never waited for, now or when it has ended.

        Called when the checkpoints are collected, which may be in any thread, this one's too: it does not wait.
        """
        with self._lock:
            self._left = True
            done = self._done.is_set()
        if done:
            self._print()

    def _print(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            print(f"faststep: {error}", file=sys.stderr)


def _warn(checkpoint: Checkpoint) -> None:
    warnings.warn(f"passed over a damaged checkpoint: {checkpoint.problem}", CheckpointWarning, stacklevel=4)
