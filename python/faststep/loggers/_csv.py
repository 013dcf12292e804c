"""Steps, or validations, as rows of a table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from faststep._files import replacing
from faststep._records import Record, plain
from faststep.loggers._append import Appender

COLUMNS = {
    "step": (
        "step",
        "time",
        "epoch",
        "loss",
        "grad_norm",
        "learning_rate",
        "batches",
        "skipped",
        "seconds",
        "wait",
        "samples",
        "tokens",
    ),
    "validation": ("step", "time", "epoch", "loss", "batches", "seconds", "best"),
}


class Csv:
    """A file of comma-separated values: a row for each record of a kind, the columns `COLUMNS`, then the metrics.

    A file that is there is gone on with, without its last row where that is torn. After a resume the steps since the
    checkpoint come a second time: the later row of a step holds
    (`pandas.read_csv(file).drop_duplicates("step", keep="last")`). A metric that is new gets a column at the end, empty
    in the rows before it: the file is then written again as a whole, beside its place, and put there by one rename.

    Args:
        path: The file; folders that are missing are made.
        kind: "step" for a row of each step, "validation" for one of each validation.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is there and has other columns.
    """

    def __init__(self, path: str | Path, kind: Literal["step", "validation"] = "step") -> None:
        self.path, self._kind, self._columns = Path(path), kind, list(COLUMNS[kind])
        if self.path.exists():
            self._mend()
        self._file = Appender(path)
        self._head()

    def _head(self) -> None:
        if self._file.size == 0:
            self._file.write(_row(self._columns))

    def _mend(self) -> None:
        """Check the columns, and cut off a torn row: half a number reads as another one."""
        with self.path.open("r+b") as file:
            header = file.readline()
            found = next(csv.reader([header.decode(errors="replace")]), [])
            if header.endswith(b"\n") and found[: len(self._columns)] != self._columns:
                raise ValueError(f"{self.path}:1: expected the columns {','.join(self._columns)}, got {header!r}")
            self._columns = found if header.endswith(b"\n") else self._columns
            file.truncate(_whole(file))

    def log(self, record: Record) -> None:
        """Write the record, if it is of the kind.

        Raises:
            OSError: It could not be written; the file is as it was.
            ValueError: The logger is closed, and no start of a training has opened it again.
        """
        if record["kind"] == "start" and self._file.closed:
            self._file.open()
            self._head()
        if record["kind"] != self._kind:
            return
        own = COLUMNS[self._kind]
        found: dict[str, Any] = record.get("metrics") or {}
        metrics = {f"metrics.{name}" if name in own else name: value for name, value in found.items()}
        if new := [name for name in metrics if name not in self._columns]:
            self._widen(new)
        cells = [record.get(name) if name in own else metrics.get(name) for name in self._columns]
        self._file.write(_row([_cell(value) for value in cells]))

    def _widen(self, new: list[str]) -> None:
        """Add columns."""
        self._file.write(b"")  # raises where it is closed
        lines = self.path.read_bytes().splitlines(keepends=True)
        columns = [*self._columns, *new]
        rest = (line.rstrip(b"\n") + b"," * len(new) + b"\n" for line in lines[1:])
        with replacing(self.path) as wide:
            wide.write(_row(columns) + b"".join(rest))
        self._file.close()
        self._file, self._columns = Appender(self.path), columns

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _row(cells: Sequence[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()


def _cell(value: Any) -> str:
    return "" if value is None else str(plain(value))


def _whole(file: BinaryIO) -> int:
    """Return where the last whole line ends."""
    end, block = file.seek(0, os.SEEK_END), 1 << 16
    while end > 0:
        begin = max(0, end - block)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
