"""A file that is written line by line, to its end."""

from __future__ import annotations

import os
from pathlib import Path

from faststep._files import alone


class Appender:
    """Appends to a file, each time at once, whole or not at all: without a buffer, what fails is taken back.

    Attributes:
        path: The file; folders that are missing are made.
        size: How many bytes the file had when it was opened.
        torn: Whether its last line had no end then.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = -1
        self.open()

    def open(self) -> None:
        """Open the file, if it is closed.

        Raises:
            OSError: It cannot be opened.
        """
        if self._file >= 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with alone(self._file):
            self.size = os.fstat(self._file).st_size
            self.torn = self.size > 0 and os.pread(self._file, 1, self.size - 1) != b"\n"

    @property
    def closed(self) -> bool:
        """True if it is closed."""
        return self._file < 0

    def write(self, data: bytes) -> None:
        """Append.

        Raises:
            OSError: It could not be written; the file is as it was.
            ValueError: It is closed.
        """
        if self._file < 0:
            raise ValueError(f"{self.path}: expected a record before close(), got one after it")
        with alone(self._file):
            before = os.fstat(self._file).st_size
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError:
                os.ftruncate(self._file, before)
                raise

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
