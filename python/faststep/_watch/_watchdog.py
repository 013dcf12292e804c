"""Watch over the calls of one object: a thread that reports one which does not return."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_IDLE = "idle"


class Watchdog:
    """A thread that looks at the stage of an object's calls, until the object is gone.

    Args:
        of: The object, which is not kept alive.
        look: `look(of)` returns the stage ("idle" between calls) and the number of stages entered so far.
        timeout: Seconds after which a stage is reported, once.
        report: `report(of, stage, seconds)`, called in the watchdog's thread.
    """

    def __init__(
        self,
        of: Any,
        look: Callable[[Any], tuple[str, int]],
        timeout: float,
        report: Callable[[Any, str, float], None],
    ) -> None:
        self._of, self._look, self._timeout, self._report = weakref.ref(of), look, timeout, report
        threading.Thread(target=self._watch, name="faststep-watchdog", daemon=True).start()

    def _watch(self) -> None:
        since, entered, told = time.monotonic(), -1, False
        while True:
            time.sleep(min(1.0, self._timeout / 4))
            of = self._of()
            if of is None:
                return
            stage, count = self._look(of)
            now = time.monotonic()
            if count != entered or stage == _IDLE:
                since, entered, told = now, count, False
            elif now - since >= self._timeout and not told:
                told = True
                self._report(of, stage, now - since)
            del of
