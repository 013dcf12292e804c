"""What the user changes between the calls: model, optimizer and random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from support.changes import CHANGES, Change, setting
from support.helpers import NATIVE, Row, Tree, copy_tree
from support.models import cross_entropy
from support.programs.reach.registry import (
    Around,
    Made,
    Make,
    add,
    changed,
    program,
    squares,
)


def of_a_row(row: Row, change: Change, at: int = 2, calls: int = 6) -> Make:
    def make() -> Made:
        model, optimizer = row.new()
        batches = list(row.case.batches(calls))

        def between(number: int) -> None:
            if number == at:
                change(model, optimizer)

        return Made(
            cross_entropy, between=between, model=model, optimizer=optimizer, batch=batches.__getitem__, calls=calls
        )

    return make


OF_OPTIMIZERS = {"learning-rate", "schedule", "betas", "eps", "weight-decay", "state", "part-of-state", "reset-step"}
for name, change in CHANGES.items():
    near = 5e-3 if name == "dtype" else 2e-5
    add(
        "optimizer" if name in OF_OPTIMIZERS else "model",
        f"a user's change: {name}",
        of_a_row(Row("conv", "adamw"), change),
        near=near,
    )
for optimizer in ("user-adam", "user", "multi"):
    for name in ("update", "submodule", "eval", "learning-rate", "seed", "add-in-place", "freeze"):
        # Newton and Schulz's iteration differs in rounding where it is compiled
        add(
            "optimizer",
            f"a user's change beside {optimizer}: {name}",
            of_a_row(Row("conv", optimizer), CHANGES[name]),
            near=1e-4,
        )
OPTIONS: list[tuple[str, str, Any]] = [
    ("sgd-momentum", "momentum", 0.5),
    ("sgd-momentum", "nesterov", True),
    ("sgd-weight-decay", "weight_decay", 0.5),
    ("adam", "bias_correction", True),
    ("user-adam", "betas", [0.5, 0.6]),
    ("user", "decay", 0.1),
]
for optimizer, option, value in OPTIONS:
    add(
        "optimizer",
        f"an option of {optimizer}: {option}",
        of_a_row(Row("conv", optimizer), setting(option, value)),
        near=1e-4,
    )


def others(optimizer: optim.Optimizer, number: int) -> None:
    """Give each number of an optimizer's options another value."""
    share = 0.5 + 0.4 * (number * 0.618 % 1)
    for each in getattr(optimizer, "optimizers", [optimizer]):
        if isinstance(each, optim.Adafactor):
            each.eps = (1e-30, 1e-3 * (1 + number))
            each.clip_threshold, each.decay_rate = 0.5 + share, -share
        elif hasattr(each, "eps"):
            each.eps = 1e-8 * (1 + number)
        if hasattr(each, "betas"):
            each.betas = [share, 0.9 + 0.1 * share]
        for name in ("momentum", "dampening", "alpha", "rho", "beta_1"):
            if getattr(each, name, None):
                setattr(each, name, share)
        if hasattr(each, "weight_decay"):
            each.weight_decay = 0.0 if number == 13 else 0.04 + 0.01 * number


def other_options(name: str) -> Make:
    """Options that are set before each call, as one-cycle schedules and warm-ups of a momentum do."""

    def make() -> Made:
        row = Row("mlp", name)
        model, optimizer = row.new()
        batches = list(row.case.batches(14))
        between = lambda number: others(optimizer, number)  # noqa: E731
        return Made(
            cross_entropy, between=between, model=model, optimizer=optimizer, batch=batches.__getitem__, calls=14
        )

    return make


for name in NATIVE:
    if name not in ("sgd", "sgd-cosine"):
        add("optimizer", f"options that are set before each call: {name}", other_options(name), near=2e-4)


def all_at_once(state: Tree, saved: Tree) -> None:
    state.update(saved)


def one_layer(state: Tree, saved: Tree) -> None:
    state["layers"][0] = saved["layers"][0]


def one_parameter(state: Tree, saved: Tree) -> None:
    state["layers"][0]["weight"] = saved["layers"][0]["weight"]


def one_moment(state: Tree, saved: Tree) -> None:
    state["layers"][0]["weight"].update(saved["layers"][0]["weight"])


def begun_anew(state: Tree, saved: Tree) -> None:
    del state["layers"]


