"""Losses that change or take something themselves, on which their result depends."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from support.programs.reach.registry import (
    Made,
    Make,
    Place,
    add,
    program,
    squares,
)


class Warming(nn.Module):
    """Counts its calls in a number, and weighs what it gives by it (annealed penalties)."""

    def __init__(self, matters: bool) -> None:
        super().__init__()
        self.layer, self.calls, self.matters = nn.Linear(4, 2), 0, matters

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 4] to [batch, 2]."""
        self.calls += 1
        y: mx.array = self.layer(x) * (0.5**self.calls if self.matters else 1.0)
        return y


_calls = 0


def own_changes(kind: str) -> tuple[nn.Module, Callable[..., mx.array]]:
    """Make a loss that changes what it depends on, or takes from what it does not restore."""
    model: nn.Module = Warming(matters=True) if kind == "a number of the model" else nn.Linear(4, 2)
    generator, own, old = np.random.default_rng(1), random.Random(1), np.random.RandomState(1)
    numbers, listed, taken = iter(range(1, 100)), [0.5 * each for each in range(1, 100)], itertools.count(1)
    made, cell, agent = (0.5 * each for each in range(1, 100)), 0, types.SimpleNamespace(beta=1.0)
    queue, left = collections.deque(listed), set[int]()
    counted, large = np.zeros(2), np.zeros(20_000)
    context = contextvars.ContextVar("context", default=0.0)
    context.set(0.0)
    random.seed(1)
    np.random.seed(1)
    globals()["_calls"] = 0

    def factor() -> float:
        nonlocal cell
        global _calls
        if kind == "a number in a closure":
            cell += 1
            return 1.0 / cell
        if kind == "a global":
            _calls += 1
            return 1.0 / _calls
        if kind == "an attribute":
            agent.beta *= 0.9
            return agent.beta
        if kind == "a function's attribute":
            taken_by: Any = factor
            taken_by.taken.append(0)
            return 1.0 / len(taken_by.taken)
        takes: dict[str, Callable[[], float]] = {
            "numpy's generator": generator.random,
            "numpy's old generator": old.rand,
            "numpy's global generator": np.random.rand,
            "a random.Random": own.random,
            "the random module": random.random,
            "an iterator": lambda: float(next(numbers)),
            "itertools": lambda: float(next(taken)),
            "a generator": lambda: next(made),
            "a list": lambda: listed.pop(),
            "a queue": lambda: queue.popleft(),
            "a set": lambda: float(left.add(len(left)) or len(left)),  # type: ignore[func-returns-value]
            "a NumPy array": lambda: float(counted.__iadd__(1.0)[0]),
            "a large NumPy array": lambda: float(large.__iadd__(1.0)[0]),
            "a context variable": lambda: (context.set(context.get() + 1.0), context.get())[1],
        }
        return takes.get(kind, lambda: 1.0)()

    vars(factor)["taken"] = []
    return model, lambda model, x: (model(x) * factor()).square().mean()


OWN_CHANGES = """a number of the model, a number in a closure, a global, an attribute, a function's attribute, a
list, a queue, a set, a NumPy array, a large NumPy array, a context variable, numpy's generator,
numpy's old generator, numpy's global generator, a random.Random, the random module, an iterator,
itertools, a generator"""


def of_own(kind: str) -> Make:
    def make() -> Made:
        model, loss_fn = own_changes(kind)
        return Made(loss_fn, model=model, optimizer=optim.SGD(0.1, momentum=0.9), rows=(8,), calls=6)

    return make


KINDS = OWN_CHANGES.replace("\n", " ").split(", ")
PLACE: dict[str, Place] = {"a number of the model": "model", "a context variable": "process"}
for kind in KINDS:
    taken: Place = "iterator" if kind in ("an iterator", "itertools", "a generator") else "closure"
    drawn: Place = "process" if "random" in kind or "numpy's" in kind else taken
    add(PLACE.get(kind, drawn), f"a loss that depends on how often it is called, by {kind}", of_own(kind))


@program("object")
def appending_to_a_long_list() -> Made:
    log = [0.5] * 5000

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        log.append(loss := mx.square(model(x)).mean())
        return loss

    return Made(loss_fn, lambda: log[5000:])


@program("object")
def counts_that_do_not_matter() -> Made:
    history: list[int] = []

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        history.append(x.shape[0])
        return squares(model, x)

    model = Warming(matters=False)
    return Made(loss_fn, lambda: (model.calls, history), model=model, rows=(1, 2, 3))


@program("object")
def what_a_loss_writes_into_what_it_reaches() -> Made:
    class Averaging:
        def __init__(self) -> None:
            self.rebound, self.changed = mx.zeros(2), mx.zeros(2)
            self.norm = nn.BatchNorm(4)

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            y = model(self.norm(x))
            self.rebound = 0.9 * self.rebound + 0.1 * mx.stop_gradient(y.mean(axis=0))
            self.changed += mx.stop_gradient(y.sum(axis=0))
            return mx.square(y - self.rebound).mean()

    averaging = Averaging()
    held = averaging.changed  # `+=` changes the object that others hold
    seen = lambda: (averaging.rebound, averaging.changed, averaging.norm.running_mean, held is averaging.changed)  # noqa: E731
    return Made(averaging.loss, seen, rows=(8,))


