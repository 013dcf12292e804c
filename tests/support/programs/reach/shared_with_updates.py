"""Arrays and numbers that both a loss and the code of the optimizer read or set: the update comes behind the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from support.programs.reach.registry import (
    Box,
    Made,
    Make,
    add,
    program,
)

OTHER: Any = Box(None)
MODEL: Any = Box(None)


class Net(nn.Module):
    """A linear layer beside arrays that are not trained, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(4, 3), mx.ones(3)
        self._spread, self._average, self.calls = mx.ones(3), {"weight": mx.zeros((3, 4))}, 0
        self.freeze(keys=["frozen"], recurse=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x)


class Averaging(Net):
    """Sets an array beside its parameters whenever these are set."""

    def update(self, parameters: Any, strict: bool = True) -> nn.Module:
        super().update(parameters, strict)
        self._average["weight"] = 0.9 * self._average["weight"] + 0.1 * self.layer.weight
        return self


def error(model: Net, x: mx.array, y: mx.array) -> mx.array:
    return mx.square(model(x) - y).mean()


def weighed(model: Net, x: mx.array, y: mx.array) -> mx.array:
    return mx.square((model(x) - y) / (1 + model._spread)).mean()


def _spread(model: Net, x: mx.array) -> mx.array:
    return 0.5 * mx.stop_gradient(mx.abs(model(x)).mean(0))


def tracking(model: Net, x: mx.array, y: mx.array) -> mx.array:
    model._spread = 0.5 * model._spread + _spread(model, x)
    return error(model, x, y)


def tracking_frozen(model: Net, x: mx.array, y: mx.array) -> mx.array:
    model.frozen = 0.5 * model.frozen + _spread(model, x)
    return error(model, x, y)


def tracking_elsewhere(model: Net, x: mx.array, y: mx.array) -> mx.array:
    OTHER.value = 0.5 * OTHER.value + _spread(model, x)
    return error(model, x, y)


def counting(model: Net, x: mx.array, y: mx.array) -> mx.array:
    model.calls += 1
    return error(model, x, y)


def reads(scale: Callable[[Net], Any]) -> type[optim.SGD]:
    class Reading(optim.SGD):
        def update(self, model: nn.Module, gradients: Any) -> None:
            divisor = scale(model)  # type: ignore[arg-type]
            super().update(model, tree_map(lambda each: each / divisor, gradients))

    return Reading


def sets(change: Callable[[Net], None]) -> type[optim.SGD]:
    class Setting(optim.SGD):
        def update(self, model: nn.Module, gradients: Any) -> None:
            super().update(model, gradients)
            change(model)  # type: ignore[arg-type]

    return Setting


def shrink(model: Net) -> None:
    model._spread = 0.9 * model._spread


def shrink_frozen(model: Net) -> None:
    model.frozen = 0.9 * model.frozen


def average(model: Net) -> None:
    model._average["weight"] = 0.9 * model._average["weight"] + 0.1 * model.layer.weight


def swap_shape(model: Net) -> None:
    model._spread = mx.ones(7 - model._spread.size)


def scheduled(factor: Callable[[Any], mx.array]) -> Callable[[float], optim.SGD]:
    return lambda rate: optim.SGD(lambda step: rate * factor(step))


class Slotted:
    """An optimizer that is none of MLX's, with its rate and an array in slots."""

    __slots__ = ("__dict__", "__weakref__", "mean", "rate")

    def __init__(self, rate: float) -> None:
        self.rate, self.mean = rate, mx.array(0.0)
        self.state: dict[str, Any] = {}

    def update(self, model: nn.Module, gradients: Any) -> None:
        old = model.trainable_parameters()
        model.update(tree_map(lambda old, each: old - self.rate * each, old, gradients))


class Keeping(Slotted):
    """Keeps an array in a slot."""

    def update(self, model: nn.Module, gradients: Any) -> None:
        self.mean = 0.9 * self.mean + mx.abs(gradients["layer"]["weight"]).mean()
        super().update(model, tree_map(lambda each: each / (1 + self.mean), gradients))


class Tracker:
    """A plain object on a model."""

    def __init__(self) -> None:
        self.last, self.calls = mx.array(1.0), 0


class Tracked(Net):
    """Has such an object, a dict and a tuple of arrays, which a loss replaces, and a number of its class."""

    strength = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.tracker, self._stats, self._pair, self._scale = Tracker(), {"mean": mx.array(1.0)}, (mx.array(1.0), 1), 1.0


