"""Optimizers of a user's own: what their code reads beside its arrays, and what it changes, draws or takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from support.programs.reach.registry import (
    BAD_BATCHES,
    WINDOWS,
    Around,
    Box,
    Made,
    Make,
    add,
    changed,
    one_batch,
    program,
    squares,
)

OPTIONS = {"decay": 1.0}


class Own(optim.SGD):
    """Reads what is neither its own nor an array of its state."""

    strength, table = 1.0, [1.0]

    def __init__(self, box: Box) -> None:
        super().__init__(0.1)
        self.box = box

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: Any) -> mx.array:
        scale = OPTIONS["decay"] * self.strength * self.table[0] * self.box.value
        return super().apply_single(gradient * scale, parameter, state)


def own_that_reads(kind: str) -> Make:
    """What an optimizer's own code reads is changed between the calls."""

    def make(around: Around) -> Made:
        box = Box(mx.array(1.0) if "array" in kind else 1.0)
        change: dict[str, Callable[[], object]] = {
            "dict": lambda: OPTIONS.update(decay=3.0),
            "class": lambda: setattr(Own, "strength", 3.0),
            "list": lambda: Own.table.__setitem__(0, 3.0),
            "object": lambda: setattr(box, "value", 3.0),
            "array": lambda: setattr(box, "value", mx.array(3.0)),
            "array in place": lambda: box.value.__imul__(3.0),
        }
        around.patch.setitem(OPTIONS, "decay", 1.0)
        around.patch.setattr(Own, "strength", 1.0)
        around.patch.setattr(Own, "table", [1.0])
        return changed(squares, [change[kind], lambda: None], lambda: box.value, optimizer=Own(box))

    return make


for kind in ("dict", "class", "list", "object", "array", "array in place"):
    add("optimizer", f"code that reads what changes: {kind}", own_that_reads(kind))


@program("optimizer")
def a_number_that_an_optimizer_reads_and_that_changes_at_every_call(around: Around) -> Made:
    box = Box(1.0)
    around.patch.setitem(OPTIONS, "decay", 1.0)
    return Made(
        squares, between=lambda number: setattr(box, "value", box.value * 1.1), optimizer=Own(box), batch=one_batch
    )


class Scaler:
    """Scales losses; the program counts by it after each step."""

    def __init__(self) -> None:
        self.scale, self.good = 4.0, 0

    def update(self) -> None:
        """Count a step: a method that no code of the optimizer calls, with the name of one of an optimizer's."""
        self.good += 1
        if self.good % 8 == 0:
            self.scale *= 2


class Scaled(optim.Adam):
    def __init__(self, scaler: Scaler) -> None:
        super().__init__(0.01)
        self.scaler = scaler

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        return super().apply_gradients(tree_map(lambda each: each / self.scaler.scale, gradients), parameters)


@program("optimizer")
def a_method_of_another_object_that_is_named_update() -> Made:
    scaler = Scaler()
    seen = lambda: (scaler.scale, scaler.good)  # noqa: E731
    loss_fn = lambda model, x: squares(model, x) * scaler.scale  # noqa: E731
    return Made(loss_fn, seen, lambda number: scaler.update(), optimizer=Scaled(scaler), batch=one_batch, calls=20)


class Adjusted(optim.AdamW):
    """Has options that are computed of what stands on its class."""

    factor, eps = 1.0, 1e-3

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(1e-2)
        if kind == "a class's":
            del self.eps

    def scaled(self, name: str, value: Any) -> Any:
        return value * self.factor if self.kind == name else value

    @property
    def learning_rate(self) -> Any:
        return self.scaled("rate", self.state["learning_rate"])

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.state["learning_rate"] = mx.array(value)

    @property
    def weight_decay(self) -> Any:
        return self.scaled("decay", 0.5)

    @weight_decay.setter
    def weight_decay(self, value: Any) -> None:
        """Leave it."""

    @property
    def betas(self) -> Any:
        return [self.scaled("betas", 0.5), 0.9]

    @betas.setter
    def betas(self, value: Any) -> None:
        """Leave it."""


def adjusted(kind: str) -> Make:
    """What properties of an optimizer read of its class."""
    name, other = ("eps", 1.0) if kind == "a class's" else ("factor", 0.1)

    def make(around: Around) -> Made:
        change = lambda: around.patch.setattr(Adjusted, name, other)  # noqa: E731
        return changed(squares, [change, lambda: None], optimizer=Adjusted(kind))

    return make


for kind in ("rate", "decay", "betas", "a class's"):
    add("optimizer", f"properties that read of their class: {kind}", adjusted(kind))


def noisy() -> optim.Optimizer:
    rng = np.random.default_rng(1)

    class Noisy(optim.SGD):
        def apply_single(self, gradient: mx.array, parameter: mx.array, state: Any) -> mx.array:
            noise = mx.array(rng.standard_normal(gradient.shape).astype(np.float32))
            return super().apply_single(gradient + 0.1 * noise, parameter, state)

    return Noisy(0.1)


