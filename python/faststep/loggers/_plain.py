"""The progress as plain lines, where there is no terminal."""

from __future__ import annotations

from typing import TextIO

from faststep._records import (
    Record,
    clock,
    describe_event,
    describe_validation,
    headline,
    parameter_table,
    printable,
    span,
)
from faststep.loggers._status import Status, summary


class Plain:
    """One line for each interval, validation, checkpoint and event, flushed, without control codes."""

    def __init__(self, file: TextIO, status: Status) -> None:
        self._file, self._status = file, status

    def show(self, record: Record) -> None:
        """Write what the record says; the status has it already."""
        kind, status = record["kind"], self._status
        if kind == "start":
            self._lines([headline(record), *_aligned(parameter_table(record))])
        elif kind == "interval":
            self._lines([_interval(status)])
        elif kind == "validation":
            self._lines([describe_validation(record)])
        elif kind == "checkpoint":
            pause = f", the training stood {span(record['pause'])}" if record.get("pause") is not None else ""
            self._lines([f"checkpoint at step {status.step}: {record.get('path', '')}{pause}"])
        elif kind == "event":
            self._lines([describe_event(record)])
        elif kind == "end":
            self._lines([f"{name}: {value}" for name, value in summary(status, record)])

    def _lines(self, lines: list[str]) -> None:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        for line in lines:
            self._file.write(printable(line).encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Leave the file open: it is the caller's."""


def _interval(status: Status) -> str:
    words = [f"step {status.position}"]
    words += [status.epoch] if status.epoch else []
    for name, fields in status.groups().items():
        if name != "valid":
            label = f"{name}: " if name in ("time", "memory") else ""
            words.append(label + ", ".join(f"{each} {value}" for each, value, _ in fields))
    words += [status.data_bound] if status.data_bound else []
    words.append(f"elapsed {clock(status.elapsed)}")
    words += [f"ETA {clock(status.eta)}"] if status.eta is not None else []
    return " | ".join(words)


def _aligned(rows: list[tuple[str, str, str]]) -> list[str]:
    rows = [("module", "trainable", "frozen"), *rows] if rows else []
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
