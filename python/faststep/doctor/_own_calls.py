"""Calls of the user's own step: what each changed, which gradients its optimizer got, which errors it swallowed."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from faststep._step import call_with
from faststep.doctor._loss_functions import replaced
from faststep.doctor._recorder import Recorder
from faststep.doctor._subject import Subject
from faststep.doctor._user_code import is_users, shown

Named = dict[str, mx.array]
_UPDATES = 3  # that are looked at
_MOST = 512  # calls
_BUFFERS = ("running_mean", "running_var")


@dataclass(eq=False)
class OwnCall:
    """One call of the step.

    Attributes:
        batch: Its batch.
        seed: What the random state was made of.
        before: The trainable parameters before it.
        moved: The parameters that it changed, trainable or not.
        updates: For each update by an optimizer: the optimizer, its count of steps behind it, and the gradients that it
            got; None where they have no values (a compiled step).
        clips: Norms to which `optim.clip_grad_norm` was to clip.
        count: The count of steps of the optimizer that was handed over, behind the call.
        errors: Exceptions in the user's code that did not come out of it: `train.py:12: ValueError: ...`.
    """

    batch: Any
    seed: int
    before: Named
    moved: set[str] = field(default_factory=set)
    updates: list[tuple[Any, int | None, Named | None]] = field(default_factory=list)
    clips: list[float] = field(default_factory=list)
    count: int | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def updated(self) -> bool:
        """True if parameters moved, or the optimizer was called."""
        return bool(self.moved or self.updates)


def own_calls(subject: Subject, record: Recorder) -> list[OwnCall]:
    """Call the step until it has updated a few times, or the time is up; the last call is one with an update."""
    model, batches, calls = subject.model, subject.some(), list[OwnCall]()
    own_step, end = subject.own_step, time.perf_counter() + 2 * record.seconds
    assert own_step is not None, "the rung is there for it"
    while sum(each.updated for each in calls) < _UPDATES and len(calls) < _MOST:
        if len(calls) >= 3 and time.perf_counter() > end:
            break
        record.at(f"call {len(calls) + 1} of your step, to be compared with plain MLX")
        everything: Named = dict(tree_flatten(model.parameters()))
        call = OwnCall(batches[len(calls) % len(batches)], len(calls), dict(tree_flatten(model.trainable_parameters())))
        mx.random.seed(call.seed)
        with _updates(call), _clips(call), _errors(call):
            call_with(call.batch, own_step)
        after: Named = dict(tree_flatten(model.parameters()))
        names = [name for name in everything.keys() & after.keys() if not name.endswith(_BUFFERS)]
        call.moved = {name for name in names if not _same(everything[name], after[name])}
        call.count = _count(subject.optimizer)
        calls.append(call)
    return calls


def _same(a: mx.array, b: mx.array) -> bool:
    return a is b or (a.shape == b.shape and bool(mx.array_equal(a, b, equal_nan=True)))


@contextlib.contextmanager
def _updates(call: OwnCall) -> Iterator[None]:
    """Take note of the updates of MLX's optimizers in the block."""
    inside = [False]

    def watched(function: Any) -> Any:
        @functools.wraps(function)
        def apply(self: Any, gradients: Any, parameters: Any) -> Any:
            if inside[0]:
                return function(self, gradients, parameters)
            inside[0] = True
            try:
                result = function(self, gradients, parameters)
            finally:
                inside[0] = False
            call.updates.append((self, _count(self), _values(gradients)))
            return result

        return apply

    kinds: list[Any] = [optim.Optimizer, optim.MultiOptimizer]
    before = [kind.__dict__["apply_gradients"] for kind in kinds]
    for kind, function in zip(kinds, before, strict=True):
        kind.apply_gradients = watched(function)
    try:
        yield
    finally:
        for kind, function in zip(kinds, before, strict=True):
            kind.apply_gradients = function


@contextlib.contextmanager
def _clips(call: OwnCall) -> Iterator[None]:
    """Take note of the norms to which gradients are clipped in the block."""
    function: Any = optim.clip_grad_norm

    @functools.wraps(function)
    def watched(grads: Any, max_norm: float) -> Any:
        call.clips.append(float(max_norm))
        return function(grads, max_norm)

    with replaced([(optim, "clip_grad_norm", watched)]):
        yield


def _count(optimizer: Any) -> int | None:
    try:
        first = next(iter(getattr(optimizer, "optimizers", [optimizer])))
        return int(first.state["step"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # a tracer
        return None


def _values(gradients: Any) -> Named | None:
    named: Named = dict(tree_flatten(gradients))
    try:
        mx.eval(named)
    except (ValueError, RuntimeError):  # tracers
        return None
    return named


@contextlib.contextmanager
def _errors(call: OwnCall) -> Iterator[None]:
    """Take note of exceptions in the user's code, whether they come out of the block or not."""
    known: set[int] = set()

    def inside(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception":
            kind, error, _ = argument
            if not issubclass(kind, StopIteration | GeneratorExit) and id(error) not in known:
                known.add(id(error))
                place = f"{shown(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
                call.errors.append(f"{kind.__name__}: {str(error).partition(chr(10))[0]}, at {place}")
        return inside

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        return inside if is_users(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield
    finally:
        sys.settrace(before)
