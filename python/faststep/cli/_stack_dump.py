"""The stacks of a process whose threads all wait for Python's lock."""

from __future__ import annotations

import faulthandler
import sys
import threading
from types import TracebackType

_EVERY = 1.0  # seconds
_LATER = 5.0  # seconds behind the report of a hang, which needs the lock


class StackDump:
    """While it is entered, all stacks go to stderr when no Python code has run for that long in any thread.

    A report of a hang is written by a thread, which never runs where native code keeps Python's lock and hangs.

    Args:
        timeout: Seconds; None: never.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout, self._done = timeout, threading.Event()
        self._thread = threading.Thread(target=self._put_off, name="faststep-stacks", daemon=True)

    def __enter__(self) -> StackDump:
        if self._timeout is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._done.set()
        if self._timeout is not None:
            self._thread.join()

    def _put_off(self) -> None:
        while not self._done.wait(_EVERY):
            faulthandler.dump_traceback_later((self._timeout or 0) + _LATER, file=sys.__stderr__ or sys.stderr)
        faulthandler.cancel_dump_traceback_later()
