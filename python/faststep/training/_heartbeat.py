"""Signs of life: what a training waits for, told by a thread of its own while nothing else is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from faststep._native import core
from faststep._records import span
from faststep.training._clock import Clock
from faststep.training._signals import GRACE, Signals

SILENT = 10.0  # seconds
_LOOK = 0.2  # seconds between two looks
_TEXTS = {
    "data": "waiting for data",
    "step": "computing this step",
    "validation": "validating",
    "checkpoint": "waiting for the disk",
}


Level = Literal["info", "warning", "error"]
Event = Callable[[str, str, Level], None]


class Heartbeat:
    """While it is entered, an event tells what has been going on for long, and that kernels are compiled.

    It also tells what a signal to stop waits for; where that is data, they are left after a grace time.

    Args:
        clock: The phase under way.
        loader: Its number of workers is told while data is waited for.
        event: Takes what, text and level of an event, in the heartbeat's thread.
        signals: The signals that ask for the end; None: none do.
        silent: Seconds of one phase before it is told; then twice as many, and so on.
        hang_timeout: Seconds without progress in one phase before `on_hang` is called, once; None: never.
        on_hang: `on_hang(phase, seconds)`, in the heartbeat's thread.
    """

    def __init__(
        self,
        clock: Clock,
        loader: Any,
        event: Event,
        signals: Signals | None = None,
        silent: float = SILENT,
        hang_timeout: float | None = None,
        on_hang: Callable[[str, float], None] = lambda phase, seconds: None,
    ) -> None:
        self._clock, self._loader, self._event, self._silent = clock, loader, event, silent
        self._hang_timeout, self._on_hang = hang_timeout, on_hang
        self._signals, self._stopping = signals, 0  # how often the grace time has passed
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="faststep-heartbeat", daemon=True)
        self._compiled = core.compiled_kernels()

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        told: tuple[float, float] = (0.0, self._silent)  # when the phase began, and when it is told next
        compiling, hung = False, 0.0
        while not self._done.wait(_LOOK):
            phase, touched, seconds = self._clock.still
            if self._hang_timeout is not None and seconds >= self._hang_timeout and touched != hung:
                hung = touched
                self._on_hang(phase, seconds)
            if not compiling and core.compiled_kernels() > self._compiled:
                compiling = True
                self._event("compiling", "compiling kernels, once per machine", "info")
            self._see_to_signals()
            phase, began, seconds = self._clock.under_way
            if began != told[0]:
                told = began, self._silent
            if phase in _TEXTS and seconds >= told[1]:
                told = began, 2 * told[1]
                level: Level = "warning" if phase in ("data", "checkpoint") else "info"
                self._event("heartbeat", f"{_TEXTS[phase]} for {span(round(seconds))}{self._hint(phase)}", level)

    def _see_to_signals(self) -> None:
        signals = self._signals
        if signals is None or signals.received is None or signals.waiting < GRACE * (self._stopping + 1):
            return
        self._stopping, reading = self._stopping + 1, bool(getattr(self._loader, "reading", False))
        phase, _, seconds = self._clock.under_way
        if self._stopping == 1 and phase in _TEXTS:
            what = f"{signals.received.name}: {_TEXTS[phase]} for {span(round(seconds))}"
            left = "left in the middle of a batch, which a resume takes again"
            self._event("signal", f"{what}; {left if reading else 'a second signal does not wait for it'}", "warning")
        if reading:
            signals.interrupt()

    def _hint(self, phase: str) -> str:
        workers, compiled = getattr(self._loader, "workers", None), core.compiled_kernels() - self._compiled
        if phase == "data" and workers is not None:
            return f": workers={workers}" + ("" if workers else ", try 4")
        return f": {compiled} kernels compiled so far" if phase == "step" and compiled else ""
