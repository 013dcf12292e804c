"""Steps as rows of a table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from faststep._records import Record, plain
from faststep.loggers._append import Appender

COLUMNS = (
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
    "items",
)


class Csv:
    """A file of comma-separated values: a row for each `step` record, the columns `COLUMNS`.

    A file that is there is gone on with, without its last row where that is torn. After a resume the steps since the
    checkpoint come a second time: the later row of a step holds
    (`pandas.read_csv(file).drop_duplicates("step", keep="last")`).

    Args:
        path: The file; folders that are missing are made.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is there and has other columns.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists():
            self._mend()
        self._file = Appender(path)
        self._head()

    def _head(self) -> None:
        if self._file.size == 0:
            self._file.write(_row(COLUMNS))

    def _mend(self) -> None:
        """Check the columns, and cut off a torn row: half a number reads as another one."""
        with self.path.open("r+b") as file:
            header = file.readline()
            if header.endswith(b"\n") and header != _row(COLUMNS):
                raise ValueError(f"{self.path}:1: expected the columns {','.join(COLUMNS)}, got {header!r}")
            file.truncate(_whole(file))

    def log(self, record: Record) -> None:
        """Write the record, if it is a step's.

        Raises:
            OSError: It could not be written; the file is as it was.
            ValueError: The logger is closed, and no start of a training has opened it again.
        """
        if record["kind"] == "start" and self._file.closed:
            self._file.open()
            self._head()
        if record["kind"] == "step":
            self._file.write(_row([_cell(record.get(name)) for name in COLUMNS]))

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
