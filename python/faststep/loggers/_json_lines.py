"""Records as lines of JSON."""

from __future__ import annotations

from pathlib import Path

from faststep._records import Record, dumps
from faststep.loggers._append import Appender


class JsonLines:
    """A file with a line of JSON for every record, written at once: a killed process has lost none.

    A file that is there is gone on with. Where its last line is torn, since a process was killed while writing it, that
    line is ended first; `faststep.report.read_log` passes over it. A record is written whole or not at all: when the
    disk is full, what was written of it is taken back and the error raised.

    Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity"; null is unknown.

    Args:
        path: The file; folders that are missing are made.

    Raises:
        OSError: The file cannot be opened.

    Example:
        >>> import tempfile, pathlib, mlx.core as mx
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "log.jsonl"
        >>> logger = JsonLines(file)
        >>> logger.log({"kind": "step", "time": 0.0, "step": 1, "loss": mx.array(0.5), "grad_norm": float("inf")})
        >>> print(file.read_text(), end="")
        {"kind": "step", "time": 0.0, "step": 1, "loss": 0.5, "grad_norm": "Infinity"}
        >>> logger.close()
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Appender(path)
        self.path = self._file.path

    def log(self, record: Record) -> None:
        """Write the record.

        Raises:
            OSError: It could not be written; the file is as it was.
            ValueError: The logger is closed, and the record is no start of a training, which opens it again.
        """
        if record["kind"] == "start":
            self._file.open()
        line = dumps(record) + "\n"
        self._file.write(("\n" + line if self._file.torn else line).encode("ascii"))
        self._file.torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()
