"""The training step of MLX, native: gradients, clipping, update and evaluation in one call.

A loop of your own:

    from faststep import fast_step

    for x, y in loader:
        loss = fast_step(model, optimizer, loss_fn, x, y, max_grad_norm=1.0)

- `fast_step`, and `Step`, the same with a handle: the gradients' norm, accumulation, averages, statistics, state.
- `diagnose` says what is wrong with a training, `check` compares the step with plain MLX on your model, `profile` shows
  where the time of a loop goes, `tune` tries environment variables.
- `RankError`: what is wrong with the other processes of a step's `group`.
- `losses`: losses that need less memory than their plain form.
- `Trainer` and `Loader` (extra `train`): the loop around the step, and batches that are always evaluated. Their rooms,
  `faststep.training`, `data`, `checkpoints`, `loggers`, `recipes` and `config`, have more.

The command `faststep` trains from a config file.
"""

# The rooms, each of which imports only those above it in this list:
#
# - `_native`: the extension module `_core`, in an environment that fits it; `_watch`: reports of hangs; `_records`:
#   values and texts of log records; `_command`, `_files`, `_optional`, `_random`, `losses`, `metrics`: one file each.
# - `_reach`: what a loss reads, for the native step; `_step`: `Step` and `fast_step`; `_profile`: the time of a step by
#   operation and stage.
# - `_tune`, `data`, `loggers`, `recipes`, `checkpoints`, `report`: each by itself.
# - `training`: the loop around the step; `mlx_lm`: language models for it.
# - `config`: a training from a YAML file.
# - `doctor`: what is wrong with an environment or a training.
# - `cli`: the command line.

from typing import TYPE_CHECKING, Any

from faststep._command import asks_for_environment

if TYPE_CHECKING:
    from faststep.data import Loader
    from faststep.doctor import check, diagnose
    from faststep.training import Trainer

if not asks_for_environment():  # `faststep doctor` says why what follows fails
    from faststep import _native, losses  # noqa: F401, _native first: it checks the environment before MLX
    from faststep._native import version
    from faststep._profile import Profile, profile
    from faststep._step import MemoryPlan, RankError, Stats, Step, StepOutput, fast_step
    from faststep._tune import Tuning, tune

    __version__ = version()

__all__ = [
    "Loader",
    "MemoryPlan",
    "Profile",
    "RankError",
    "Stats",
    "Step",
    "StepOutput",
    "Trainer",
    "Tuning",
    "check",
    "diagnose",
    "fast_step",
    "losses",
    "profile",
    "tune",
]
_ROOMS = {"Loader": "data", "Trainer": "training", "check": "doctor", "diagnose": "doctor"}


def __getattr__(name: str) -> Any:
    """Import names that a step does without when they are first used."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"faststep.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    """Offer the public names."""
    return [*__all__, "__doc__", "__version__"]
