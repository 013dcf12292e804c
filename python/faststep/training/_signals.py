"""A request to stop that comes as a signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from faststep.data import Interrupted

GRACE = 5.0  # seconds from a signal until data that are still waited for are left
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """While it is entered, the first SIGINT or SIGTERM is remembered; the second one does what it does otherwise.

    Outside of the main thread, where Python has no say over signals, nothing is remembered.

    Args:
        may_interrupt: Whether `interrupt` may raise an exception in the main thread now; it is asked there.

    Attributes:
        received: The first signal, None before.
    """

    def __init__(self, may_interrupt: Callable[[], bool] = lambda: False) -> None:
        self.received: signal.Signals | None = None
        self._may_interrupt, self._interrupting = may_interrupt, False
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._remember) for each in _STOPS}
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._put_back(*_STOPS)

    @property
    def waiting(self) -> float:
        """Seconds since the first signal; 0 before."""
        return 0.0 if self.received is None else time.monotonic() - self._since

    def interrupt(self) -> None:
        """Raise `Interrupted` in the main thread, in the middle of what it waits for; another thread calls this.

        Nothing happens where it may not be raised, or where SIGINT was not Python's when this was entered.
        """
        if signal.SIGINT in self._before:
            self._interrupting = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._since, self.received = time.monotonic(), signal.Signals(number)
        # Python's handlers run between two of its instructions; SIGTERM's own ends a process inside C code too
        callable_ = callable(self._before[signal.SIGINT])
        self._put_back(*(() if callable_ else (signal.SIGINT,)), signal.SIGTERM)
        if callable_:
            signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._interrupting:  # the second one
            before = self._before[signal.SIGINT]
            self._put_back(signal.SIGINT)
            before(number, frame)
            return
        self._interrupting = False
        if self._may_interrupt():
            raise Interrupted

    def _put_back(self, *numbers: signal.Signals) -> None:
        for each in numbers:
            if each in self._before:
                signal.signal(each, self._before.pop(each))
