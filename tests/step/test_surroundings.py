"""What a loss reads of the process and the machine: environment, context variables, clocks, files, true randomness."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import gc
import logging
import os
import random
import secrets
import sys
import time
import types
import uuid
import warnings
from collections.abc import Callable
from os import environ, getenv
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.data import Loader
from support.helpers import plain_step

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE")
SHIFT: contextvars.ContextVar[Any] = contextvars.ContextVar("SHIFT", default=0.5)
NAME = "FASTSTEP_TEST_SCALE"


def squares(model: nn.Module, x: mx.array) -> mx.array:
    return mx.square(model(x)).mean()


def imports(model: nn.Module, x: mx.array) -> mx.array:
    from os import environ as names

    return squares(model, x) * float(names.get("FASTSTEP_TEST_" + "SCALE", "1"))


LOSSES: dict[str, Callable[..., mx.array]] = {
    "os.environ": lambda model, x: squares(model, x) * float(os.environ.get(NAME, "1")),
    "os.getenv": lambda model, x: squares(model, x) * float(os.getenv(NAME, "1")),
    "environ": lambda model, x: squares(model, x) * (float(environ[NAME]) if NAME in environ else 1.0),
    "getenv": lambda model, x: squares(model, x) * float(getenv(NAME) or 1.0),
    "imports": imports,
}


def follows(loss_fn: Callable[..., mx.array], changes: list[Callable[[], object]]) -> Step:
    """Change what a loss reads between steps, and compare each step with the plain loop's."""
    mx.random.seed(2)
    model, x = nn.Linear(4, 2), mx.random.normal((8, 4))
    mine = nn.Linear(4, 2)
    mine.update(model.parameters())
    step = Step(mine, optim.SGD(0.1), loss_fn)
    plain = plain_step(model, optim.SGD(0.1), loss_fn)
    for number, change in enumerate([lambda: None, *changes]):
        change()
        for _ in range(2):
            ours = step(x).loss.item()
            assert ours == pytest.approx(plain(x)[0].item(), rel=1e-5), number  # type: ignore[union-attr]
    np.testing.assert_allclose(mine.weight, model.weight, rtol=1e-5, atol=1e-6)
    return step


@pytest.mark.parametrize("name", LOSSES)
def test_a_change_of_the_environment_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "2")
    step = follows(
        LOSSES[name],
        [
            lambda: monkeypatch.setenv(NAME, "3"),
            lambda: monkeypatch.setenv("FASTSTEP_TEST_OTHER", "1"),
            lambda: monkeypatch.delenv(NAME),
            lambda: monkeypatch.setenv(NAME, "4"),
        ],
    )
    assert step.stats.mode == "native"
    assert step.stats.traced <= 3


def test_an_environment_that_somebody_replaces_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "2")
    follows(
        LOSSES["os.environ"],
        [lambda: monkeypatch.setattr(os, "environ", {NAME: "3"}), lambda: os.environ.update({NAME: "5"})],
    )


def test_a_change_of_the_arguments_of_the_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    follows(
        lambda model, x: squares(model, x) * (2.0 if "--double" in sys.argv else 1.0),
        [lambda: monkeypatch.setattr(sys, "argv", [*sys.argv, "--double"]), lambda: sys.argv.remove("--double")],
    )


def test_a_change_of_a_context_variable_is_seen() -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return squares(model, x) * SCALE.get(1.0) + SHIFT.get()

    def change() -> Step:
        layer = nn.Linear(2, 1)
        return follows(
            loss_fn,
            [
                lambda: SCALE.set(2.0),
                lambda: SCALE.set(3.0),
                lambda: SHIFT.set(1.5),
                lambda: SHIFT.set(mx.array(2.0)),
                lambda: SHIFT.set(mx.array(3.0)),
                lambda: SHIFT.get().__iadd__(1.0),
                lambda: SHIFT.set(layer.bias.sum()),
            ],
        )

    step = contextvars.copy_context().run(change)
    assert step.stats.mode == "native"
    with pytest.raises(LookupError):
        SCALE.get()
    follows(loss_fn, [])


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


