"""What a loss depends on and nobody watches: now and then it is called once more, and a warning tells."""

from __future__ import annotations

import ctypes
import fractions
import logging
import os
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.beside import squares
from support.helpers import plain_step

SHARE = fractions.Fraction(1, 2)
MEMORY = ctypes.c_double(1.0)
ADDRESS = ctypes.addressof(MEMORY)
FLAGGED = np.ones(3)
KILL: Any = getattr(ctypes.CDLL(None), "kill", None)


def of_a_caller(model: nn.Module, x: mx.array) -> mx.array:
    frame: Any = sys._getframe()
    while "weight_of_this_step" not in frame.f_locals:
        frame = frame.f_back
    return squares(model, x) * frame.f_locals["weight_of_this_step"]


def of_memory(model: nn.Module, x: mx.array) -> mx.array:
    return squares(model, x) * ctypes.c_double.from_address(ADDRESS).value


def of_a_key(model: nn.Module, x: mx.array) -> mx.array:
    return squares(model, x) * float(SHARE)


def of_flags(model: nn.Module, x: mx.array) -> mx.array:
    loss = squares(model, x)
    return loss if FLAGGED.flags.writeable else loss + mx.abs(model(x)).mean()


def raising(model: nn.Module, x: mx.array) -> mx.array:
    if not FLAGGED.flags.writeable:
        raise LookupError("it may not be written to")
    return squares(model, x)


def change(weight: float) -> None:
    MEMORY.value = weight
    FLAGGED.flags.writeable = weight == 1.0
    vars(fractions.Fraction)["_numerator"].__set__(SHARE, int(weight))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("loss_fn", [of_a_caller, of_memory, of_a_key, of_flags])
def test_what_nobody_watches_is_told_of_and_seen_from_then_on(
    loss_fn: Callable[..., mx.array], accumulate: int
) -> None:
    def train(fast: bool) -> None:
        mx.random.seed(1)
        change(1.0)
        model, optimizer = nn.Linear(4, 2), optim.SGD(0.0)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn, accumulate=accumulate)
        weight_of_this_step = 1.0
        for number in range(40):
            if number == 12:
                weight_of_this_step = 2.0
                change(weight_of_this_step)
            x = mx.random.normal((3, 4), key=mx.random.key(number))
            losses.append(float(step(x).loss if fast else plain(x)[0]))
        assert (step.stats.mode, weight_of_this_step) == ("plain" if fast else "native", 2.0)

    losses: list[float] = []
    train(False)
    with pytest.warns(RuntimeWarning, match="called again, it gives something else .*that is watched") as told:
        train(True)
    change(1.0)
    assert len(told) == 1
    np.testing.assert_allclose(losses[40:52], losses[:12], rtol=1e-5)
    np.testing.assert_allclose(losses[72:], losses[32:40], rtol=1e-5)


def test_an_error_by_what_nobody_watches_is_raised() -> None:
    step, x = Step(nn.Linear(4, 2), optim.SGD(0.0), raising), mx.ones((3, 4))
    change(1.0)
    for _ in range(5):
        step(x)  # so often until the next look
    change(2.0)
    with pytest.raises(LookupError, match="it may not be written to"):
        step(x)
    change(1.0)
    assert step(x).loss.item() == pytest.approx(squares(step.model, x).item(), rel=1e-5)
    assert step.stats.mode == "native"


def test_attributes_of_numpy_arguments_are_told_of() -> None:
    class Tagged(np.ndarray[Any, Any]):
        share: float

    def batch(share: float) -> Tagged:
        array = np.ones((3, 4), np.float32).view(Tagged)
        array.share = share
        return array

    def loss_fn(model: nn.Module, x: Any) -> mx.array:
        return squares(model, mx.array(x)) * getattr(x, "share", 1.0)

    step = Step(nn.Linear(4, 2), optim.SGD(0.0), loss_fn)
    step(batch(1.0))
    step(batch(3.0))
    with pytest.warns(RuntimeWarning, match="something else with the NumPy arrays"):
        step(batch(3.0))
    assert step(batch(2.0)).loss.item() == pytest.approx(2 * squares(step.model, mx.ones((3, 4))).item(), rel=1e-5)


