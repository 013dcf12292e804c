"""Errors of a training, with their place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal

Phase = Literal["data", "loss", "gradient", "update", "validation", "checkpoint", "callback"]


class RunError(RuntimeError):
    """The folder of a run cannot be trained in; nothing in it has changed."""


class TrainingError(RuntimeError):
    """An exception with the place where it happened; the exception itself is its `__cause__`.

    Attributes:
        phase: "data": the loader or what it reads. "loss": the loss function. "gradient": a loss or a gradient that is
            not finite. "update": the rest of the step. "validation", "checkpoint", "callback": what they say.
        step: The trainer's step, from 0.
        epoch: The epoch, from 1.
        batch: The batch of the epoch, from 0.
    """

    def __init__(self, message: str, *, phase: Phase, step: int, epoch: int, batch: int) -> None:
        super().__init__(f"{phase}, at step {step} (epoch {epoch}, batch {batch}): {message}")
        self.phase, self.step, self.epoch, self.batch = phase, step, epoch, batch


@contextlib.contextmanager
def tagged(phase: Callable[[BaseException], Phase], at: Callable[[], dict[str, int]]) -> Iterator[None]:
    """Raise any `Exception` from inside as a `TrainingError` that says where it happened."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise TrainingError(text, phase=phase(error), **at()) from error


def phase_of_step(loss_fn: Callable[..., Any]) -> Callable[[BaseException], Phase]:
    """Return what tells in which phase of a step an exception was raised."""
    function = getattr(loss_fn, "__func__", loss_fn)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)

    def phase(error: BaseException) -> Phase:
        if isinstance(error, FloatingPointError):
            return "gradient"
        return "loss" if code is not None and _passed(error.__traceback__, code) else "update"

    return phase


def _passed(traceback: TracebackType | None, code: Any) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return True
        traceback = traceback.tb_next
    return False
