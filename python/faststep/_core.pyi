from collections.abc import Callable
from os import PathLike
from typing import Any, final

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

__all__ = ["Step", "TraceRecord", "bind_blas", "bind_kernels", "current_state"]

@final
class TraceRecord:
    @property
    def cause(self) -> str: ...
    @property
    def seconds(self) -> float: ...

@final
class Step:
    def __new__(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        max_grad_norm: float | None,
        nonfinite: str,
        max_loss: float | None,
        compile: bool,
        in_flight: int,
    ) -> Step: ...
    def step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        loss_number: int,
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[Any, mx.array | None, mx.array | None]: ...
    def gradients(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        loss_number: int,
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]: ...
    def synchronize(self) -> None: ...
    def stats(self) -> tuple[int, int, str, list[TraceRecord]]: ...

def current_state(optimizer: Optimizer) -> dict[str, Any]: ...
def bind_blas(library: str | PathLike[str]) -> int: ...
def bind_kernels() -> bool: ...
