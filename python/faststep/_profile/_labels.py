"""The modules that operations belong to, noted while a loss function is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from faststep._native import core

LOSS = "(loss)"


class Labels:
    """While it is entered, what a model's modules compute in this thread is labelled with their paths.

    Python tells of every call (`sys.setprofile`). What an inner module has computed is its own; what a module computes
    from the arguments of a call up to its result, and no inner one has, is the module's.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path or "(model)" for path, module in model.named_modules()}
        self._calls: list[tuple[FrameType, str]] = []
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> Labels:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        sys.setprofile(self._before)

    def _see(self, frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and self._calls and self._calls[-1][0] is frame:
            _, path = self._calls.pop()
            core.label(list(_arrays(value)), path)
        elif event == "call" and frame.f_code.co_name == "__call__" and frame.f_code.co_varnames:
            inner = self._paths.get(id(frame.f_locals.get(frame.f_code.co_varnames[0])))
            if inner is not None:
                outer = self._calls[-1][1] if self._calls else LOSS
                core.label([array for each in frame.f_locals.values() for array in _arrays(each)], outer)
                self._calls.append((frame, inner))


def _arrays(value: Any) -> Iterator[mx.array]:
    """Yield the arrays in a value that are no module's."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _arrays(each)
    elif isinstance(value, dict) and not isinstance(value, nn.Module):
        for each in value.values():
            yield from _arrays(each)
