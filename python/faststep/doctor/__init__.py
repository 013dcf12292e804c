"""Diagnosis: the environment, the native step beside plain MLX, and which part of a training hangs, leaks or slows.

**Environment**: `_environment` prints the lines: `_machine` by files and commands, `_probe` in a child process that
loads MLX. These use Python's standard library only, so that they work where MLX cannot be imported; that is why the
other names here are imported when they are first used.

**Check**: `_check` compares a step with `_plain`, the loop of MLX; `_comparison` is the result; `_kept` puts back what
was changed.

**Ladder**: `_diagnose` starts processes for the rungs of `_rungs` (`_child`, for a config) and watches them by clock
and memory (`_watch`), or watches from a second thread (`_inside`). A rung (`_rungs_plain`, `_rungs_step`, `_numbers`)
writes a line behind each step (`_recorder`); `_judge` says what is wrong, `_diagnosis` and `_page` show it.

**Numbers**: `_meaning` asks what changes the loss (`_held`: other values in the batch, other outputs of the model),
`_loss_functions` what the cross entropies get, `_all_batches` looks at all data, `_gradients`, `_divergence`,
`_frozen` and `_outside` at parameters. `_own_step` compares the user's step (`_own_calls`, `_weights`) with plain MLX.

Uses `_step`, `_random`, `_records`, `data`, `training`, `checkpoints`, `config` and `report`, the last five when they
are needed.
"""

from typing import TYPE_CHECKING, Any

from faststep.doctor._environment import environment

if TYPE_CHECKING:
    from faststep.doctor._check import check
    from faststep.doctor._comparison import Comparison, Difference, Timing
    from faststep.doctor._diagnose import diagnose, diagnose_config
    from faststep.doctor._diagnosis import Diagnosis
    from faststep.doctor._finding import Finding
    from faststep.doctor._watch import Measured

__all__ = [
    "Comparison",
    "Diagnosis",
    "Difference",
    "Finding",
    "Measured",
    "Timing",
    "check",
    "diagnose",
    "diagnose_config",
    "environment",
]
_PLACES = {
    "check": "_check",
    "Comparison": "_comparison",
    "Difference": "_comparison",
    "Timing": "_comparison",
    "diagnose": "_diagnose",
    "diagnose_config": "_diagnose",
    "Diagnosis": "_diagnosis",
    "Finding": "_finding",
    "Measured": "_watch",
}


def __getattr__(name: str) -> Any:
    """Import names that need MLX when they are first used."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
