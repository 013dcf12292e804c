"""A request to stop that comes as a signal."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_STOPS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """While it is entered, the first SIGINT or SIGTERM is remembered; the second one does what it does otherwise.

    Outside of the main thread, where Python has no say over signals, nothing is remembered.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._remember) for each in _STOPS}
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._put_back()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._put_back()

    def _put_back(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}
