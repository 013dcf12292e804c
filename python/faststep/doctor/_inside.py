"""Rungs in the process of the caller, where there is no script to run again: a second thread watches."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faststep.doctor._kept import Kept
from faststep.doctor._rungs import Rung, climb
from faststep.doctor._subject import Subject
from faststep.doctor._watch import Measured, Tail

_PAUSE = 0.05


class Inside:
    """Rungs in this process.

    Args:
        subject: What is diagnosed.
        job: Steps and seconds of a rung.
        timeout: Seconds without a step after which a rung hangs.
    """

    notes = (
        "each rung ran in this process, not in one of its own: there is no script to run again (a notebook, an "
        "interpreter, a test)",
    )

    def __init__(self, subject: Subject, job: dict[str, Any], timeout: float) -> None:
        self._subject, self._job, self._timeout = subject, job, timeout

    def climb(self, rung: Rung, measured: Measured, tell: Callable[[Measured, bool], None]) -> None:
        """Climb a rung, and put model, optimizer and random states back."""
        began = time.monotonic()
        kept = Kept(self._subject.model, self._subject.optimizer, self._subject.batches)
        with tempfile.TemporaryDirectory(prefix="faststep-doctor-") as folder:
            files = {name: str(Path(folder, name)) for name in ("events", "stacks")}
            job = {**self._job, "rung": rung.name, **files}
            watcher = _Watcher(measured, job, self._timeout)
            try:
                with _interruptible(), watcher:
                    climb(self._subject, job)
            except KeyboardInterrupt:
                if measured.status != "hangs":
                    raise
                measured.error = None  # the interrupt itself
            finally:
                kept.restore()
                measured.seconds = time.monotonic() - began
        del tell  # told behind the rung only: the terminal belongs to the rung


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Have SIGINT raise `KeyboardInterrupt` in the block; a program in a shell's background ignores it otherwise."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Watcher:
    """A thread that reads a rung's record, and interrupts the main thread when nothing comes."""

    def __init__(self, measured: Measured, job: dict[str, Any], timeout: float) -> None:
        self._measured, self._job, self._timeout = measured, job, timeout
        self._tail = Tail(Path(job["events"]))
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="faststep-doctor", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        status = self._measured.status
        self._tail.read(self._measured)
        if status == "hangs":
            self._measured.status = status

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._done.wait(_PAUSE):
            if self._tail.read(self._measured):
                last = time.monotonic()
            if time.monotonic() - last > self._timeout:
                self._hang()
                return

    def _hang(self) -> None:
        measured = self._measured
        with Path(self._job["stacks"] + "-now").open("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            measured.stack, measured.status = file.read(), "hangs"
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not self._done.wait(5.0):  # native code does not hear it
            print(f"{measured.title} hangs in native code, and cannot be interrupted:", file=sys.stderr)
            print(f"{measured.stack}\nend this process by hand", file=sys.stderr, flush=True)
