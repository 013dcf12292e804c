"""Several loggers as one, of which none can end a training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable

from faststep._records import Record
from faststep.loggers._base import Logger
from faststep.loggers._progress import Progress


class Loggers:
    """Several loggers, each of which gets every record; one that fails is reported once and tried again.

    The report is an `event` record with `what` "logger", of level "error", to the other loggers, and a
    `RuntimeWarning` where no `Progress` is among them. When the logger works again, an event says how many records it
    lost; it goes to that logger too, so that the gap in its file is seen there.

    Args:
        loggers: The loggers; they are closed with it.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self.loggers = tuple(loggers)
        self._lost: dict[int, tuple[int, str]] = {}  # by place: how many records, and of what kind the first was

    def log(self, record: Record) -> None:
        """Pass the record to every logger; no `Exception` of theirs gets out."""
        for place, logger in enumerate(self.loggers):
            try:
                logger.log(record)
            except Exception as error:  # whatever it is, the training goes on
                self._failed(place, record, error)
            else:
                self._worked(place, record)

    def _failed(self, place: int, record: Record, error: Exception) -> None:
        lost, kind = self._lost.get(place, (0, record["kind"]))
        self._lost[place] = lost + 1, kind
        if not lost:
            self._report(place, record, "error", f"fails: {_line(error)}; the training goes on without it")

    def _worked(self, place: int, record: Record) -> None:
        lost, kind = self._lost.get(place, (0, ""))
        if lost and record["kind"] == kind:  # another kind may be one that it has no use for
            del self._lost[place]
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
        """Close every logger; then warn about what failed."""
        failed = []
        for place, logger in enumerate(self.loggers):
            name, (lost, _) = type(logger).__name__, self._lost.pop(place, (0, ""))
            failed += [f"{name}: {lost} records were lost"] if lost else []
            try:
                logger.close()
            except Exception as error:
                failed.append(f"{name}.close() fails: {_line(error)}")
        for text in failed:
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
