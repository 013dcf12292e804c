"""Records for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from faststep._extras import need
from faststep.loggers._scalars import scalars
from faststep.loggers._status import said_event
from faststep.loggers._values import Record, plain


class TensorBoard:
    """Writes event files that TensorBoard shows: scalars, the config and the events as text.

    The tags are `train/...`, `validation/...`, `speed/...`, `seconds/...`, `memory/...` and `checkpoint/pause`. A
    resumed run goes on in a file of its own, which tells TensorBoard to drop the steps that come a second time.

    Args:
        folder: Where the files go; it is made.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._make = need("tensorboardX").SummaryWriter
        self._writer: Any = None

    def log(self, record: Record) -> None:
        """Write the record's numbers, or its text.

        Raises:
            OSError: The file cannot be made.
        """
        kind, step = record["kind"], int(record.get("step") or 0)
        if kind == "start":
            self._start(record, step)
        writer = self._open(None)
        for tag, value in scalars(record).items():
            writer.add_scalar(tag, value, step, walltime=record["time"])
        if kind == "event":
            writer.add_text("events", said_event(record), step, walltime=record["time"])
        if kind != "step":
            writer.flush()

    def _start(self, record: Record, step: int) -> None:
        self.close()
        writer = self._open(step + 1 if record.get("resumed") else None)
        config = json.dumps(plain(record.get("config")), indent=4)
        writer.add_text("config", "\n".join(f"    {line}" for line in config.splitlines()), step)

    def _open(self, purge: int | None) -> Any:
        if self._writer is None:
            self._writer = self._make(str(self.folder), purge_step=purge)
        return self._writer

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
