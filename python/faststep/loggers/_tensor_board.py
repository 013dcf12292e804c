"""Records for TensorBoard."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from faststep._optional import need
from faststep._records import Record, describe_event, plain
from faststep.loggers._scalars import scalars

FLUSH_SECONDS = 5.0  # a flush waits for the disk


class TensorBoard:
    """Event files for TensorBoard: scalars, and the config and the events as text.

    The tags are `train/...`, `val/...`, `speed/...`, `seconds/...`, `memory/...`, `rank_seconds/...`,
    `checkpoint/pause`, and the names of values of your own. Every start has a file of its own; that of a resumed run
    tells TensorBoard to drop the steps that come a second time. What is logged is on the disk after five seconds at
    most, and after every validation and event.

    The files are written without tensorboardX's `SummaryWriter`: when the disk is full, its thread ends unseen and the
    training waits for it forever.

    Args:
        folder: Where the files go; it is made.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._make = need("tensorboardX.event_file_writer").EventsWriter
        self._event: Any = need("tensorboardX.proto.event_pb2")
        self._summary = need("tensorboardX.summary")
        self._writer: Any = None
        self._flushed = 0.0

    def log(self, record: Record) -> None:
        """Write the record's numbers, or its text.

        Raises:
            OSError: The file cannot be made or written.
        """
        if record["kind"] == "start":
            self.close()
            self._start(record)
        for tag, value in scalars(record).items():
            self._write(record, summary=self._summary.scalar(tag, value))
        if record["kind"] == "event":
            self._write(record, summary=self._summary.text("events", describe_event(record)))
        if record["kind"] not in ("step", "interval", "values") or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._open().flush()

    def _start(self, record: Record) -> None:
        if record.get("resumed"):
            status = self._event.SessionLog.START
            self._write(record, ahead=1, session_log=self._event.SessionLog(status=status))
        config = json.dumps(plain(record.get("config")), indent=4)
        shown = "\n".join(f"    {line}" for line in config.splitlines())  # a block of code in Markdown
        self._write(record, summary=self._summary.text("config", shown))

    def _write(self, record: Record, ahead: int = 0, **values: Any) -> None:
        step = int(record.get("step") or 0) + ahead
        self._open().write_event(self._event.Event(wall_time=record["time"], step=step, **values))

    def _open(self) -> Any:
        if self._writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The writer names its file by the second only, and would write over one of the same second.
            self._writer = self._make(str(self.folder / "events"), f".{time.time_ns()}")
        return self._writer

    def close(self) -> None:
        """Write what is left and close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
