"""The progress as HTML in the output of a notebook's cell."""

from __future__ import annotations

import sys
import time
from collections import deque
from html import escape
from typing import Any

from faststep._optional import need
from faststep._records import (
    Record,
    clock,
    data_lines,
    describe_event,
    describe_validation,
    headline,
    parameter_table,
    printable,
    share,
)
from faststep.loggers._status import Field, Status, summary

_PAUSE = 0.25  # seconds between two drawings, at least
_LINES = 8  # of what was told last
_COLOURS = {"good": "#1a7f37", "warning": "#9a6700", "bad": "#cf222e", "error": "#cf222e"}
_TABLE = "<table style='font:inherit;border-collapse:collapse;margin:4px 0'>"
_CELL = "padding:1px 14px 1px 0;text-align:left;background:none"


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


class Notebook:
    """One output that is drawn again: headline and bar, the fields by group, and what was told last."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._display: Any = need("IPython.display")
        self._handle: Any = None
        self._told: deque[tuple[str, str]] = deque(maxlen=_LINES)  # level and text
        self._end: Record | None = None
        self._drawn = 0.0

    def show(self, record: Record) -> None:
        """Take a record in, and draw."""
        kind = record["kind"]
        if kind == "validation":
            self._told.append(("good" if record.get("best") else "", describe_validation(record)))
        elif kind == "event":
            self._told.append((str(record.get("level")), describe_event(record)))
        elif kind == "end":
            self._end = record
        if kind in ("start", "end") or time.monotonic() - self._drawn > _PAUSE:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._handle is None:
            self._handle = self._display.display(self, display_id=True)
        else:
            self._handle.update(self)

    def close(self) -> None:
        """Draw what came last; the output stays."""
        if self._handle is not None:
            self._handle.update(self)

    def __repr__(self) -> str:
        return f"step {self._status.position} {self._status.epoch}".strip()

    def _repr_html_(self) -> str:
        status = self._status
        parts = [f"<div style='opacity:.7'>{_text(headline(status.start))}</div>"] if status.start else []
        parts += [self._bar(), *([_table(summary(status, self._end))] if self._end else [self._groups()])]
        parts += [f"<div style='opacity:.7'>{_text(each)}</div>" for each in data_lines(status.start or {})]
        lines = "".join(f"<div{_style(level)}>{_text(line)}</div>" for level, line in self._told)
        rows = parameter_table(status.start)
        if rows:
            parts += [f"<details><summary>{_text(rows[-1][1])} parameters</summary>{_table(rows)}</details>"]
        return f"<div style='font:13px/1.5 sans-serif'>{''.join(parts)}{lines}</div>"

    def _bar(self) -> str:
        status = self._status
        done = status.step / status.total if status.total else None
        bar = (
            f" <progress value='{done:.4f}' max='1' style='width:30%'></progress> {share(done)}"
            if done is not None
            else ""
        )
        words = [f"<b>step {_text(status.position)}</b> {_text(status.epoch)}{bar}", f"elapsed {clock(status.elapsed)}"]
        words += [f"ETA {clock(status.eta)}"] if status.eta is not None and self._end is None else []
        return f"<div>{' &nbsp; '.join(words)}</div>"

    def _groups(self) -> str:
        rows = "".join(
            f"<tr><td style='{_CELL};opacity:.7'>{_text(name)}</td>{''.join(map(_field, fields))}</tr>"
            for name, fields in self._status.groups().items()
        )
        notes = (f"<div{_style('warning')}>{_text(note)}</div>" for note in self._status.notes.values())
        return f"{_TABLE}{rows}</table>{''.join(notes)}"


def _field(field: Field) -> str:
    name, value, kind = field
    return f"<td style='{_CELL}'>{_text(name)} <b{_style(kind)}>{_text(value)}</b></td>"


def _table(rows: Any) -> str:
    cells = ("".join(f"<td style='{_CELL}'>{_text(cell)}</td>" for cell in row) for row in rows)
    return f"{_TABLE}{''.join(f'<tr>{each}</tr>' for each in cells)}</table>"


def _style(kind: str) -> str:
    return f" style='color:{_COLOURS[kind]}'" if kind in _COLOURS else ""


def _text(value: object) -> str:
    return escape(printable(str(value)))