@pytest.mark.parametrize("known", [False, True])
def test_an_array_that_a_loss_keeps_in_a_context_variable_is_current(known: bool) -> None:
    kept: contextvars.ContextVar[Any] = contextvars.ContextVar("kept")
    if known:
        kept.set(0.0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        loss = squares(model, x)
        kept.set(loss)
        return loss

    step = Step(nn.Linear(4, 2), optim.SGD(1e-2), loss_fn)
    for _ in range(4):
        assert step(mx.ones((3, 4))).loss.item() == kept.get().item()
    assert step.stats.mode == "native"


START = time.monotonic()


READ: dict[str, Callable[[], float]] = {
    "the clock": lambda: time.time() % 1000,
    "nanoseconds": lambda: time.time_ns() % 1e9 / 1e6,
    "a clock by its name": lambda: perf_counter() % 1000,
    "since the start": lambda: time.monotonic() - START,
    "the date's clock": lambda: float(datetime.datetime.now().microsecond),
}


def test_a_loss_that_reads_a_clock_or_a_file_to_no_effect_is_told_of_it_once(tmp_path: Path) -> None:
    table = tmp_path / "scale"
    table.write_text("2.0")

    def timed(model: nn.Module, x: mx.array) -> mx.array:
        before = time.perf_counter()
        loss = squares(model, x)
        assert time.perf_counter() - before < 3600
        return loss

    def reading(model: nn.Module, x: mx.array) -> mx.array:
        return squares(model, x) * float(table.read_text())

    def by_hour(model: nn.Module, x: mx.array) -> mx.array:
        return squares(model, x) * (1.0 if datetime.datetime.now().year < 2000 else 2.0)

    def by_existence(model: nn.Module, x: mx.array) -> mx.array:
        return squares(model, x) * (2.0 if table.exists() else 1.0)

    for loss_fn, what in ((timed, "the clock"), (reading, "files"), (by_hour, "the clock"), (by_existence, "files")):
        step, x = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn), mx.ones((3, 4))
        step(x)
        with pytest.warns(RuntimeWarning, match=rf"reads {what} \(.*test_surroundings.py:\d+\) as") as caught:
            step(x)
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(x)
        assert (step.stats.mode, step.stats.traced) == ("native", 1)


def test_the_times_that_a_loss_takes_are_all_kept() -> None:
    seconds: list[float] = []

    def timed(model: nn.Module, x: mx.array) -> mx.array:
        before = time.perf_counter()
        loss = squares(model, x)
        seconds.append(time.perf_counter() - before)
        return loss

    step, x = Step(nn.Linear(4, 2), optim.SGD(0.1), timed), mx.ones((3, 4))
    with pytest.warns(RuntimeWarning, match="changes a list itself"):
        step(x)
    for _ in range(4):
        step(x)
    assert (step.stats.mode, len(seconds)) == ("plain", 5)


def test_what_python_calls_as_it_collects_garbage_is_not_read_by_the_loss() -> None:
    seconds: list[float] = []

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        gc.collect()
        return squares(model, x)

    def note(phase: str, about: dict[str, int]) -> None:
        seconds.append(time.perf_counter())

    step, x = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn), mx.ones((3, 4))
    gc.callbacks.append(note)
    try:
        step(x)
    finally:
        gc.callbacks.remove(note)
    assert seconds
    step(x)  # a warning is an error in these tests