def kept_arrays(make_kept: Callable[[], Any]) -> Make:
    """A loss that keeps arrays."""

    def make() -> Made:
        kept = make_kept()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss = squares(model, x)
            kept.append(loss)
            return loss

        return Made(loss_fn, lambda: list(kept))

    return make


QUEUES: dict[str, Callable[[], Any]] = {
    "list": list,
    "queue": collections.deque,
    "last": lambda: collections.deque(maxlen=3),
}
for name, make_kept in QUEUES.items():
    add("object", f"losses that are kept in a {name}", kept_arrays(make_kept))


def logged(make_kept: Callable[[], Any]) -> Make:
    """A log in any container."""

    def make() -> Made:
        kept = make_kept()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            if isinstance(kept, collections.deque):
                kept.append(x.shape[0])
            elif isinstance(kept, set):
                kept.add(len(kept))
            else:
                kept[0] += 1
            return squares(model, x)

        return Made(loss_fn, lambda: kept[0] if isinstance(kept, np.ndarray) else list(kept))

    return make


LOGS: dict[str, Callable[[], Any]] = {
    "a queue": lambda: collections.deque(maxlen=3),
    "a set": set,
    "a NumPy array": lambda: np.zeros(3),
    "a large NumPy array": lambda: np.zeros(20_000),
}
for name, make_kept in LOGS.items():
    add("object", f"a log in {name}", logged(make_kept))


@program("process")
def a_loss_that_counts_and_reaches_numpys_own_functions() -> Made:
    class Trainer:
        kind, calls = "mse_loss", 0

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            self.calls += 1
            if x.ndim > 2:
                x = x[mx.array(np.random.default_rng(0).permutation(len(x)))]
            found: mx.array = getattr(nn.losses, self.kind)(model(x), mx.zeros((3, 2)))
            return found

    trainer = Trainer()
    return Made(trainer.loss, lambda: trainer.calls)


@dataclasses.dataclass(slots=True)
class Slotted:
    """What a loss keeps, in slots."""

    counts: tuple[int, int] = (0, 0)
    log: list[str] = dataclasses.field(default_factory=list)


@program("object")
def what_a_loss_puts_anew_into_slots() -> Made:
    state = Slotted()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state.counts = (state.counts[0] + 1, state.counts[1] + len(x))
        state.log = [*state.log, "step"]
        return squares(model, x)

    return Made(loss_fn, lambda: state)


class Recent(nn.Module):
    """Keeps what it gave, in a list, a dict and an attribute, for four calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self._recent: list[Any] = []
        self._by_name: dict[str, Any] = {}
        self._last: tuple[mx.array, ...] | None = None
        self.kept = 0

    def keep(self, it: Any) -> None:
        """Keep something with arrays, or forget all."""
        self.kept += 1
        if self.kept % 4:
            self._recent.append(it)
            self._by_name[str(self.kept)], self._last = it, (it,)
        else:
            self._recent.clear()
            self._by_name.clear()
            self._last = None

    def __call__(self, x: mx.array) -> mx.array:
        """Give what the layer gives, scaled by how much is kept."""
        out: mx.array = self.layer(x)
        return out * (1 + len(self._recent) + len(self._by_name) + (self._last is not None))


def kept_and_forgotten(kept: Callable[[mx.array], Any]) -> Make:
    """Arrays that a loss keeps on the model and forgets."""

    def make() -> Made:
        def loss_fn(model: Recent, x: mx.array) -> mx.array:
            out = model(x)
            model.keep(kept(mx.stop_gradient(out).mean()))
            return mx.square(out).mean()

        model = Recent()
        seen = lambda: (model._recent, model._by_name, model._last, model.kept)  # noqa: E731
        return Made(loss_fn, seen, model=model)

    return make


KEPT: dict[str, Callable[[mx.array], Any]] = {
    "arrays": lambda a: a,
    "lists": lambda a: [a],
    "dicts": lambda a: {"it": a},
    "tuples": lambda a: (a,),
}
for name, kept in KEPT.items():
    add("model", f"{name} that a loss keeps and forgets", kept_and_forgotten(kept))


def removed(of_model: bool) -> Make:
    """What had arrays is replaced by nothing that has."""

    def make() -> Made:
        model = Recent()
        holder: Any = model if of_model else types.SimpleNamespace()
        holder._last = (mx.ones((2,)),)
        holder._recent = [{"it": mx.ones((2,))}]

        def loss_fn(model: Recent, x: mx.array) -> mx.array:
            scale = 1.0 if holder._last is None else holder._last[0].sum()
            scale = scale + len(holder._recent)
            holder._last = None
            holder._recent.clear()
            return mx.square(model.layer(x)).mean() * scale

        return Made(loss_fn, lambda: (holder._last, holder._recent), model=model)

    return make


for of_model in (False, True):
    add(
        "model" if of_model else "object",
        f"arrays that the loss removes from {'its model' if of_model else 'an object'}",
        removed(of_model),
    )
