from collections.abc import Callable
from os import PathLike
from typing import Any, TypedDict, final, type_check_only

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from faststep._options import Options

__all__ = ["MemoryPlan", "Step", "TraceRecord", "bind_blas", "bind_kernels", "current_state"]

_Named = list[tuple[str, mx.array]]

@type_check_only
class State(TypedDict):
    masters: _Named | None
    ema: _Named | None
    window: _Named | None
    weight: mx.array | None
    batches: int
    loss_scale: tuple[mx.array, mx.array] | None

_Stats = tuple[int, int, int, str, list[TraceRecord], int, dict[str, float], dict[str, int], float | None]

@final
class TraceRecord:
    @property
    def cause(self) -> str: ...
    @property
    def seconds(self) -> float: ...

@final
class MemoryPlan:
    @property
    def parameters(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def gradients(self) -> int: ...
    @property
    def activations(self) -> int: ...
    @property
    def others(self) -> int: ...
    @property
    def cache(self) -> int: ...
    @property
    def first_peak(self) -> int: ...
    @property
    def steady_peak(self) -> int: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def fits(self) -> bool: ...

@final
class Step:
    def __new__(cls, model: nn.Module, optimizer: Optimizer, options: Options) -> Step: ...
    def step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        loss_number: int,
        args: tuple[Any, ...],
        named: dict[str, Any],
        accumulate: int,
    ) -> tuple[Any, mx.array | None, mx.array | None, mx.array | bool]: ...
    def flush(self, model: nn.Module, optimizer: Optimizer) -> bool: ...
    def gradients(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        loss_number: int,
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]: ...
    def memory_plan(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        loss_number: int,
        args: tuple[Any, ...],
        named: dict[str, Any],
        accumulate: int,
    ) -> MemoryPlan: ...
    def synchronize(self) -> None: ...
    def state(self) -> State | None: ...
    def load_state(self, state: State, steps: int, updates: int, skipped: int) -> None: ...
    def stats(self) -> _Stats: ...

def current_state(optimizer: Optimizer) -> dict[str, Any]: ...
def bind_blas(library: str | PathLike[str]) -> int: ...
def bind_kernels() -> bool: ...
