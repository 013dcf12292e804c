"""The options of a step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

import mlx.core as mx
import mlx.nn as nn

Nonfinite = Literal["skip", "raise", "allow"]
Replay = bool | Literal["auto"]
Sync = Literal["check", "broadcast"]
Transform = Callable[[nn.Module, dict[str, Any]], dict[str, Any]]


class Range(NamedTuple):
    """Range of a number in a config, from `least` on and below `below`."""

    least: float
    below: float | None = None


class Options(NamedTuple):
    """Options of `Step` and `fast_step`; the native step checks them when it is made, but for the last two."""

    max_grad_norm: Annotated[float | None, Range(0)] = None
    max_grad_value: Annotated[float | None, Range(0)] = None
    weighted: bool = False
    nonfinite: Nonfinite = "skip"
    max_loss: float | None = None
    compute_dtype: mx.Dtype | None = None
    ema_decay: Annotated[float | None, Range(0, below=1)] = None
    state_bits: Literal[8] | None = None
    stochastic_rounding: bool = False
    transform: Transform | None = None
    compile: bool = True
    replay: Replay = "auto"
    in_flight: Annotated[int, Range(0)] = 2
    max_traces: Annotated[int, Range(2)] = 64
    clear_cache_every: Annotated[int, Range(0)] = 0
    sync: Sync = "check"
    check_ranks: Annotated[int, Range(0)] = 0

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Options:
        """Return those among the arguments of a call."""
        return cls(*(arguments[name] for name in cls._fields))

    def plain(self) -> dict[str, Any]:
        """Return the options as values that other processes have too: a dtype as text, a function by its name."""
        return {name: _plain(value) for name, value in self._asdict().items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not callable(value):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def check_sync(sync: str) -> None:
    """Check the option.

    Raises:
        ValueError: It is something else.
    """
    if sync not in get_args(Sync):
        raise ValueError(f'sync: expected "check" or "broadcast", got {sync!r}')


def whole_number(name: str, value: int, least: int) -> int:
    """Return an option that is a count, checked.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below the least one.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if count < least:
        raise ValueError(f"{name}: expected a number from {least} on, got {count}")
    return count


def positive(name: str, value: float) -> float:
    """Return an option that is a number above 0, checked.

    Raises:
        TypeError: It is no number.
        ValueError: It is not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name}: expected a number above 0, got {value}")
    return float(value)
