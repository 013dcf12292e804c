"""The interface of a logger."""

from __future__ import annotations

from typing import Protocol

from faststep._records import Record


class Logger(Protocol):
    """The interface of a logger, which takes the records of a training."""

    def log(self, record: Record) -> None:
        """Take one record: a dict with `kind`, `time` (Unix seconds), `step` and what the kind has beside."""

    def close(self) -> None:
        """End; nothing is logged afterwards. Closing twice is no error."""