def cycling(reads: bool) -> optim.Optimizer:
    numbers, log = [0], list[float]()

    class Cycling(optim.SGD):
        def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
            numbers[0] = (numbers[0] + 1) % 3
            scale = 1.0 + numbers[0]
            if reads:
                log.append(float(gradients["bias"].sum()))
                scale += 0.1 * len(log)
            return super().apply_gradients(tree_map(lambda each: each * scale, gradients), parameters)

    return Cycling(0.1)


def taking() -> optim.Optimizer:
    scales = iter(np.linspace(1, 2, 20).tolist())

    class Taking(optim.SGD):
        def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
            scale = next(scales)
            return super().apply_gradients(tree_map(lambda each: each * scale, gradients), parameters)

    return Taking(0.1)


CHANGING: dict[str, Callable[[], optim.Optimizer]] = {
    "draws": noisy,
    "takes": taking,
    "counts in a circle": lambda: cycling(False),
    "counts and reads": lambda: cycling(True),
}


def of_its_own(make_own: Callable[[], optim.Optimizer]) -> Make:
    return lambda: Made(squares, optimizer=make_own())


for kind, make_own in CHANGING.items():
    add("optimizer", f"an optimizer that {kind}", of_its_own(make_own))


class Momentum:
    """Keeps an average for each parameter, made at the first update."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        self.learning_rate = learning_rate
        self.averages: dict[str, mx.array] = {}

    def update(self, model: nn.Module, gradients: Any) -> None:
        """Go along the average."""
        parameters = dict(tree_flatten(model.parameters()))
        for path, gradient in tree_flatten(gradients):
            average = 0.9 * self.averages.get(path, mx.zeros_like(gradient)) + gradient
            self.averages[path] = average
            parameters[path] = parameters[path] - self.learning_rate * average
        model.update(tree_unflatten(list(parameters.items())))

    @property
    def state(self) -> dict[str, mx.array]:
        """What a loop evaluates."""
        return self.averages


class Counted(Momentum):
    """Corrects its average by a number that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def update(self, model: nn.Module, gradients: Any) -> None:
        """Count, and go less far at first."""
        self.step += 1
        self.learning_rate = 1e-2 * (1 - 0.5**self.step)
        super().update(model, gradients)


class Remembering(Momentum):
    """Keeps the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Several:
    """Gives matrices to one of MLX's optimizers and the rest to another, as trainers of Muon do."""

    def __init__(self) -> None:
        self.matrices, self.rest = optim.Muon(1e-2), optim.Adam(1e-2)

    def update(self, model: nn.Module, gradients: Any) -> None:
        """Update both parts."""
        flat = tree_flatten(gradients)
        self.matrices.update(model, tree_unflatten([(path, each) for path, each in flat if each.ndim == 2]))
        self.rest.update(model, tree_unflatten([(path, each) for path, each in flat if each.ndim != 2]))

    @property
    def state(self) -> list[Any]:
        """Those of both."""
        return [self.matrices.state, self.rest.state]


class Wrapping:
    """Leaves the update to another object, and fails behind it when it is told to."""

    fails = False

    def __init__(self, inner: Any) -> None:
        self.inner, self.outer = inner, None

    def update(self, model: nn.Module, gradients: Any) -> None:
        """Update by the other."""
        self.inner.update(model, gradients)
        if self.fails:
            raise KeyError("no update")

    @property
    def state(self) -> Any:
        """What the other keeps."""
        return self.inner.state


class Counting(Wrapping):
    """Counts its updates in a number."""

    updates = 0

    def update(self, model: nn.Module, gradients: Any) -> None:
        """Count, and go less far each time."""
        self.updates += 1
        super().update(model, tree_map(lambda each: each / self.updates, gradients))


class Parts(Several):
    """Has both in objects of its own, in a dict and a list."""

    def __init__(self) -> None:
        self.parts = {
            "matrices": [Wrapping(optim.SGD(1e-2, momentum=0.9))],
            "rest": Wrapping(Wrapping(optim.Adam(1e-2))),
        }

    @property
    def matrices(self) -> Any:  # type: ignore[override]
        """The one of matrices."""
        return self.parts["matrices"][0]  # type: ignore[index]

    @property
    def rest(self) -> Any:  # type: ignore[override]
        """The other one."""
        return self.parts["rest"]


class Slotted:
    """Keeps another object where attributes of no dict are."""

    __slots__ = ("__weakref__", "inner")

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    update, state = Wrapping.update, Wrapping.state
    fails = False


def known_to_the_outer() -> Wrapping:
    """Make one whose inner part refers to it."""
    inner = Wrapping(optim.Adam(1e-2))
    outer = Wrapping(inner)
    inner.outer = outer
    return outer


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "momentum": lambda _: Momentum(),
    "counted": lambda _: Counted(),
    "remembering": Remembering,
    "deep": lambda _: Wrapping(Wrapping(Wrapping(optim.Adam(1e-2)))),
    "parts": lambda _: Wrapping(Parts()),
    "cyclic": lambda _: known_to_the_outer(),
    "counted deep": lambda _: Wrapping(Counting(Wrapping(optim.Lion(1e-3)))),
}


