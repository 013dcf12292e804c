"""The extension module, loaded into an environment that fits it, and what it hooks into MLX."""

from __future__ import annotations

from typing import Any

from faststep import _environment

_environment.check()
_environment.bind_blas()
_environment.bind_kernels()

from mlx.optimizers import Optimizer  # noqa: E402  (the environment has to be checked first)

from faststep import _core as core  # noqa: E402

__all__ = ["core"]


def _getstate(self: Optimizer) -> dict[str, Any]:
    core.current_state(self)
    return dict(vars(self))


def _hook() -> None:
    """Make `Optimizer.state`, and copies and pickles of an optimizer, current when they are read.

    A native step keeps the moments in buffers of its own; the optimizer's dicts get them back when somebody looks.
    """
    state: property = vars(Optimizer)["state"]
    current = property(core.current_state, state.fset, doc=state.__doc__)
    for name, value in {"state": current, "__getstate__": _getstate}.items():
        setattr(Optimizer, name, value)


_hook()
