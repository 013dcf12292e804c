"""Records for Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faststep._files import write_text
from faststep._optional import need
from faststep._records import Record, plain
from faststep.loggers._scalars import scalars


class WandB:
    """A run of Weights & Biases: the numbers and the config; events are not logged.

    The run's id is kept in `folder/wandb_id`, so that a resumed training goes on in the same run; what comes a second
    time is drawn over the steps' axis `step`, the later value beside the earlier one.

    Args:
        folder: Where wandb keeps its files, and the id.
        **options: What `wandb.init` takes: `project`, `name`, `mode="offline"` and so on.

    Raises:
        ImportError: wandb is not installed: `pip install wandb`.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self.folder, self.options = Path(folder), options
        try:
            self._wandb = need("wandb")
        except ImportError as error:
            raise ImportError("WandB needs wandb, which no extra installs: pip install wandb") from error
        self._run: Any = None

    def log(self, record: Record) -> None:
        """Log the record's numbers."""
        if record["kind"] == "start" and self._run is None:
            self._start(record)
        if self._run is None:
            raise ValueError(f"WandB: expected a start record first, got {record['kind']!r}")
        if found := scalars(record):
            self._run.log({"step": int(record["step"]), **found})
        if record["kind"] == "end":
            self._run.summary.update({"reason": record.get("reason")})

    def _start(self, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / "wandb_id"
        known = kept.read_text(encoding="utf-8").strip() if kept.exists() else None
        options = {"id": known, "resume": "allow", "dir": str(self.folder), **self.options}
        self._run = self._wandb.init(config=plain(record.get("config") or {}), **options)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        write_text(kept, f"{self._run.id}\n")

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
        self._run = None
