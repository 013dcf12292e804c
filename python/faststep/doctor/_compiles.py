"""Calls of `mx.compile` that a step makes again and again: each makes a new trace."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from faststep.doctor._user_code import caller


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of `mx.compile` in the block, by the place of the user's code that makes them."""
    calls: Counter[str] = Counter()
    compile_of_mlx: Any = mx.compile

    def counted(*arguments: Any, **named: Any) -> Any:
        if (place := caller()) is not None:
            calls[place] += 1
        return compile_of_mlx(*arguments, **named)

    mx.compile = counted
    try:
        yield calls
    finally:
        mx.compile = compile_of_mlx
