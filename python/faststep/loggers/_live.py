"""The progress as a display in a terminal, drawn by rich."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

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
    span,
)
from faststep.loggers._status import Field, Status, summary

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.text import Text

REFRESH = 4  # drawings a second
SILENT = 10.0  # seconds without an interval, from which on they are shown
STYLES = {"": "", "good": "green", "warning": "yellow", "bad": "bold red", "error": "bold red", "info": "dim"}
INDENT = 9
BARS = "▁▂▃▄▅▆▇█"


class Display:
    """The display: a headline with a bar, and a line or more for each group of fields.

    Only the headline is made at every refresh; the fields change with the records.
    """

    def __init__(self, status: Status) -> None:
        self._status = status
        self._text: type[Text] = need("rich.text").Text
        self._drawn: tuple[object, list[Segment]] = (None, [])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Segment]:
        """Draw it into the console's width."""
        yield self._headline(options.max_width, options.ascii_only)
        key = (self._status.records, options.max_width, options.ascii_only)
        if self._drawn[0] != key:
            lines = self._body(options.max_width, options.ascii_only)
            self._drawn = key, [segment for line in lines for segment in console.render(line, options)]
        yield from self._drawn[1]

    def _body(self, width: int, ascii_only: bool) -> Iterator[Text]:
        for name, fields in self._status.groups().items():
            line = self._text(no_wrap=True).append(name.ljust(INDENT), style="cyan")
            yield from self._flow(line, fields, width)
            if name == "train" and (trend := self._trend(ascii_only)):
                yield self._text(f"{'':{INDENT}}{trend}", style="dim", no_wrap=True)
        for note in self._status.notes.values():
            yield self._text(note, style="yellow", no_wrap=True, overflow="ellipsis")

    def _headline(self, width: int, ascii_only: bool) -> Text:
        status = self._status
        line = self._text(no_wrap=True, overflow="ellipsis").append(f"step {status.position}", style="bold")
        line.append(f"  {status.epoch}" if status.epoch else "")
        tail = f"  elapsed {clock(status.elapsed)}"
        tail += f"  ETA {clock(status.eta)}" if status.eta is not None else ""
        silence = status.elapsed + status.began - status.told
        tail += f"  quiet for {span(round(silence))}" if silence >= SILENT else ""
        room = width - len(line) - 9  # beside the bar: blanks and its percentage
        if room < len(tail):
            tail = f"\n{tail.strip()}"
        else:
            room -= len(tail)
        if status.total:
            done = min(1.0, status.step / status.total)
            line.append_text(self._bar(done, min(40, room), ascii_only)).append(f" {share(done):>5}")
        return line.append(tail)

    def _bar(self, done: float, room: int, ascii_only: bool) -> Text:
        full, rest = ("=", "-") if ascii_only else ("━", "╌")
        if room < 8:
            return self._text(" ")
        filled = round(done * room)
        return self._text("  ").append(full * filled, style="green").append(rest * (room - filled), style="dim")

    def _flow(self, line: Text, fields: list[Field], width: int) -> Iterator[Text]:
        """Put the fields behind the label, on further lines where they do not fit."""
        for label, value, kind in fields:
            if len(line) > INDENT and len(line) + len(label) + len(value) + 1 > width:
                yield self._ended(line)
                line = self._text(" " * INDENT, no_wrap=True)
            line.append(f"{printable(label)} ", style="dim").append(value, style=STYLES[kind] or "bold").append("   ")
        yield self._ended(line)

    def _ended(self, line: Text) -> Text:
        line.rstrip()
        line.overflow = "ellipsis"
        return line

    def _trend(self, ascii_only: bool) -> str:
        """Return the last losses as a row of bars."""
        losses = [each for each in tuple(self._status.losses) if math.isfinite(each)]
        if ascii_only or len(losses) < 4:
            return ""
        losses = list(map(math.log, losses)) if min(losses) > 0 else losses
        low, high = min(losses), max(losses)
        scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
        return "".join(BARS[round((each - low) * scale)] for each in losses)


class Live:
    """A display at the foot of the terminal; whatever is printed meanwhile appears above it."""

    def __init__(self, file: TextIO, status: Status) -> None:
        self._status = status
        self._text: type[Text] = need("rich.text").Text
        # It is known to be a terminal; words and paths are not to be coloured by what they look like.
        self._console = need("rich.console").Console(file=file, force_terminal=True, highlight=False)
        self._live = need("rich.live").Live(
            Display(status),
            console=self._console,
            refresh_per_second=REFRESH,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # output to a file stays there
            redirect_stderr=sys.stderr.isatty(),
        )

    def show(self, record: Record) -> None:
        """Print what the record says above the display; the next drawing shows the rest."""
        kind = record["kind"]
        if kind == "start":
            self._begin(record)
        elif kind == "validation":
            self._print(describe_validation(record), "green" if record.get("best") else "")
        elif kind == "event":
            self._print(describe_event(record), STYLES.get(str(record.get("level")), ""))
        elif kind == "end":
            self.close()
            self._table(("", ""), summary(self._status, record))

    def _begin(self, record: Record) -> None:
        self._print(headline(record), "bold")
        if rows := parameter_table(record):
            self._table(("module", "trainable", "frozen"), rows)
        for line in data_lines(record):
            self._print(line, "")
        self._live.start()
        self._console.show_cursor(True)  # a process that is killed would leave the terminal without one

    def _print(self, line: str, style: str) -> None:
        self._console.print(self._text(self._shown(line), style=style))

    def _shown(self, text: str) -> str:
        encoding = self._console.encoding
        return printable(text).encode(encoding, "backslashreplace").decode(encoding)

    def _table(self, header: tuple[str, ...], rows: Any) -> None:
        grid = need("rich.table").Table(box=None, padding=(0, 3, 0, 0), show_header=any(header), header_style="cyan")
        for place, name in enumerate(header):
            grid.add_column(name, justify="right" if place and any(header) else "left", overflow="fold")
        for place, row in enumerate(rows):
            last = any(header) and place == len(rows) - 1
            grid.add_row(*(self._text(self._shown(cell)) for cell in row), style="bold" if last else "")
        self._console.print(grid)

    def close(self) -> None:
        """Take the display away; what was printed stays."""
        self._live.stop()
