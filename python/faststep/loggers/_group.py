"""Several loggers as one, of which none can end a training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable

from faststep.loggers._progress import Progress
from faststep.loggers._values import Logger, Record


class Loggers:
    """Gives every record to several loggers; one that fails is reported once and tried again at every record.

    The report is an `event` record with `what` "logger", of level "error", to the other loggers, and a
    `RuntimeWarning` where no `Progress` is among them. When the logger works again, an event says how many records it
    lost; it goes to that logger too, so that the gap in its file is seen there.

    Args:
        loggers: The loggers; they are closed with it.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self.loggers = tuple(loggers)
        self._lost: dict[int, int] = {}  # by the logger's place

    def log(self, record: Record) -> None:
        """Give the record to every logger; no `Exception` of theirs gets out."""
        for place, logger in enumerate(self.loggers):
            try:
                logger.log(record)
            except Exception as error:  # whatever it is, the training goes on
                self._lost[place] = self._lost.get(place, 0) + 1
                if self._lost[place] == 1:
                    self._report(place, record, "error", f"fails: {_line(error)}; the training goes on without it")
            else:
                if lost := self._lost.pop(place, 0):
                    self._report(place, record, "warning", f"works again; {lost} records were lost", itself=True)

    def _report(self, place: int, record: Record, level: str, text: str, *, itself: bool = False) -> None:
        name = type(self.loggers[place]).__name__
        event = {
            "kind": "event",
            "time": time.time(),
            "step": record.get("step", 0),
            "level": level,
            "what": "logger",
            "text": f"{name} {text}",
        }
        others = [each for at, each in enumerate(self.loggers) if (at != place or itself) and at not in self._lost]
        shown = False
        for logger in others:
            try:
                logger.log(event)
                shown |= isinstance(logger, Progress)
            except Exception:  # it is reported at its next record
                continue
        if not shown:
            warnings.warn(event["text"], RuntimeWarning, stacklevel=4)

    def close(self) -> None:
        """Close every logger; what fails is warned about."""
        for place, logger in enumerate(self.loggers):
            try:
                logger.close()
            except Exception as error:
                self._lost[place] = self._lost.get(place, 0)
                warnings.warn(f"{type(logger).__name__}.close() fails: {_line(error)}", RuntimeWarning, stacklevel=2)
            if lost := self._lost.pop(place, 0):
                warnings.warn(f"{type(logger).__name__}: {lost} records were lost", RuntimeWarning, stacklevel=2)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
