"""The trainer: the loop around the step, with validation, checkpoints and logs. Needs the extra `train`.

`_trainer` has the loop; `_window` one update; `_guard` and `_bad_batches` batches that are skipped; `_run_log`,
`_interval`, `_clock` and `_update_ratio` the records. Uses `_step`, `_records`, `_files`, `data`,
`checkpoints` and `loggers`.
"""

from faststep.training._bad_batches import Reproduction, reproduce
from faststep.training._bad_batches import config_of as bundle_config
from faststep.training._errors import RunError, TrainingError
from faststep.training._result import Result
from faststep.training._trainer import Callback, Start, Trainer
from faststep.training._validate import validate

__all__ = [
    "Callback",
    "Reproduction",
    "Result",
    "RunError",
    "Start",
    "Trainer",
    "TrainingError",
    "bundle_config",
    "reproduce",
    "validate",
]
