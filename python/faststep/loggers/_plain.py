"""The progress as plain lines, where there is no terminal."""

from __future__ import annotations

import textwrap
from typing import TextIO

from faststep._records import (
    Record,
    clock,
    count,
    data_lines,
    describe_event,
    describe_validation,
    headline,
    parameter_table,
    printable,
    span,
)
from faststep.loggers._status import Status, summary

WIDTH = 119  # of a line, where nothing in it is longer than that


class Plain:
    """One line for each interval, validation, checkpoint and event, flushed, without control codes.

    An interval's line leaves out what has no room; a longer line of another kind goes on in the next, indented. What
    slows the training is told when it begins.
    """

    def __init__(self, file: TextIO, status: Status) -> None:
        self._file, self._status, self._noted = file, status, dict[str, str]()

    def show(self, record: Record) -> None:
        """Write what the record says; the status has it already."""
        kind, status = record["kind"], self._status
        if kind == "start":
            self._lines([headline(record), *_aligned(parameter_table(record)), *data_lines(record)])
        elif kind == "interval":
            before, self._noted = self._noted, status.notes
            self._lines([_interval(status), *(note for what, note in self._noted.items() if what not in before)])
        elif kind == "validation":
            self._lines([describe_validation(record)])
        elif kind == "checkpoint":
            pause = f", the training paused for {span(record['pause'])}" if record.get("pause") is not None else ""
            self._lines([f"checkpoint at step {count(status.step)}: {record.get('path', '')}{pause}"])
        elif kind == "event":
            self._lines([describe_event(record)])
        elif kind == "end":
            self._lines([f"{name}: {value}" for name, value in summary(status, record)])

    def _lines(self, lines: list[str]) -> None:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        for line in (part for each in lines for part in _wrapped(printable(each))):
            self._file.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Leave the file open: it is the caller's."""


def _wrapped(line: str) -> list[str]:
    """Break a line between words; a path stays whole."""
    if len(line) <= WIDTH:
        return [line]
    return textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


_LAST = {"grad norm": "grad norm", "learning rate": "lr", "update ratio": "update ratio"}  # of the group "train"


def _interval(status: Status) -> str:
    """Return the line of an interval: loss, metrics and rates, then as much of the rest as has room."""
    groups = {name: {label: value for label, value, _ in fields} for name, fields in status.groups().items()}
    train, speed, memory = (groups.get(name, {}) for name in ("train", "speed", "memory"))
    shown = {name: value for name, value in train.items() if name not in _LAST and (name, value) != ("skipped", "0")}
    rest = {short: train[name] for name, short in _LAST.items() if name in train} | groups.get("values", {})
    rest |= {"peak memory": memory["peak"]} if "peak" in memory else {}
    rates = [f"{speed[name]} {name}" for name in ("steps/s", "tokens/s", "samples/s") if name in speed][:2]
    last = f"ETA {clock(status.eta)}" if status.eta is not None else f"elapsed {clock(status.elapsed)}"
    head = [f"step {status.position}", *filter(None, [status.epoch])]
    tail = [*filter(None, [", ".join(rates)]), last]
    line = _joined(head, shown, tail)
    for name, value in rest.items():
        longer = _joined(head, shown | {name: value}, tail)
        if len(longer) <= WIDTH:
            line, shown = longer, shown | {name: value}
    return line


def _joined(head: list[str], fields: dict[str, str], tail: list[str]) -> str:
    return " | ".join([*head, ", ".join(map(" ".join, fields.items())), *tail])


def _aligned(rows: list[tuple[str, str, str]]) -> list[str]:
    rows = [("module", "trainable", "frozen"), *rows] if rows else []
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
