"""Python in the loss: whether it takes most of a step, and at which line."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from faststep._step import Stats
from faststep.doctor._finding import Finding
from faststep.doctor._user_code import is_users, shown

_LEAST = 5e-3  # seconds a step
_MOST = 0.5  # of a step
_PAUSE = 5e-4
_LOOKS = 0.3  # seconds


def finding(stats: Stats, loss: Callable[[], Any]) -> Finding | None:
    """Return the finding of a loss that is called at each step and takes most of it; `loss` calls it once."""
    whole = sum(seconds for stage, seconds in stats.seconds.items() if stage != "trace")
    steps = stats.steps - stats.traced
    calls = stats.seconds["call"]
    waits = "reads the value" in (stats.reason or "")  # the time of a call is that of what it waits for
    if steps < 1 or waits or stats.mode == "native" or calls < max(_LEAST * steps, _MOST * whole):
        return None
    place, share, fastest = _busiest_line(loss)
    if fastest < _LEAST:
        return None  # the machine was busy
    text = (
        f"Python in the loss takes {1e3 * calls / steps:.0f} of {1e3 * whole / steps:.0f} ms a step"
        + (f", {share:.0%} of it at {place}" if place else "")
        + f"; the loss is called at each step: {stats.reason or 'its graph changes'}"
    )
    remedy = (
        "compute it with arrays of MLX, or once, before the training, or where a loader with workers makes the batch"
    )
    return Finding("python-loss", "warning", text, remedy, "Loader(..., collate=prepare, workers=2)")


def _busiest_line(function: Callable[[], Any]) -> tuple[str | None, float, float]:
    """Return the user's line that is met most often while a function runs, its share, and the fastest call.

    The line is None if none is met.
    """
    thread, done, lines = threading.get_ident(), threading.Event(), Counter[str]()

    def look() -> None:
        while not done.wait(_PAUSE):
            frame = sys._current_frames().get(thread)
            while frame is not None and not is_users(frame.f_code.co_filename):
                frame = frame.f_back
            if frame is not None:
                lines[f"{shown(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"] += 1

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    begin = now = time.perf_counter()
    fastest = float("inf")
    try:
        while now < begin + _LOOKS:
            start = now
            function()
            now = time.perf_counter()
            fastest = min(fastest, now - start)
    finally:
        done.set()
        watcher.join()
    if not lines:
        return None, 0.0, fastest
    place, count = lines.most_common(1)[0]
    return place, count / lines.total(), fastest
