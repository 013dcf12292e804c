"""Records for Trackio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faststep._optional import need
from faststep._records import Record, plain
from faststep.loggers._scalars import scalars


class Trackio:
    """A run of Trackio: the numbers and the config; events are not logged.

    The run has the name of the folder, so that a resumed training goes on in the same run.

    Args:
        folder: The folder of the training.
        project: The project's name.
        **options: What `trackio.init` takes: `name`, `space_id` and so on.

    Raises:
        ImportError: trackio is not installed: `pip install trackio`.
    """

    def __init__(self, folder: str | Path, project: str = "faststep", **options: Any) -> None:
        self.options = {"project": project, "name": Path(folder).resolve().name, "resume": "allow", **options}
        try:
            self._trackio = need("trackio")
        except ImportError as error:
            raise ImportError("Trackio needs trackio, which no extra installs: pip install trackio") from error
        self._run: Any = None

    def log(self, record: Record) -> None:
        """Log the record's numbers."""
        if record["kind"] == "start" and self._run is None:
            self._run = self._trackio.init(config=plain(record.get("config") or {}), **self.options)
        if self._run is None:
            raise ValueError(f"Trackio: expected a start record first, got {record['kind']!r}")
        if found := scalars(record):
            self._run.log(found, step=int(record["step"]))

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._trackio.finish()
        self._run = None
