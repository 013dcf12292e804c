"""The step: `Step`, `fast_step`, their results, options, state and memory plan, over the native step of `_native`.

`_program` holds the native step, `_user_optimizer` stands for optimizers that are objects of the user's own, `_ranks`
is for other processes, `_replicas` compares with theirs, `_model_shards` has what they share. Uses `_native`, `_watch`
for calls that hang, and `_command` for an exit code.
"""

from faststep._step._average import shows_average
from faststep._step._batch import call_with
from faststep._step._fast_step import fast_step
from faststep._step._library import is_installed
from faststep._step._memory_plan import MemoryPlan
from faststep._step._options import Options, whole_number
from faststep._step._output import Stats, StepOutput
from faststep._step._ranks import RankError, Ranks, end_hung_rank
from faststep._step._state import like
from faststep._step._step import Step

__all__ = [
    "MemoryPlan",
    "Options",
    "RankError",
    "Ranks",
    "Stats",
    "Step",
    "StepOutput",
    "call_with",
    "end_hung_rank",
    "fast_step",
    "is_installed",
    "like",
    "shows_average",
    "whole_number",
]