def part_of_state(put: Callable[[Any, Any], None], name: str) -> Make:
    """A part of the state that the user replaces."""

    def make() -> Made:
        row, saved = Row("mlp", name), list[Any]()
        model, optimizer = row.new()
        batches = list(row.case.batches(9))
        parts = optimizer.optimizers if isinstance(optimizer, optim.MultiOptimizer) else [optimizer]

        def between(number: int) -> None:
            if number == 3:
                saved[:] = [copy_tree(part.state) for part in parts]
            if number == 6:
                for part, before in zip(parts, saved, strict=True):
                    if "layers" in before and (put is begun_anew or part is parts[0]):
                        put(part.state, before)
                if put is begun_anew:
                    for part in (optimizer, *parts):
                        part._initialized = False

        return Made(
            cross_entropy, between=between, model=model, optimizer=optimizer, batch=batches.__getitem__, calls=9
        )

    return make


for name in ("adamw", "sgd-momentum", "muon", "adafactor", "multi", "user-adam"):
    for put in (all_at_once, one_layer, one_parameter, one_moment, begun_anew):
        how = put.__name__.replace("_", " ")
        add(
            "optimizer",
            f"a part of the state of {name}: {how}",
            part_of_state(put, name),
            near=5e-4,
        )


def layers(count: int = 3) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


@program("model")
def freezing_and_thawing() -> Made:
    model = layers()

    def between(number: int) -> None:
        if number in (2, 8):
            model.layers[0].freeze()
        if number == 5:
            model.unfreeze()

    return Made(squares, lambda: model.layers[0].weight, between, model, optim.AdamW(1e-2))


@program("model")
def train_and_eval_in_turns() -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm(4), nn.Dropout(0.3), nn.Linear(4, 2))
    return Made(
        squares,
        between=lambda number: model.train(number % 2 == 0),
        model=model,
        optimizer=optim.SGD(0.05, momentum=0.9),
    )


@program("model")
def a_tie_that_is_made_and_cut() -> Made:
    model = layers()

    def between(number: int) -> None:
        if number == 2:
            model.layers[1] = model.layers[0]
        if number == 4:
            model.layers[1] = nn.Linear(4, 4)
            model.layers[1].update(copy_tree(model.layers[0].parameters()))

    return Made(squares, between=between, model=model, optimizer=optim.AdamW(1e-2))


class Averaged(optim.Optimizer):
    """An optimizer of one's own with an average of the gradients."""

    def __init__(self, learning_rate: float) -> None:
        """Keep the rate."""
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)

    def init_single(self, parameter: mx.array, state: dict[str, mx.array]) -> None:
        """Begin with zeros."""
        state["mean"] = mx.zeros_like(parameter)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, mx.array]) -> mx.array:
        """Go along the average."""
        state["mean"] = 0.5 * state["mean"] + gradient
        return parameter - self.learning_rate * state["mean"]


KINDS: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.SGD(0.1),
    "momentum": lambda: optim.SGD(0.1, momentum=0.9),
    "adam": lambda: optim.Adam(0.01),
    "several": lambda: optim.MultiOptimizer(
        [optim.Adam(0.01), optim.SGD(0.1, momentum=0.9)], [lambda name, _: "weight" in name]
    ),
    "own": lambda: Averaged(0.1),
}


def comes_back(optimizer: str, returns: str) -> Make:
    """A layer is taken from the end and comes back."""

    def make() -> Made:
        model, more, taken = layers(), nn.Linear(4, 4), list[Any]()

        def between(number: int) -> None:
            if number == 3:
                taken.append(model.layers.pop())
            if number == 6 and returns != "no layer":
                model.layers.append(taken[0] if returns == "the layer" else more)

        return Made(squares, between=between, model=model, optimizer=KINDS[optimizer]())

    return make


for optimizer in KINDS:
    for returns in ("no layer", "the layer", "another layer"):
        add(
            "model",
            f"a layer that is taken away with {optimizer}: {returns} comes back",
            comes_back(optimizer, returns),
        )


SLOPE = 1.0


class Sloped(nn.Module):
    """An activation whose slope is a global."""

    def __call__(self, x: mx.array) -> mx.array:
        """Scale."""
        return x * SLOPE


