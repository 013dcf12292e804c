"""The training step of MLX, native: gradients, clipping, update and evaluation in one call.

The rooms, each of which imports only those above it in this list:

- `_native`: the extension module `_core`, in an environment that fits it; `_optional`, `_random`: one file each.
- `_step`: `Step` and `fast_step`; `losses`: losses with native kernels; `_records`: values and texts of log records.
- `_tune`, `data`, `loggers`, `recipes`, `checkpoints`: each by itself.
- `report`, `training`, `config`: over those.
- `cli`: the command line.
"""

from faststep import _native, losses  # noqa: F401, _native first: it checks the environment before anything imports MLX
from faststep._native import version
from faststep._step import MemoryPlan, Profile, Stats, Step, StepOutput, fast_step, profile
from faststep._tune import Tuning, tune

__all__ = ["MemoryPlan", "Profile", "Stats", "Step", "StepOutput", "Tuning", "fast_step", "losses", "profile", "tune"]
__version__ = version()
