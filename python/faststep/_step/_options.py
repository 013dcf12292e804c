"""The options of a step."""

from __future__ import annotations

import operator
from typing import Literal, NamedTuple

import mlx.core as mx

Nonfinite = Literal["skip", "raise", "allow"]


class Options(NamedTuple):
    """Options of `Step` and `fast_step`; the native step checks them when it is made."""

    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    weighted: bool = False
    nonfinite: Nonfinite = "skip"
    max_loss: float | None = None
    compute_dtype: mx.Dtype | None = None
    ema_decay: float | None = None
    compile: bool = True
    in_flight: int = 2
    max_traces: int = 64
    clear_cache_every: int = 0


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