def take_twelve(step: Step, error: type[BaseException]) -> int:
    """Go on until twelve steps are taken; return how often an error has ended one."""
    met = taken = 0
    while taken < 12:
        try:
            step(mx.ones((3, 4)))
            taken += 1
        except error:
            met += 1
            taken = step.optimizer.step.item()
    return met


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")
@pytest.mark.parametrize("kind", ["ctrl-c", "alarm"])
@pytest.mark.parametrize("counts", [False, True])
def test_a_signal_in_a_call_on_trial_is_handled_behind_it(counts: bool, kind: str) -> None:
    calls, agent = ctypes.c_long(0), types.SimpleNamespace(n=0)
    address, number = ctypes.addressof(calls), signal.SIGINT if kind == "ctrl-c" else signal.SIGALRM
    error: type[BaseException] = KeyboardInterrupt if kind == "ctrl-c" else TimeoutError

    def late(*_: Any) -> None:
        raise TimeoutError

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        call = ctypes.c_long.from_address(address)  # which no call on trial puts back
        call.value += 1
        if counts:
            agent.n += 1
        if call.value == at:
            KILL(os.getpid(), number)  # as another process would: Python notices no such call
        return squares(model, x)

    before = signal.signal(signal.SIGALRM, late)
    try:
        for at in range(1, 14):
            mx.random.seed(0)
            calls.value, agent.n = 0, 0
            step, plain = (Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn) for _ in range(2))
            plain.model.update(step.model.parameters())
            met = take_twelve(step, error)
            assert (met, step.optimizer.step.item(), step.stats.mode) == (int(calls.value >= at), 12, "native")
            assert not counts or 12 <= agent.n <= 12 + met  # of a call that it ends, the plain loop counts too
            calls.value = at
            for _ in range(12):
                plain(mx.ones((3, 4)))
            assert mx.array_equal(step.model.weight, plain.model.weight)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")
def test_a_handler_that_raises_for_a_second_ctrl_c_in_a_call_on_trial_is_heard() -> None:
    """It raises once: what it raises in the loss on trial, where an error is that of a batch, comes behind the step."""
    calls, asked = ctypes.c_long(0), list[int]()
    address = ctypes.addressof(calls)

    def once(*_: Any) -> None:
        if not asked:
            asked.append(calls.value)
            raise KeyboardInterrupt

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        call = ctypes.c_long.from_address(address)  # which no call on trial puts back
        call.value += 1
        if call.value == at:
            KILL(os.getpid(), signal.SIGINT)
            call.value += 0  # where the first one is taken note of
            KILL(os.getpid(), signal.SIGINT)
        return squares(model, x)

    before = signal.signal(signal.SIGINT, once)
    try:
        for at in range(1, 14):
            calls.value = 0
            asked.clear()
            step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
            met = take_twelve(step, KeyboardInterrupt)
            assert (met, step.optimizer.step.item(), step.stats.mode) == (int(calls.value >= at), 12, "native")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("calls", [9, 10, 99, 100, 1000])
def test_a_look_leaves_nothing_behind(calls: int) -> None:
    seen: list[int] = []

    class Model(nn.Linear):
        calls = 0

        def __call__(self, x: mx.array) -> mx.array:
            self.calls += 1
            seen.append(len(x))
            return super().__call__(x) + 0 * mx.random.normal((1,))

    mx.random.seed(1)
    model = Model(4, 2)
    step = Step(model, optim.SGD(0.0), squares)
    for _ in range(calls + 1):
        step(mx.ones((3, 4)))
    key = mx.random.state[0].tolist()
    assert (model.calls, len(seen), step.stats.mode, len(step.stats.traces)) == (calls + 1, calls + 1, "native", 1)
    mx.random.seed(1)
    Model(4, 2)
    for _ in range(calls + 1):
        mx.random.normal((1,))
    assert mx.random.state[0].tolist() == key


def test_a_filter_that_counts_is_no_reason_to_warn() -> None:
    model, logger = nn.Linear(4, 2), logging.Logger("train")

    class Count(logging.Filter):
        n = 0

        def filter(self, record: logging.LogRecord) -> bool:
            self.n += 1
            return True

    count = Count()
    logger.addFilter(count)
    logger.addHandler(logging.NullHandler())
    model.kept = logger, count

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        logger.info("batch of %d", len(x))
        return squares(model, x)

    step = Step(model, optim.SGD(0.1), loss_fn)
    for _ in range(12):
        step(mx.ones((3, 4)))
    assert step.stats.mode == "native"
