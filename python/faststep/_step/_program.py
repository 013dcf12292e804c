"""The native step behind `Step` and `fast_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
from mlx.optimizers import Optimizer

from faststep._native import core
from faststep._step._average import refuse_average
from faststep._step._options import Options
from faststep._step._own import OwnOptimizer

# model, optimizer, the loss function, its positional and named arguments
_Call = tuple[nn.Module, Optimizer, Callable[..., Any] | None, tuple[tuple[Any, ...], dict[str, Any]]]


class Program:
    """The native step of a model, an optimizer and options, for any loss function; it keeps neither object alive."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: Options) -> None:
        """Check the options."""
        self.options = options
        self.calls = [0]  # so many, for whoever holds the list, the step gone or not
        self.core = core.Step(model, optimizer, options)
        self.clip_to(options.max_grad_norm)

    def clip_to(self, max_grad_norm: float | None) -> None:
        """Clip to another norm from the next step on."""
        self.options = self.options._replace(max_grad_norm=self.core.set_max_grad_norm(max_grad_norm))

    def call(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any] | None,
        batch: tuple[Any, ...],
        named: dict[str, Any],
    ) -> _Call:
        """Return what the user passes as the native step takes it."""
        self.calls[0] += 1
        refuse_average(model)
        if isinstance(optimizer, OwnOptimizer):
            optimizer.follow()
        return model, optimizer, loss_fn, (batch, named)

    def flush(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Update by the window that is open; return whether there was one."""
        call = self.call(model, optimizer, None, (), {})
        return self.core.flush(call)
