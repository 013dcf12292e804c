"""The trainer: the loop around the step, with validation, checkpoints and logs. Needs the extra `train`.

`_trainer` has the options and callbacks, `_loop` the loop; `_window` one update; `_guard` and `_bad_batches` batches
that are skipped; `_run_log`, `_interval`, `_clock` and `_update_ratio` the records; `_rates` learning rates across a
resume, `_made_of` what else is another then, `_plateau` a rate that is lowered, `_find_rate` a search for one; `_trial`
short runs that try a training out; `_monitor` the best; `_heartbeat` what is waited for; `_predict` outputs, `_samples`
text; `_plan_ranks` a calculation for many devices. Uses `_step`, `_native`, `_watch`, `_records`, `_files`, `_random`,
`_command`, `metrics`, `data`, `checkpoints` and `loggers`.
"""

from faststep.training._bad_batches import Reproduction, reproduce
from faststep.training._bad_batches import config_of as bundle_config
from faststep.training._errors import RunError, TrainingError
from faststep.training._find_rate import FoundRate, find_rate
from faststep.training._gradient_norms import GradientNorms
from faststep.training._loop import Resume
from faststep.training._plan_ranks import RanksPlan, plan_ranks
from faststep.training._plateau import ReduceOnPlateau
from faststep.training._predict import predict
from faststep.training._result import Result
from faststep.training._samples import Samples
from faststep.training._trainer import Callback, Trainer
from faststep.training._validate import Evaluation, validate

__all__ = [
    "Callback",
    "Evaluation",
    "FoundRate",
    "GradientNorms",
    "RanksPlan",
    "ReduceOnPlateau",
    "Reproduction",
    "Result",
    "Resume",
    "RunError",
    "Samples",
    "Trainer",
    "TrainingError",
    "bundle_config",
    "find_rate",
    "plan_ranks",
    "predict",
    "reproduce",
    "validate",
]
