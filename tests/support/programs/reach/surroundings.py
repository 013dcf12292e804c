"""What a loss reads of the process and the machine: environment, context variables, clocks, files, true randomness."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import datetime
import fractions
import logging
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable
from os import environ, getenv
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.data import Loader

from support.programs.reach.registry import (
    Around,
    Build,
    Changing,
    Loss,
    Made,
    Make,
    add,
    changed,
    changing,
    made_of,
    one_batch,
    program,
    rows_of_normals,
    scaled,
    squares,
)

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE")
SHIFT: contextvars.ContextVar[Any] = contextvars.ContextVar("SHIFT", default=0.5)
NAME = "FASTSTEP_TEST_SCALE"


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


def environment(name: str) -> Build:
    def build(patch: pytest.MonkeyPatch) -> Changing:
        patch.setenv(NAME, "2")
        return LOSSES[name], [
            lambda: patch.setenv(NAME, "3"),
            lambda: patch.setenv("FASTSTEP_TEST_OTHER", "1"),
            lambda: patch.delenv(NAME),
            lambda: patch.setenv(NAME, "4"),
        ]

    return build


for name in LOSSES:
    add("process", f"the environment by {name}", made_of(environment(name)))


@changing("process")
def an_environment_that_somebody_replaces(patch: pytest.MonkeyPatch) -> Changing:
    patch.setenv(NAME, "2")
    return LOSSES["os.environ"], [
        lambda: patch.setattr(os, "environ", {NAME: "3"}),
        lambda: os.environ.update({NAME: "5"}),
    ]


@changing("process")
def the_arguments_of_the_process(patch: pytest.MonkeyPatch) -> Changing:
    return scaled(lambda: 2.0 if "--double" in sys.argv else 1.0), [
        lambda: patch.setattr(sys, "argv", [*sys.argv, "--double"]),
        lambda: sys.argv.remove("--double"),
    ]


@program("process")
def context_variables(around: Around) -> Made:
    layer = nn.Linear(2, 1)
    tokens = [(SCALE, SCALE.set(1.0)), (SHIFT, SHIFT.set(0.5))]
    for variable, token in tokens:
        around.opened.callback(variable.reset, token)  # type: ignore[arg-type]

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return squares(model, x) * SCALE.get(1.0) + SHIFT.get()

    return changed(
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


def kept_in_a_context(known: bool) -> Make:
    """An array that a loss keeps in a context variable."""

    def make() -> Made:
        kept: contextvars.ContextVar[Any] = contextvars.ContextVar("kept")
        if known:
            kept.set(0.0)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss = squares(model, x)
            kept.set(loss)
            return loss

        return Made(loss_fn, lambda: kept.get(None))

    return make


for known in (False, True):
    add(
        "process",
        f"an array that a loss keeps in a context variable{' with a value' if known else ''}",
        kept_in_a_context(known),
    )


# clocks, files and true randomness


def kept_values(read: Callable[[], float]) -> Make:
    """A loss that keeps what it reads: a number more at each call."""

    def make() -> Made:
        values = list[float]()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            values.append(read())
            return squares(model, x) * (values[-1] / values[-1] if values[-1] else 1.0)

        return Made(loss_fn, lambda: len(values))

    return make


START = time.monotonic()


READ: dict[str, Callable[[], float]] = {
    "the clock": lambda: time.time() % 1000,
    "nanoseconds": lambda: time.time_ns() % 1e9 / 1e6,
    "a clock by its name": lambda: perf_counter() % 1000,
    "since the start": lambda: time.monotonic() - START,
    "the date's clock": lambda: float(datetime.datetime.now().microsecond),
}


RANDOM: dict[str, Callable[[], float]] = {
    "os.urandom": lambda: float(os.urandom(1)[0]),
    "secrets": lambda: float(secrets.randbelow(1000)),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "uuid": lambda: float(uuid.uuid4().int % 1000),
    "a new NumPy generator": lambda: float(np.random.default_rng().random()),
    "a new random.Random": lambda: random.Random().random(),
}


for name, read in (READ | RANDOM).items():
    add("process", f"a loss that keeps what it reads: {name}", kept_values(read))


def of_a_file(kind: str) -> Make:
    """A loss that reads a file, which the user writes between the calls."""

    def make(around: Around) -> Made:
        table = around.folder / "scale"
        table.write_text("2.0")

        def between(number: int) -> None:
            if kind == "exists" and number % 4 == 2:
                table.unlink(missing_ok=True)
            else:
                table.write_text(f"{1 + number // 3}.0")

        def scale() -> float:
            return float(table.read_text()) if kind == "is read" else 2.0 if table.exists() else 1.0

        return Made(scaled(scale), between=between)

    return make


for kind in ("is read", "exists"):
    add("process", f"a file that {kind}", of_a_file(kind))


@program("process")
def the_times_that_a_loss_takes() -> Made:
    seconds: list[float] = []

    def timed(model: nn.Module, x: mx.array) -> mx.array:
        before = time.perf_counter()
        loss = squares(model, x)
        seconds.append(time.perf_counter() - before)
        return loss

    return Made(timed, lambda: len(seconds))


@program("process")
def a_clock_to_no_effect() -> Made:
    def timed(model: nn.Module, x: mx.array) -> mx.array:
        before = time.perf_counter()
        loss = squares(model, x)
        assert time.perf_counter() - before < 3600
        return loss * (1.0 if datetime.datetime.now().year < 2000 else 2.0)

    return Made(timed)


@program("process")
def a_log_that_reads_the_clock(around: Around) -> Made:
    log = logging.Logger("faststep.surroundings")
    handler = logging.FileHandler(around.folder / "log")
    log.addHandler(handler)
    around.opened.callback(handler.close)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        log.warning("shape %s", x.shape)
        return squares(model, x)

    return Made(loss_fn, lambda: (around.folder / "log").read_text())


def of_the_package(read: Callable[[Any, Any, Any], Callable[[], Any]]) -> Make:
    """What a loss reads of loaders and of other steps."""

    def make() -> Made:
        loaded = Loader([np.zeros(4, np.float32)] * 8, batch_size=2)
        other = Step(nn.Linear(4, 2), optim.SGD(0.0), squares, ema_decay=0.5)
        norm = Step(nn.Linear(4, 2), optim.SGD(0.0), squares, max_grad_norm=1.0)

        def between(number: int) -> None:
            if number and number % 2 == 0:
                next(iter(loaded), None)  # None: the epoch is over
                other.model.bias = other.model.bias + 1
                other(rows_of_normals(number))
                norm.accumulate, norm.max_grad_norm = norm.accumulate + 1, (norm.max_grad_norm or 0) + 1

        return Made(scaled(read(loaded, other, norm)), between=between, optimizer=optim.SGD(1e-3))

    return make


def averaged(other: Any) -> Any:
    with other.average() as average:
        return average.bias.sum()


PACKAGE: dict[str, Callable[[Any, Any, Any], Callable[[], Any]]] = {
    "the place in the data": lambda loaded, other, norm: lambda: loaded.position,
    "the epoch": lambda loaded, other, norm: lambda: 1 + loaded.epoch,
    "counts of the data": lambda loaded, other, norm: lambda: loaded.stats.batches,
    "counts of another step": lambda loaded, other, norm: lambda: other.stats.steps,
    "the state of another step": lambda loaded, other, norm: lambda: other.state["steps"],
    "the average of another step": lambda loaded, other, norm: lambda: averaged(other),
    "the window of another step": lambda loaded, other, norm: lambda: norm.accumulate,
    "the norm of another step": lambda loaded, other, norm: lambda: norm.max_grad_norm or 0,
    "the options of another step": lambda loaded, other, norm: lambda: norm.options.max_grad_norm or 0,
}
for name, read_of in PACKAGE.items():
    add("process", f"what a loss reads of the package: {name}", of_the_package(read_of))


@program("process")
def a_generator_with_a_seed() -> Made:
    return Made(scaled(lambda: random.Random(3).random() + float(np.random.default_rng(3).random())))


# errors of values that a trace has not


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


def caught(loss_fn: Loss) -> Make:
    return lambda: Made(loss_fn, batch=one_batch, calls=6)


for each in CAUGHT:
    add("closure", f"a loss that {each.__name__.replace('_', ' ')}", caught(each))


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


def reading_a_value(own: type[optim.SGD]) -> Make:
    return lambda: Made(squares, optimizer=own(0.1))


for own in (Scaled, Caught, Counted):
    add("optimizer", f"an optimizer that reads a value: {own.__name__}", reading_a_value(own))


# what is hidden as well as it can be


SHARE = fractions.Fraction(1, 2)
MEMORY = ctypes.c_double(1.0)
ADDRESS = ctypes.addressof(MEMORY)
FLAGGED = np.ones(3)


def of_memory(model: nn.Module, x: mx.array) -> mx.array:
    return squares(model, x) * ctypes.c_double.from_address(ADDRESS).value


def of_a_key(model: nn.Module, x: mx.array) -> mx.array:
    return squares(model, x) * float(SHARE)


def of_flags(model: nn.Module, x: mx.array) -> mx.array:
    loss = squares(model, x)
    return loss if FLAGGED.flags.writeable else loss + mx.abs(model(x)).mean()


def change(weight: float) -> None:
    MEMORY.value = weight
    FLAGGED.flags.writeable = weight == 1.0
    vars(fractions.Fraction)["_numerator"].__set__(SHARE, int(weight))


def hidden(loss_fn: Loss) -> Make:
    """What a loss depends on and is hidden: it is changed between two calls."""

    def make(around: Around) -> Made:
        around.opened.callback(change, 1.0)
        return Made(loss_fn, between=lambda number: change(2.0 if number >= 6 else 1.0))

    return make


for each in (of_memory, of_a_key, of_flags):
    add("process", f"what is hidden: {each.__name__.replace('_', ' ')}", hidden(each))


@program("process")
def a_filter_that_counts() -> Made:
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

    return Made(loss_fn, lambda: count.n, model=model)


@program("process")
def attributes_of_numpy_arguments() -> Made:
    class Tagged(np.ndarray[Any, Any]):
        share: float

    def batch(number: int) -> tuple[Any]:
        array = np.ones((3, 4), np.float32).view(Tagged)
        array.share = 1.0 + number % 3
        return (array,)

    loss_fn = lambda model, x: squares(model, mx.array(x)) * getattr(x, "share", 1.0)  # noqa: E731
    return Made(loss_fn, batch=batch)


@program("model")
def a_model_that_counts_logs_and_draws() -> Made:
    seen: list[int] = []

    class Model(nn.Linear):
        calls = 0

        def __call__(self, x: mx.array) -> mx.array:
            self.calls += 1
            seen.append(len(x))
            return super().__call__(x) + 0 * mx.random.normal((1,))

    model = Model(4, 2)
    return Made(squares, lambda: (model.calls, seen), model=model, calls=20)
