"""The extension module, loaded into an environment that fits it, and its hooks in MLX.

Importing this room checks the environment first. It uses the standard library, MLX and `faststep._core`, and no other
room; every room that needs the extension module takes `core` from here.
"""

from __future__ import annotations

from typing import Any

from faststep._native import _environment

_environment.check()
_environment.bind_blas()
_environment.bind_kernels()

from mlx.optimizers import Optimizer  # noqa: E402  (the environment has to be checked first)

from faststep import _core as core  # noqa: E402
from faststep._native._environment import version  # noqa: E402
from faststep._native._versions import environment, versions  # noqa: E402

__all__ = ["core", "environment", "version", "versions"]


def _getstate(self: Optimizer) -> dict[str, Any]:
    core.current_state(self)
    return dict(vars(self))


def _set_state(self: Optimizer, state: Any) -> None:
    vars(self)["_state"] = state


def _hook() -> None:
    """Make `Optimizer.state`, and copies and pickles of an optimizer, current when they are read.

    A native step keeps the moments in buffers of its own and writes them back into the optimizer's dicts on access.
    """
    state: property = vars(Optimizer)["state"]
    current = property(core.current_state, state.fset, doc=state.__doc__)
    behind = property(core.current_state, _set_state, doc="The dict behind `state`, which programs read too.")
    for name, value in {"state": current, "_state": behind, "__getstate__": _getstate}.items():
        setattr(Optimizer, name, value)


_hook()
