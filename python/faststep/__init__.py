"""The training step of MLX, native: gradients, clipping, update and evaluation in one call.

The rooms, each of which imports only those above it in this list:

- `_native`: the extension module `_core`, in an environment that fits it; `_watch`: reports of hangs; `_records`:
  values and texts of log records; `_command`, `_files`, `_optional`, `_random`, `losses`, `metrics`: one file each.
- `_reach`: what a loss reads, for the native step; `_step`: `Step` and `fast_step`; `_profile`: the time of a step by
  operation and stage.
- `_tune`, `data`, `loggers`, `recipes`, `checkpoints`, `report`: each by itself.
- `training`: the loop around the step; `mlx_lm`: language models for it.
- `config`: a training from a YAML file.
- `doctor`: what is wrong with an environment or a training.
- `cli`: the command line.
"""

from typing import TYPE_CHECKING, Any

from faststep._command import asks_for_environment

if TYPE_CHECKING:
    from faststep.doctor import check, diagnose

if not asks_for_environment():  # `faststep doctor` says why what follows fails
    from faststep import _native, losses  # noqa: F401, _native first: it checks the environment before MLX
    from faststep._native import version
    from faststep._profile import Profile, profile
    from faststep._step import MemoryPlan, Stats, Step, StepOutput, fast_step
    from faststep._tune import Tuning, tune

    __version__ = version()

__all__ = [
    "MemoryPlan",
    "Profile",
    "Stats",
    "Step",
    "StepOutput",
    "Tuning",
    "check",
    "diagnose",
    "fast_step",
    "losses",
    "profile",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import the doctor's names when they are first used: a training does without."""
    if name not in ("check", "diagnose"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from faststep import doctor

    return getattr(doctor, name)