class Limited(Net):
    """Bounds its weights by a number that the program sets, and averages them in a new dict."""

    def update(self, parameters: Any, strict: bool = True) -> nn.Module:
        super().update(tree_map(lambda each: mx.clip(each, -OTHER.limit, OTHER.limit), parameters), strict)
        self._average = {"weight": 0.9 * self._average["weight"] + 0.1 * self.layer.weight}
        return self


class Patched(Net):
    """Has such a bound in an `update` of the object, not of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.update = self.bounded

    def bounded(self, parameters: Any, strict: bool = True) -> nn.Module:
        limit = OTHER.limit
        return nn.Module.update(self, tree_map(lambda each: mx.clip(each, -limit, limit), parameters), strict)


def leaving(leave: Callable[[Any, mx.array], None]) -> Callable[..., mx.array]:
    def loss_fn(model: Net, x: mx.array, y: mx.array) -> mx.array:
        loss = error(model, x, y)
        leave(model, mx.stop_gradient(loss))
        return loss

    return loss_fn


def replace_stats(model: Any, loss: mx.array) -> None:
    model._stats = {"mean": 0.5 * model._stats["mean"] + loss}


def count_in_tracker(model: Any, _: mx.array) -> None:
    model.tracker.calls += 1


def count_in_optimizer(_: Any, __: mx.array) -> None:
    OTHER.optimizer.calls += 1


def between(number: int) -> None:
    """Set what updates read, between the steps."""
    MODEL.value._scale = 1.0 + number // 4
    Tracked.strength = 1.0 + number // 6
    OTHER.limit = 1.0 / (1 + number // 5)
    if isinstance(OTHER.optimizer, Slotted):
        OTHER.optimizer.rate = 0.1 / (1 + number // 4)


Case = tuple[type[Net], Callable[..., mx.array], Callable[[float], Any]]


TRACED: dict[str, Case] = {
    "reads": (Net, tracking, reads(lambda model: 1 + model._spread.mean())),
    "reads what is frozen": (Net, tracking_frozen, reads(lambda model: 1 + model.frozen.mean())),
    "reads what the loss leaves": (Net, error, reads(lambda model: 1 + model._spread.mean())),
    "sets": (Net, tracking, sets(shrink)),
    "sets what is frozen": (Net, tracking_frozen, sets(shrink_frozen)),
    "sets what the loss leaves": (Net, error, sets(shrink)),
    "sets what the loss reads": (Net, weighed, sets(shrink)),
    "averages": (Net, tracking, sets(average)),
    "update() of the model averages": (Averaging, tracking, optim.Adam),
    "counts, and nobody reads it": (Net, counting, sets(shrink)),
    "reads a new dict": (Tracked, leaving(replace_stats), reads(lambda model: 1 + model._stats["mean"])),  # type: ignore[attr-defined]
    "reads a number of the class": (Tracked, error, reads(lambda model: type(model).strength)),  # type: ignore[attr-defined]
    "reads a number in a slot": (Net, error, Slotted),
    "update() of the model reads": (Limited, tracking, optim.SGD),
    "update() of the object reads": (Patched, tracking, optim.SGD),
}


UNCOMPILED: dict[str, Case] = {
    "reads a count": (Net, counting, reads(lambda model: 1 + 0.1 * model.calls)),
    "reads another object": (Net, tracking_elsewhere, reads(lambda model: 1 + OTHER.value.mean())),
    "reads a tuple": (
        Tracked,
        leaving(lambda model, loss: setattr(model, "_pair", (loss, 1))),
        reads(lambda model: 1 + model._pair[0]),  # type: ignore[attr-defined]
    ),
    "reads an object of the model": (
        Tracked,
        leaving(lambda model, loss: setattr(model.tracker, "last", loss)),
        reads(lambda model: 1 + model.tracker.last),
    ),
    "reads a count in an object of the model": (
        Tracked,
        leaving(count_in_tracker),
        reads(lambda model: 1 + 0.1 * model.tracker.calls),
    ),
    "has an array that the loss sets": (
        Net,
        leaving(lambda _, loss: setattr(OTHER.optimizer, "last", loss)),
        reads(lambda _: 1 + OTHER.optimizer.last),
    ),
    "has a count of the loss": (
        Net,
        leaving(count_in_optimizer),
        reads(lambda _: 1 + 0.1 * OTHER.optimizer.calls),
    ),
    "keeps an array in a slot": (Net, error, Keeping),
    "sets another shape": (Net, error, sets(swap_shape)),
    "reads an array that the loss reads": (
        Net,
        lambda model, x, y: error(model, x, y) * (1 + OTHER.value.mean()),
        reads(lambda model: 1 + OTHER.value.mean()),
    ),
    "has a schedule that reads what the loss leaves": (
        Net,
        tracking,
        scheduled(lambda _: 1 / (1 + mx.abs(MODEL.value.layer.weight).mean() + OTHER.value.mean())),
    ),
}


def pair_of_batches(number: int) -> tuple[mx.array, mx.array]:
    drawn = np.random.default_rng(number)
    return tuple(mx.array(drawn.normal(size=(5, size)).astype("float32")) for size in (4, 3))  # type: ignore[return-value]


def shared(case: Case) -> Make:
    def make() -> Made:
        of_model, loss_fn, optimizer = case
        MODEL.value, OTHER.value = of_model(), mx.ones(3)
        OTHER.optimizer = optimizer(0.05)
        OTHER.optimizer.last, OTHER.optimizer.calls = mx.array(1.0), 0
        model = MODEL.value

        def seen() -> Any:
            kept = [model._spread, model.frozen, model._average["weight"], model.calls, OTHER.value]
            return [*kept, OTHER.optimizer.last, OTHER.optimizer.calls]

        return Made(loss_fn, seen, between, model, OTHER.optimizer, pair_of_batches)

    return make


for name, case in (TRACED | UNCOMPILED).items():
    # an array that a refused batch sets in the optimizer is the one of before, as all of the optimizer's arrays are
    without = ("bad batches that raise",) if name == "has an array that the loss sets" else ()
    add("optimizer", f"an update that {name}", shared(case), without=without)


class Shared:
    """What a loss and the code of an optimizer have in common."""

    def __init__(self) -> None:
        self.numbers, self.named, self.weight = [1.0], {"first": 1.0}, 0.0


SHARED: Any = Box(Shared())
CONTENTS: dict[str, tuple[Callable[[], float], Callable[[], object]]] = {
    "a list": (lambda: sum(SHARED.value.numbers), lambda: SHARED.value.numbers.append(0.5)),
    "a dict": (lambda: sum(SHARED.value.named.values()), lambda: SHARED.value.named.update(second=1.0)),
    "a new attribute": (
        lambda: getattr(SHARED.value, "late", 1.0),
        lambda: setattr(SHARED.value, "late", 2.0),
    ),
    "there and back": (
        lambda: sum(SHARED.value.numbers),
        lambda: SHARED.value.numbers.pop() if len(SHARED.value.numbers) > 1 else SHARED.value.numbers.append(1.0),
    ),
}


def contents(kind: str, by: str) -> Make:
    """What comes into a container that the update reads."""

    def make() -> Made:
        SHARED.value, (read, change), model = Shared(), CONTENTS[kind], Net()

        class Reading(optim.SGD):
            def update(self, model: nn.Module, gradients: Any) -> None:
                if by == "the update":
                    change()
                divisor = read()
                super().update(model, tree_map(lambda each: each / divisor, gradients))

        def late(model: Net, x: mx.array, y: mx.array) -> mx.array:
            if by == "the loss" and SHARED.value.weight > 4:
                change()
            return error(model, x, y) * (1 + SHARED.value.weight / 100)

        def between(number: int) -> None:
            SHARED.value.weight = number

        return Made(late, lambda: SHARED.value, between, model, Reading(0.05), pair_of_batches)

    return make


for kind, by in itertools.product(CONTENTS, ("the loss", "the update")):
    add("optimizer", f"an update that reads {kind}, into which something comes by {by}", contents(kind, by))


@program("optimizer")
def update_that_keeps_norms_elsewhere_and_on_the_model() -> Made:
    kept = Box(mx.array(0.0))
    kept.calls = 0
    model = Net()

    class Norms(optim.SGD):
        """Keeps norms in an object, and a mean on the model, from its first update on."""

        def update(self, model: nn.Module, gradients: Any) -> None:
            norm = mx.abs(gradients["layer"]["weight"]).mean()
            kept.value = 0.5 * kept.value + norm
            model._norm = norm if "_norm" not in model else 0.5 * model._norm + norm
            kept.calls += 1
            super().update(model, gradients)

    return Made(error, lambda: (kept, model.get("_norm")), model=model, optimizer=Norms(0.05), batch=pair_of_batches)
