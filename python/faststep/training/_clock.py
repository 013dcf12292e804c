"""Times of a training by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_CROWDED = 2  # threads a processor
PHASES = ("data", "step", "validation", "checkpoint", "other")


class Clock:
    """Seconds by phase since the last reading; phases do not nest."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._began = time.perf_counter()
        self._under_way: tuple[str, float] = ("other", self._began)
        self._touched = self._began

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside for a phase."""
        began = time.perf_counter()
        self._under_way, self._touched = (name, began), began
        try:
            yield
        finally:
            now = time.perf_counter()
            self._seconds[name] += now - began
            self._under_way, self._touched = ("other", now), now

    def touch(self) -> None:
        """Note that the phase under way makes progress."""
        self._touched = time.perf_counter()

    @property
    def still(self) -> tuple[str, float, float]:
        """The phase under way, when it last made progress (`time.perf_counter`), and the seconds since then."""
        touched = self._touched
        return self._under_way[0], touched, time.perf_counter() - touched

    @property
    def under_way(self) -> tuple[str, float, float]:
        """The phase under way, when it began (in seconds of `time.perf_counter`), and for how many seconds it is."""
        name, began = self._under_way
        return name, began, time.perf_counter() - began

    def total(self, name: str) -> float:
        """Return the seconds of a phase since the last reading."""
        return self._seconds[name]

    @property
    def elapsed(self) -> float:
        """Seconds since the last reading."""
        return time.perf_counter() - self._began

    def read(self) -> dict[str, float]:
        """Return the seconds by phase since the last reading; "other" is what is left of all of them."""
        now = time.perf_counter()
        seconds, passed = self._seconds, now - self._began
        seconds["other"] = max(0.0, passed - sum(seconds.values()))
        self._seconds, self._began = dict.fromkeys(PHASES, 0.0), now
        return seconds


def contention(load: float, processors: int) -> str | None:
    """Return the note for a load above the number of cores, of this process or of others; None otherwise.

    Args:
        load: How many threads have run or waited to, on average (`os.getloadavg`).
        processors: How many can run.
    """
    if load <= _CROWDED * processors:
        return None
    return (
        f"the load is {load:.0f} on {processors} cores: fewer threads may be faster; `faststep tune CONFIG`, or "
        "`faststep.tune`, tries OPENBLAS_NUM_THREADS on your own step"
    )
