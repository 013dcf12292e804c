"""Steps as rows of a table."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from faststep.loggers._values import Record, plain

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
    """Writes one row for each `step` record: the columns `COLUMNS`, empty where a value is unknown.

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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._check()
        self._file = self.path.open("a", encoding="utf-8", newline="")
        if self._file.tell() == 0:
            self._write(COLUMNS)

    def _check(self) -> None:
        with self.path.open("r+b") as file:
            header = file.readline()
            if header.endswith(b"\n") and header != _row(COLUMNS).encode():
                raise ValueError(f"{self.path}:1: expected the columns {','.join(COLUMNS)}, got {header!r}")
            file.truncate(_whole(file))

    def log(self, record: Record) -> None:
        """Write the record, if it is a step's.

        Raises:
            OSError: It could not be written.
            ValueError: The logger is closed.
        """
        if record["kind"] == "step":
            self._write([_cell(record.get(name)) for name in COLUMNS])

    def _write(self, cells: tuple[str, ...] | list[str]) -> None:
        self._file.write(_row(cells))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _row(cells: tuple[str, ...] | list[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _cell(value: Any) -> str:
    return "" if value is None else str(plain(value))


def _whole(file: io.BufferedRandom) -> int:
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
