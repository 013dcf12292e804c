"""The training step of MLX, native: gradients, clipping, update and evaluation in one call."""

from faststep import _native  # noqa: F401, first: it checks the environment before anything imports MLX
from faststep._environment import version
from faststep._step import Stats, Step, StepOutput, fast_step

__all__ = ["Stats", "Step", "StepOutput", "fast_step"]
__version__ = version()
