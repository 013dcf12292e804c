"""Loggers, which take the records of a training: files, a terminal, TensorBoard, W&B, MLflow, Trackio.

A logger is anything with `log(record)` and `close()`. The records are dicts with `kind`, `time` (Unix seconds) and
`step`; the kinds are `start`, `step`, `interval`, `validation`, `values` (of the user's own), `checkpoint`,
`checkpoint_written`, `event` and `end`. Metrics are a dict `metrics` in steps, intervals and validations. Their numbers
may be scalars of MLX or numpy; epochs count from 1. A file for each logger, `_status` with the fields that the progress
shows, `_scalars` with the tags. Uses `_records`, `_files` and
`_optional`.
"""

from faststep._records import Record
from faststep.loggers._base import Logger
from faststep.loggers._csv import Csv
from faststep.loggers._group import Loggers
from faststep.loggers._json_lines import JsonLines
from faststep.loggers._mlflow import MLflow
from faststep.loggers._progress import Progress
from faststep.loggers._tensor_board import TensorBoard
from faststep.loggers._trackio import Trackio
from faststep.loggers._wandb import WandB

__all__ = ["Csv", "JsonLines", "Logger", "Loggers", "MLflow", "Progress", "Record", "TensorBoard", "Trackio", "WandB"]