@program("model")
def layers_of_other_classes(around: Around) -> Made:
    around.patch.setitem(globals(), "SLOPE", 1.0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    teacher = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    slope = lambda value: lambda: around.patch.setitem(globals(), "SLOPE", value)  # noqa: E731
    return changed(
        lambda model, x: mx.square(model(x) - teacher(x)).mean(),
        [
            lambda: model.layers.__setitem__(1, nn.Tanh()),
            lambda: teacher.layers.__setitem__(1, nn.Sigmoid()),
            lambda: model.layers.__setitem__(1, Sloped()),
            slope(3.0),
            lambda: model.layers.__setitem__(1, nn.Tanh()),
            model.eval,
            lambda: teacher.layers.__setitem__(1, Sloped()),
            slope(0.5),
            model.train,
            slope(0.25),
        ],
        model=model,
    )


def other_tensors(own: Callable[[], optim.Optimizer], change: str) -> Make:
    """Other trained tensors between the calls."""

    def make() -> Made:
        model = layers()
        known = model.layers

        def between(number: int) -> None:
            if number in (3, 6):
                if change == "shared":
                    known[1] = known[0] if number == 3 else nn.Linear(4, 4)
                elif change == "frozen":
                    known[1].freeze() if number == 3 else known[1].unfreeze()
                elif number == 3:
                    known.pop()
                else:
                    known.append(nn.Linear(4, 4))

        def loss_fn(model: Any, x: mx.array) -> mx.array:
            for layer in model.layers:
                x = mx.tanh(layer(x))
            return mx.square(x).mean()

        return Made(loss_fn, between=between, model=model, optimizer=own())

    return make


for change in ("shared", "taken away", "frozen"):
    add("model", f"other trained tensors by SGD: {change}", other_tensors(lambda: optim.SGD(0.05), change))
    add("model", f"other trained tensors by Adam: {change}", other_tensors(lambda: optim.Adam(0.01), change))


class Staged(nn.Module):
    """Its own code says which of its parameters are trained: for MLX's loop, at each step."""

    def __init__(self, frozen: Callable[[Staged], bool], by_filter: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.epoch, self._history, self.phase, self._frozen = 0, list[int](), "", lambda: frozen(self)
        if by_filter:
            self.trainable_parameter_filter = lambda module, key, value: (  # type: ignore[method-assign]
                nn.Module.trainable_parameter_filter(module, key, value) and not (key == "head" and frozen(self))
            )

    def __call__(self, x: mx.array) -> mx.array:
        return self.head(self.body(x))


class StagedByMethod(Staged):
    def trainable_parameters(self) -> dict[str, Any]:
        found = super().trainable_parameters()
        return {name: each for name, each in found.items() if name != "head" or not self._frozen()}


STAGE = {"frozen": False}
STAGES: dict[str, Callable[[Staged], bool]] = {
    "number": lambda model: 10 <= model.epoch < 20,
    "list": lambda model: 10 <= len(model._history) < 20,
    "text": lambda model: len(model.phase) % 4 == 3,
    "global": lambda model: STAGE["frozen"],
}


def staged(stage: str, by_filter: bool) -> Make:
    """What a model's own code says is trained, is asked at each call."""

    def make() -> Made:
        model = (Staged if by_filter else StagedByMethod)(STAGES[stage], by_filter)

        def between(number: int) -> None:
            model.epoch = number
            model._history.append(number)
            model.phase += "b"
            STAGE["frozen"] = 10 <= number < 20

        return Made(squares, between=between, model=model, optimizer=optim.SGD(0.1), calls=24)

    return make


for stage in STAGES:
    for by_filter in (False, True):
        add(
            "model",
            f"a model that says by a {stage} what is trained{', by a filter' if by_filter else ''}",
            staged(stage, by_filter),
        )


class Clipped(nn.Module):
    """Keeps its weights small as they are updated, as the critic of a WGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x)

    def update(self, parameters: Any, strict: bool = True) -> nn.Module:
        return super().update(tree_map(lambda weight: mx.clip(weight, -0.1, 0.1), parameters), strict)


def clipped(name: str) -> Make:
    return lambda: Made(squares, model=Clipped(), optimizer=KINDS[name]())


for name in ("sgd", "adam", "own"):
    add("model", f"a model with an update of its own, with {name}", clipped(name))
