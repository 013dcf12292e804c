"""The training step of MLX, native: gradients, clipping, update and evaluation in one call."""

from faststep import _native, losses  # noqa: F401, _native first: it checks the environment before anything imports MLX
from faststep._environment import version
from faststep._plan import MemoryPlan
from faststep._step import Stats, Step, StepOutput, fast_step
from faststep._tune import tune
from faststep._tune_report import Tuning

__all__ = ["MemoryPlan", "Stats", "Step", "StepOutput", "Tuning", "fast_step", "losses", "tune"]
__version__ = version()