class Enclosing:
    """Leaves the update to an optimizer of MLX's that is none of its attributes."""

    def __init__(self) -> None:
        optimizer = optim.Adam(1e-2)
        self.inner = lambda: optimizer

    def update(self, model: nn.Module, gradients: Any) -> None:
        """Update by the other."""
        self.inner().update(model, gradients)

    @property
    def state(self) -> Any:
        """What the other keeps."""
        return self.inner().state


class Far(Wrapping):
    """Keeps its optimizer by an address, which no code names."""

    kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        optimizer = optim.Adam(1e-2)
        self.kept.append(optimizer)
        self.address = id(optimizer)

    @property
    def inner(self) -> Any:  # type: ignore[override]
        """The optimizer."""
        return ctypes.cast(self.address, ctypes.py_object).value


# optimizers that are none of an object's attributes
HIDDEN: dict[str, Callable[[nn.Module], Any]] = {
    "enclosing": lambda _: Enclosing(),
    "slotted": lambda _: Wrapping(Slotted(optim.Adam(1e-2))),
    "far": lambda _: Far(),
}


def updating_object(kind: str, near: float) -> None:
    def make() -> Made:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        return Made(squares, model=model, optimizer=(KINDS | HIDDEN)[kind](model))

    add("optimizer", f"an object that updates: {kind}", make, near=near)


for kind in KINDS | HIDDEN:
    updating_object(kind, 2e-5)
# Newton and Schulz's iteration differs in rounding where it is compiled
KINDS["several"] = lambda _: Several()
updating_object("several", 1e-3)


@program("optimizer")
def what_is_changed_in_an_object_that_updates() -> Made:
    optimizer = Momentum()

    def between(number: int) -> None:
        optimizer.learning_rate = 1e-2 / (1 + number // 2)
        if number == 6:
            optimizer.averages = {path: 0.5 * value for path, value in optimizer.averages.items()}

    return Made(squares, between=between, optimizer=optimizer)


def of_numpy(kind: Any) -> Make:
    """Options that are numbers of NumPy."""

    def make() -> Made:
        optimizer = optim.AdamW(1e-2)

        def between(number: int) -> None:
            optimizer.weight_decay, optimizer.learning_rate = kind(0.01 * number), kind(1e-2 / (1 + number))

        return Made(squares, between=between, optimizer=optimizer)

    return make


for number in (float, np.float64, np.float32):
    add("optimizer", f"options that are numbers of {number.__name__}", of_numpy(number))


@program("optimizer", without=("Step", "fast_step", *WINDOWS, *BAD_BATCHES))
def moments_that_numpy_makes() -> Made:
    """NumPy's number on the left makes a NumPy array of MLX's: it stays in the state."""

    class Moments(optim.SGD):
        def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
            state["v"] = np.float32(self.momentum) * state["v"] + np.array(gradient)
            return parameter - self.learning_rate.astype(gradient.dtype) * mx.array(state["v"])

    return Made(squares, optimizer=Moments(1e-2, momentum=0.9))


@program("optimizer")
def arrays_of_the_optimizer_that_are_made_up_anew_beside_a_count() -> Made:
    calls, optimizer = [0], optim.Adam(0.01)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        calls[0] += 1
        return squares(model, x)

    def between(number: int) -> None:
        if number in (4, 8):
            optimizer.state["step"] = optimizer.state["step"].astype(mx.int32)
        if number == 6:
            optimizer.learning_rate = mx.array(0.01, mx.float16)
        if number == 10:
            optimizer.learning_rate = 0

    return Made(loss_fn, lambda: calls, between, optimizer=optimizer)


@program("optimizer", near=1e-4)
def first_update_that_makes_another_dtype_of_a_parameter() -> Made:
    """A buffer of integers that is not frozen becomes float32 at Adam's first update."""
    model = nn.Linear(4, 2)
    model.batches, model.calls = mx.array(0), 0

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        model.calls, model.ready = model.calls + 1, True
        return squares(model, x)

    return Made(loss_fn, lambda: (model.calls, model.ready), model=model, optimizer=optim.Adam(1e-2))


def rates_in_turns(make_own: Callable[[], Any]) -> Make:
    """Rates of two dtypes in turns."""

    def make() -> Made:
        optimizer = make_own()

        def between(number: int) -> None:
            optimizer.learning_rate = (0.1, 0, mx.array([0.05]))[number % 3]

        return Made(squares, between=between, optimizer=optimizer)

    return make


class Descent(optim.Optimizer):
    """Momentum by code of its own, which is traced."""

    def __init__(self) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", 0.05)

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        state["v"] = mx.zeros_like(parameter)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        state["v"] = 0.9 * state["v"] + gradient
        return parameter - self.learning_rate * state["v"]


for name, own in {"SGD": lambda: optim.SGD(0.1), "Adam": lambda: optim.Adam(0.1), "one of one's own": Descent}.items():
    add("optimizer", f"rates of two dtypes in turns of {name}", rates_in_turns(own))
