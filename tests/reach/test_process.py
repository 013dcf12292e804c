"""What a loss reads, changes, draws, writes and prints in the process: libraries, settings, clocks, files, signals."""

from __future__ import annotations

import contextlib
import contextvars
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.beside import Variant, beside, cases, squares
from support.helpers import plain_step
from support.programs.reach import Program

pytestmark = pytest.mark.filterwarnings("ignore:faststep:RuntimeWarning")
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE")


@pytest.mark.parametrize(("program", "variant"), cases("process"))
def test_a_program_is_its_plain_loop(program: Program, variant: Variant) -> None:
    beside(program, variant)


READ: dict[str, Callable[[], float]] = {
    "a clock": lambda: time.time() % 1000,
    "nanoseconds": lambda: time.time_ns() % 1e9 / 1e6,
    "the system's randomness": lambda: float(os.urandom(1)[0]),
    "a UUID": lambda: float(uuid.uuid4().int % 1000),
    "a new NumPy generator": lambda: float(np.random.default_rng().random()),
    "a new random.Random": lambda: random.Random().random(),
}


@pytest.mark.parametrize("kind", READ)
def test_a_loss_is_multiplied_by_what_it_has_just_read(kind: str) -> None:
    values = list[float]()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        values.append(READ[kind]())
        return squares(model, x) * values[-1]

    step, x = Step(nn.Linear(4, 2), optim.SGD(0.0), loss_fn), mx.ones((3, 4))
    unit = squares(step.model, x).item()
    losses = [step(x).loss.item() for _ in range(5)]
    assert losses == pytest.approx([unit * value for value in values], rel=1e-4)


def test_a_context_variable_is_that_of_the_context_in_which_the_step_is_called() -> None:
    def scaled(model: nn.Module, x: mx.array) -> mx.array:
        return squares(model, x) * SCALE.get()

    step, x = Step(nn.Linear(4, 2), optim.SGD(0.0), scaled), mx.ones((3, 4))
    contexts = [contextvars.copy_context() for _ in range(3)]
    for number, context in enumerate(contexts):
        context.run(SCALE.set, number + 1.0)
    losses = [context.run(step, x).loss.item() for _ in range(2) for context in contexts]
    assert losses == pytest.approx([losses[0] * (number % 3 + 1) for number in range(6)], rel=1e-5)
    with pytest.raises(LookupError):
        step(x)


@pytest.mark.parametrize("reads", [False, True])
def test_an_interruption_in_the_loss_is_one(reads: bool) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if reads:
            with contextlib.suppress(ValueError):
                x[0, 0].item()
        raise KeyboardInterrupt

    before = sys.gettrace()
    step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
    weight = mx.array(step.model.weight)
    with pytest.raises(KeyboardInterrupt):
        step(mx.ones((3, 4)))
    assert mx.array_equal(step.model.weight, weight)
    assert sys.gettrace() is before


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")
@pytest.mark.parametrize("at", [1, 2, 5])
def test_ctrl_c_in_a_loss_ends_one_step_and_no_other(at: int) -> None:
    calls = [0]

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        calls[0] += 1
        if calls[0] == at:
            signal.raise_signal(signal.SIGINT)
        return squares(model, x)

    model, reference = nn.Linear(4, 2), nn.Linear(4, 2)
    reference.update(model.parameters())
    step, plain = Step(model, optim.SGD(0.1), loss_fn), plain_step(reference, optim.SGD(0.1), squares)
    interrupted = 0
    for _ in range(8):
        try:
            step(mx.ones((3, 4)))
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 1
    assert calls[0] == 8
    for _ in range(step.optimizer.step.item()):
        plain(mx.ones((3, 4)))
    assert step.optimizer.step.item() in (7, 8)  # by its signal's time the step may have been whole
    assert mx.allclose(model.weight, reference.weight, rtol=1e-5)


@pytest.mark.parametrize(("look", "put"), [(sys.getprofile, sys.setprofile), (sys.gettrace, sys.settrace)])
def test_a_profiler_or_a_debugger_of_the_user_stays_where_it_is(
    look: Callable[[], Any], put: Callable[[Any], None]
) -> None:
    seen: list[str] = []

    def mine(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    before = look()
    step, x = Step(nn.Linear(4, 2), optim.SGD(0.1), squares), mx.ones((3, 4))
    put(mine)
    try:
        step(x)
        assert look() is mine
    finally:
        put(before)
    assert "call" in seen

    def fails(model: nn.Module, x: mx.array) -> mx.array:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Step(nn.Linear(4, 2), optim.SGD(0.1), fails)(x)
    assert look() is before


@pytest.mark.parametrize("draw", ["np.random.rand()", "np.ma.masked_less(np.arange(4.0), 1).mean()"])
def test_a_part_of_numpy_may_be_imported_by_the_loss(draw: str) -> None:
    """NumPy imports these as they are asked for, which is once in a process."""
    code = f"""
        import warnings; warnings.simplefilter("ignore")
        import numpy as np, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        from faststep import Step

        def loss_fn(model, x):
            return mx.square(model(x)).mean() * (1 + float({draw}))

        step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
        losses = [step(mx.ones((3, 4))).loss.item() for _ in range(4)]
        assert all(np.isfinite(losses)), losses
        {draw}
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
