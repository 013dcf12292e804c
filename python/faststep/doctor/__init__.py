"""Diagnosis: the environment, the native step beside plain MLX, and which part of a training hangs, leaks or slows.

`_environment` prints the lines about the environment: `_machine` by files and commands, `_probe` in a child process
that loads MLX. These use Python's standard library only, so that they work where MLX cannot be imported; that is why
the other names here are imported when they are asked for. `_check` compares with `_plain`, the loop of MLX; `_kept`
puts back what was changed. Uses `_step`, `_random` and `_records`.
"""

from typing import TYPE_CHECKING, Any

from faststep.doctor._environment import environment

if TYPE_CHECKING:
    from faststep.doctor._check import check
    from faststep.doctor._comparison import Comparison, Difference, Timing

__all__ = ["Comparison", "Difference", "Timing", "check", "environment"]
_PLACES = {"check": "_check", "Comparison": "_comparison", "Difference": "_comparison", "Timing": "_comparison"}


def __getattr__(name: str) -> Any:
    """Import what needs MLX when it is asked for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
