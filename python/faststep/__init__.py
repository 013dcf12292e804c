"""The training step of MLX, native: gradients, clipping, update and evaluation in one call.

The rooms, each of which imports only those above it in this list:

- `_native`: the extension module `_core`, in an environment that fits it; `_command`, `_optional`, `_random`: one file
  each; `_watch`: reports of hangs.
- `_step`: `Step` and `fast_step`; `losses`: losses with native kernels; `_records`: values and texts of log records.
- `_tune`, `data`, `loggers`, `recipes`, `checkpoints`: each by itself.
- `report`, `training`, `config`: over those.
- `doctor`: what is wrong with an environment or a training.
- `cli`: the command line.
"""

from faststep._command import asks_for_environment

if not asks_for_environment():  # `faststep doctor` says why what follows fails
    from faststep import _native, losses  # noqa: F401, _native first: it checks the environment before anything imports MLX
    from faststep._native import version
    from faststep._step import MemoryPlan, Profile, Stats, Step, StepOutput, fast_step, profile
    from faststep._tune import Tuning, tune
    from faststep.doctor import check

    __version__ = version()

__all__ = [
    "MemoryPlan",
    "Profile",
    "Stats",
    "Step",
    "StepOutput",
    "Tuning",
    "check",
    "fast_step",
    "losses",
    "profile",
    "tune",
]