def test_a_log_reads_the_clock_without_a_word(tmp_path: Path) -> None:
    log = logging.getLogger("faststep.test_surroundings")
    log.addHandler(handler := logging.FileHandler(tmp_path / "log"))

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        log.warning("shape %s", x.shape)
        return squares(model, x)

    step, x = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn), mx.ones((3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(x)
    handler.close()
    assert (step.stats.mode, step.stats.traced) == ("native", 1)
    assert (tmp_path / "log").read_text() == "shape (3, 4)\n"


RANDOM: dict[str, Callable[[], float]] = {
    "os.urandom": lambda: float(os.urandom(1)[0]),
    "secrets": lambda: float(secrets.randbelow(1000)),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "uuid": lambda: float(uuid.uuid4().int % 1000),
    "a new NumPy generator": lambda: float(np.random.default_rng().random()),
    "a new random.Random": lambda: random.Random().random(),
}


@pytest.mark.parametrize("kind", [*READ, *RANDOM])
def test_a_loss_that_reads_the_clock_or_draws_from_the_system_is_called_at_every_step(kind: str) -> None:
    read, values = (READ | RANDOM)[kind], list[float]()
    reason = r"depends on .*the clock" if kind in READ else r"takes from the system's randomness"

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        values.append(read())
        return squares(model, x) * values[-1]

    model = nn.Linear(4, 2)
    step, x = Step(model, optim.SGD(0.0), loss_fn), mx.ones((3, 4))
    unit = squares(model, x).item()
    with pytest.warns(RuntimeWarning, match=reason + r" \(.*test_surroundings.py:\d+\)"):
        losses = [step(x).loss.item()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses += [step(x).loss.item() for _ in range(4)]
    assert losses == pytest.approx([unit * value for value in values], rel=1e-4)
    assert step.stats.mode == "plain"


LOADED = Loader([np.zeros(4, np.float32)] * 8, batch_size=2)
OTHER = Step(nn.Linear(4, 2), optim.SGD(0.0), squares, ema_decay=0.5)
SET = Step(nn.Linear(4, 2), optim.SGD(0.0), squares, max_grad_norm=1.0)


def averaged(model: nn.Module, x: mx.array) -> mx.array:
    with OTHER.average() as other:
        return squares(model, x) * other.bias.sum()


OF_THE_PACKAGE: dict[str, tuple[Callable[..., mx.array], str]] = {
    "the place in the data": (lambda model, x: squares(model, x) * LOADED.position, "native"),
    "the epoch": (lambda model, x: squares(model, x) * (1 + LOADED.epoch), "native"),
    "counts of the data": (lambda model, x: squares(model, x) * LOADED.stats.batches, "plain"),
    "counts of another step": (lambda model, x: squares(model, x) * OTHER.stats.steps, "plain"),
    "the state of another step": (lambda model, x: squares(model, x) * OTHER.state["steps"], "plain"),
    "the average of another step": (averaged, "plain"),
    "the window of another step": (lambda model, x: squares(model, x) * SET.accumulate, "plain"),
    "the norm of another step": (lambda model, x: squares(model, x) * (SET.max_grad_norm or 0), "plain"),
    "the options of another step": (lambda model, x: squares(model, x) * (SET.options.max_grad_norm or 0), "plain"),
}


@pytest.mark.parametrize("name", OF_THE_PACKAGE)
@pytest.mark.filterwarnings("ignore:.*cannot be compiled.*the state of a step, a loader or a trainer:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*that it takes from where the step does not look:RuntimeWarning")
def test_what_a_loss_reads_of_loaders_and_of_other_steps_is_the_plain_loop_s(name: str) -> None:
    loss_fn, mode = OF_THE_PACKAGE[name]
    x = mx.random.normal((4, 4))

    def go_on() -> None:
        next(iter(LOADED), None)  # None: the epoch is over
        OTHER.model.bias = OTHER.model.bias + 1
        OTHER(x)
        SET.accumulate, SET.max_grad_norm = SET.accumulate + 1, (SET.max_grad_norm or 0) + 1

    assert follows(loss_fn, [go_on] * 6).stats.mode == mode


def test_a_generator_with_a_seed_draws_the_same_at_every_call() -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return squares(model, x) * (random.Random(3).random() + float(np.random.default_rng(3).random()))

    step = follows(loss_fn, [lambda: None])
    assert (step.stats.mode, step.stats.traced) == ("native", 1)


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


def catches(model: nn.Module, x: mx.array) -> mx.array:
    try:
        scale = float(x.mean())
    except Exception:
        scale = 3.0
    return squares(model, x) * scale


def suppresses(model: nn.Module, x: mx.array) -> mx.array:
    scale = 3.0
    with contextlib.suppress(ValueError, RuntimeError):
        scale = memoryview(x).nbytes / 100 + x[0, 0].item()  # type: ignore[operator]
    return squares(model, x) * scale


def evaluates(model: nn.Module, x: mx.array) -> mx.array:
    y = model(x)
    try:
        mx.eval(y)
    except ValueError:
        y = y * 3
    return mx.square(y).mean()


def returns_anyway(model: nn.Module, x: mx.array) -> mx.array:
    scale = 3.0
    try:
        scale = x[0, 0].item()  # type: ignore[assignment]
    finally:
        return squares(model, x) * scale  # noqa: B012


def raises_another(model: nn.Module, x: mx.array) -> mx.array:
    try:
        return squares(model, x) * float(x.mean())
    except ValueError:
        raise KeyError("no mean") from None


def finds_no_attribute(model: nn.Module, x: mx.array) -> mx.array:
    class Batch:
        @property
        def scale(self) -> Any:
            try:
                return x[0, 0].item()
            except ValueError:
                raise AttributeError("scale") from None

    return squares(model, x) * getattr(Batch(), "scale", 3.0)


def sees_in_backward(model: nn.Module, x: mx.array) -> mx.array:
    @mx.custom_function
    def scaled(y: mx.array) -> mx.array:
        return y

    @scaled.vjp
    def backward(primals: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        try:
            return cotangent * float(mx.abs(cotangent).max())
        except ValueError:
            return cotangent

    return mx.square(scaled(model(x))).mean()


def buffered(model: nn.Module, x: mx.array) -> mx.array:
    return squares(model, x) * float(np.frombuffer(x, dtype=np.float32).mean())  # type: ignore[call-overload]


def _codes(code: types.CodeType) -> list[types.CodeType]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return [code, *(found for each in inner for found in _codes(each))]


CAUGHT = [
    catches,
    suppresses,
    evaluates,
    returns_anyway,
    raises_another,
    finds_no_attribute,
    sees_in_backward,
    buffered,
]


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger traces this thread")
@pytest.mark.parametrize("loss_fn", CAUGHT)
def test_a_value_that_a_loss_reads_is_the_plain_loops_whatever_becomes_of_the_error(
    loss_fn: Callable[..., mx.array],
) -> None:
    with pytest.warns(RuntimeWarning, match="reads the value of an array") as warned:
        step = follows(loss_fn, [lambda: None])
    lines = {line for code in _codes(loss_fn.__code__) for *_, line in code.co_lines()}
    assert int(str(warned[0].message).split(f"{__file__}:")[1].split(")")[0]) in lines
    assert step.stats.mode == "plain"
    assert sys.gettrace() is None


class Scaled(optim.SGD):
    """Reads the largest gradient."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: Any) -> mx.array:
        scale = min(1.0, 1 / float(mx.abs(gradient).max()))
        return super().apply_single(gradient * scale, parameter, state)


class Caught(optim.SGD):
    """Reads it, and catches what comes of that."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: Any) -> mx.array:
        try:
            scale = min(1.0, 1 / float(mx.abs(gradient).max()))
        except (ValueError, RuntimeError):
            scale = 0.5
        return super().apply_single(gradient * scale, parameter, state)


class Counted(optim.SGD):
    """Reads the number of its steps, and its rate."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: Any) -> mx.array:
        return parameter - float(self.learning_rate) / self.step.item() * gradient


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger traces this thread")
@pytest.mark.parametrize("kind", [Scaled, Caught, Counted])
def test_a_value_that_an_optimizer_reads_is_the_plain_loops(kind: type[optim.SGD]) -> None:
    mx.random.seed(2)
    models, x = [nn.Linear(4, 2), nn.Linear(4, 2)], mx.random.normal((8, 4))
    models[1].update(models[0].parameters())
    step = Step(models[0], kind(0.1), squares)
    plain = plain_step(models[1], kind(0.1), squares)
    with pytest.warns(RuntimeWarning, match="reads the value of an array"):
        step(x)
    plain(x)
    for _ in range(3):
        np.testing.assert_allclose(step(x).loss.item(), plain(x)[0].item(), rtol=1e-5)  # type: ignore[union-attr]
    np.testing.assert_allclose(models[0].weight, models[1].weight, rtol=1e-5, atol=1e-6)
    assert step.stats.mode == "plain"


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger traces this thread")
def test_an_interruption_behind_a_read_stays_one() -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        with contextlib.suppress(ValueError):
            x[0, 0].item()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)(mx.ones((3, 4)))
    assert sys.gettrace() is None
