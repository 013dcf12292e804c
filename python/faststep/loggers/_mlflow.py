"""Records for MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faststep._files import write_text
from faststep._optional import need
from faststep._records import Record, flat, plain
from faststep.loggers._scalars import scalars

_LONGEST, _TOGETHER = 500, 100  # characters of a parameter, and parameters of a call


class MLflow:
    """A run of MLflow: the numbers, and the config as parameters; events are not logged.

    The run's id is kept in `folder/mlflow_id`, so that a resumed training goes on in the same run.

    Args:
        folder: Where the id is kept.
        experiment: The name of the experiment; None: what MLFLOW_EXPERIMENT_NAME says, or MLflow's default one.
        tracking_uri: Where the runs go; None: what MLFLOW_TRACKING_URI says, or MLflow's default.
        **options: What `mlflow.start_run` takes: `run_name`, `tags` and so on.

    Raises:
        ImportError: mlflow is not installed: `pip install mlflow-skinny`.
    """

    def __init__(
        self, folder: str | Path, experiment: str | None = None, tracking_uri: str | None = None, **options: Any
    ) -> None:
        self.folder, self.options = Path(folder), options
        try:
            self._mlflow = need("mlflow")
        except ImportError as error:
            raise ImportError("MLflow needs mlflow, which no extra installs: pip install mlflow-skinny") from error
        if tracking_uri is not None:
            self._mlflow.set_tracking_uri(tracking_uri)
        if experiment is not None:
            self._mlflow.set_experiment(experiment)
        self._run: Any = None

    def log(self, record: Record) -> None:
        """Log the record's numbers."""
        if record["kind"] == "start" and self._run is None:
            self._start(record)
        if self._run is None:
            raise ValueError(f"MLflow: expected a start record first, got {record['kind']!r}")
        if found := scalars(record):
            self._mlflow.log_metrics(found, step=int(record["step"]), run_id=self._run.info.run_id)
        if record["kind"] == "end":
            self._mlflow.set_tag("reason", str(record.get("reason")))

    def _start(self, record: Record) -> None:
        kept = self.folder / "mlflow_id"
        known = kept.read_text(encoding="utf-8").strip() if kept.exists() else None
        self._run = self._mlflow.start_run(run_id=known, **self.options)
        if known is None:
            values = {name: str(each)[:_LONGEST] for name, each in flat(plain(record.get("config") or {})).items()}
            names = sorted(values)
            for at in range(0, len(names), _TOGETHER):
                self._mlflow.log_params({name: values[name] for name in names[at : at + _TOGETHER]})
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(kept, f"{self._run.info.run_id}\n")

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._mlflow.end_run()
        self._run = None
