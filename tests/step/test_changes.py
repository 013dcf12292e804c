"""Changes by the user between two calls are seen by the next, as the plain loop sees them."""

from __future__ import annotations

import collections
import copy
import operator
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from faststep._step._fast_step import _programs
from mlx.utils import tree_flatten
from support.changes import CHANGES, Change, halve, setting
from support.helpers import (
    NATIVE,
    Row,
    StepFn,
    Taken,
    Tree,
    assert_close,
    assert_same,
    copy_tree,
    plain_step,
    save_and_load,
    snapshot,
)
from support.models import CLASSES, cross_entropy


def take_four(take: StepFn, pair: tuple[nn.Module, optim.Optimizer], change: Change) -> tuple[list[float], Tree]:
    """Take two steps, make the change, take two more."""
    mx.random.seed(5)
    losses = []
    for number, batch in enumerate(Row("conv", "adamw").case.batches(4)):
        if number == 2:
            change(*pair)
        losses.append(float(take(*batch)[0]))
    return losses, snapshot(*pair)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_a_change_between_calls_is_seen(change: str, max_grad_norm: float | None) -> None:
    row = Row("conv", "adamw")
    reference, ours = row.new(), row.new()
    wanted = take_four(plain_step(*reference, cross_entropy, max_grad_norm), reference, CHANGES[change])
    step = Step(*ours, cross_entropy, max_grad_norm=max_grad_norm)

    def take(*batch: Tree) -> Taken:
        out = step(*batch)
        return out.loss, out.grad_norm

    got = take_four(take, ours, CHANGES[change])
    tolerance = 5e-3 if change == "dtype" else 2e-5
    np.testing.assert_allclose(got[0], wanted[0], rtol=tolerance)
    assert_close(got[1], wanted[1], tolerance)
    assert step.stats.mode == "native"


@pytest.mark.parametrize("optimizer", ["user-adam", "user", "multi"])
@pytest.mark.parametrize("change", ["update", "submodule", "eval", "learning-rate", "seed", "add-in-place", "freeze"])
def test_a_change_is_seen_by_a_traced_optimizer(optimizer: str, change: str) -> None:
    row = Row("conv", optimizer)
    reference, ours = row.new(), row.new()
    wanted = take_four(plain_step(*reference, cross_entropy), reference, CHANGES[change])

    def take(*batch: Tree) -> Taken:
        return fast_step(*ours, cross_entropy, *batch), None

    got = take_four(take, ours, CHANGES[change])
    np.testing.assert_allclose(got[0], wanted[0], rtol=2e-5)
    assert_close(got[1], wanted[1], 2e-5)


@pytest.mark.parametrize(
    ("optimizer", "name", "value"),
    [
        ("sgd-momentum", "momentum", 0.5),
        ("sgd-momentum", "nesterov", True),
        ("sgd-weight-decay", "weight_decay", 0.5),
        ("adam", "bias_correction", True),
        ("user-adam", "betas", [0.5, 0.6]),
        ("user", "decay", 0.1),
    ],
)
def test_an_option_of_any_optimizer_is_seen(optimizer: str, name: str, value: Tree) -> None:
    row, change = Row("conv", optimizer), setting(name, value)
    reference, ours = row.new(), row.new()
    wanted = take_four(plain_step(*reference, cross_entropy), reference, change)

    def take(*batch: Tree) -> Taken:
        return fast_step(*ours, cross_entropy, *batch), None

    assert_close(take_four(take, ours, change)[1], wanted[1], 2e-5)


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


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("optimizer", [name for name in NATIVE if name not in ("sgd", "sgd-cosine")])
def test_options_that_are_set_before_each_step_take_no_traces(optimizer: str, compiled: bool, accumulate: int) -> None:
    """As the weight decay of DINO and I-JEPA, the betas of a one-cycle schedule, and warm-ups of a momentum are."""
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    take = plain_step(*reference, cross_entropy, accumulate=accumulate)
    step = Step(*ours, cross_entropy, accumulate=accumulate, compile=compiled)
    made = 0
    for number, batch in enumerate(row.case.batches(24)):
        for _, each in (reference, ours):
            others(each, number)
        assert_same(step(*batch).loss.item(), take(*batch)[0].item(), 2e-5)
        made = len(step.stats.traces) if number == 15 else made
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    assert len(step.stats.traces) == made
    assert made <= 5 * accumulate


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("nonfinite", ["skip", "allow"])
@pytest.mark.parametrize("way", ["fast_step", "Step", "uncompiled"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "user-adam"])
def test_a_norm_that_is_another_at_each_step_takes_no_traces(
    optimizer: str, way: str, nonfinite: Literal["skip", "allow"], accumulate: int
) -> None:
    """As AutoClip sets it, by a percentile of the norms so far; a step of the same model keeps a norm of its own."""
    row, fixed = Row("mlp", optimizer), 0.02
    reference, ours = row.new(), row.new()
    step = Step(*ours, cross_entropy, max_grad_norm=fixed, nonfinite=nonfinite, compile=way != "uncompiled")
    step.accumulate = accumulate
    beside = Step(*ours, cross_entropy, max_grad_norm=fixed, accumulate=accumulate)
    batches = row.case.batches(24 * accumulate)
    norm, made = fixed, 0
    for number in range(24):
        is_fixed = number % 5 == 4
        norm = norm if is_fixed else 0.01 * (1 + number * 7 % 23)
        take = plain_step(*reference, cross_entropy, max_grad_norm=fixed if is_fixed else norm, accumulate=accumulate)
        for batch in batches[number * accumulate : (number + 1) * accumulate]:
            if is_fixed:
                loss = beside(*batch).loss
            elif way == "fast_step":
                options: dict[str, Any] = {"nonfinite": nonfinite, "accumulate": accumulate}
                loss = fast_step(*ours, cross_entropy, *batch, max_grad_norm=norm, **options)
            else:
                step.max_grad_norm = norm
                loss = step(*batch).loss
            assert_same(loss.item(), take(*batch)[0].item(), 2e-5)
        made = len(step.stats.traces) if number == 11 else made
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    assert len(step.stats.traces) == made
    assert step.max_grad_norm == (fixed if way == "fast_step" else norm)
    assert len([key for key in _programs if key[1] == id(ours[1])]) == (way == "fast_step")


@pytest.mark.parametrize(
    ("made_with", "value", "error", "message"),
    [
        (1.0, None, ValueError, r"expected a number in a step that was made with one .*, got None"),
        (None, 1.0, ValueError, r"expected None in a step that was made with None .*, got 1.0"),
        (1.0, -1.0, ValueError, "expected a number from 0 on or None, got -1"),
        (1.0, "much", TypeError, "expected a number or None, got str"),
    ],
)
def test_a_norm_that_is_none_is_refused(
    made_with: float | None, value: Tree, error: type[Exception], message: str
) -> None:
    step = Step(*Row("mlp", "sgd").new(), cross_entropy, max_grad_norm=made_with)
    with pytest.raises(error, match=f"max_grad_norm: {message}"):
        step.max_grad_norm = value
    assert step.max_grad_norm == step.options.max_grad_norm == made_with


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


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "muon", "adafactor", "multi", "user-adam"])
@pytest.mark.parametrize("put", [all_at_once, one_layer, one_parameter, one_moment, begun_anew])
def test_a_part_of_the_state_that_is_replaced_is_gone_on_with(put: Callable[..., None], optimizer: str) -> None:
    row, losses = Row("mlp", optimizer), list[list[float]]()
    for fast in (False, True):
        model, each = row.new()
        step, plain = Step(model, each, cross_entropy), plain_step(model, each, cross_entropy)
        losses.append([])
        for number, batch in enumerate(row.case.batches(9)):
            parts = each.optimizers if isinstance(each, optim.MultiOptimizer) else [each]
            if number == 3:
                saved = [copy_tree(part.state) for part in parts]
            if number == 6:
                for part, before in zip(parts, saved, strict=True):
                    if "layers" in before and (put is begun_anew or part is parts[0]):
                        put(part.state, before)
                if put is begun_anew:
                    for part in (each, *parts):
                        part._initialized = False
            losses[-1].append(float(step(*batch).loss if fast else plain(*batch)[0]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


def test_freezing_and_thawing() -> None:
    row = Row("mlp", "adamw")
    reference, ours = row.new(), row.new()
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    for number, batch in enumerate(row.case.batches(8)):
        for model, _ in (reference, ours):
            if number == 2:
                model.layers[0].freeze()
            if number == 5:
                model.unfreeze()
        frozen = np.array(ours[0].layers[0].weight)
        np.testing.assert_allclose(step(*batch).loss, take(*batch)[0], rtol=1e-5)
        assert np.array_equal(frozen, ours[0].layers[0].weight) == (2 <= number < 5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)


def test_train_and_eval_in_turns_make_two_traces() -> None:
    row = Row("conv", "sgd-momentum")
    reference, ours = row.new(), row.new()
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    for number, batch in enumerate(row.case.batches(6)):
        for model, _ in (reference, ours):
            model.train(number % 2 == 0)
        mx.random.seed(number)
        loss, _ = take(*batch)
        mx.random.seed(number)
        np.testing.assert_allclose(step(*batch).loss, loss, rtol=1e-5)
    assert len(step.stats.traces) == 2


@pytest.mark.parametrize("optimizer", ["adamw-joined", "sgd-nesterov", "user-adam"])
def test_a_run_goes_on_from_files(optimizer: str, tmp_path: Path) -> None:
    row = Row("conv", optimizer, 0.1)
    reference, ours = row.new(), row.new()
    take, step = plain_step(*reference, cross_entropy, 0.1), Step(*ours, cross_entropy, max_grad_norm=0.1)
    batches = row.case.batches(6)
    mx.random.seed(1)
    for batch in batches[:3]:
        step(*batch)
    ours[0].save_weights(str(tmp_path / "model.safetensors"))
    state = save_and_load(ours[1].state, str(tmp_path / "optimizer.safetensors"))
    mx.random.seed(1)
    for batch in batches[:3]:
        take(*batch)
    resumed = row.new()
    resumed[0].load_weights(str(tmp_path / "model.safetensors"))
    resumed[1].state = state
    again = Step(*resumed, cross_entropy, max_grad_norm=0.1)
    mx.random.seed(2)
    losses = [float(take(*batch)[0]) for batch in batches[3:]]
    mx.random.seed(2)
    np.testing.assert_allclose([float(again(*batch).loss) for batch in batches[3:]], losses, rtol=2e-5)
    assert_close(snapshot(*resumed), snapshot(*reference), 2e-5)


def test_plain_steps_between_ours() -> None:
    row = Row("conv", "adamw")
    reference, ours = row.new(), row.new()
    take, between, step = (
        plain_step(*reference, cross_entropy),
        plain_step(*ours, cross_entropy),
        Step(*ours, cross_entropy),
    )
    batches = row.case.batches(6)
    mx.random.seed(1)
    losses = [float(take(*batch)[0]) for batch in batches]
    mx.random.seed(1)
    got = [float(between(*b)[0] if number % 3 == 1 else step(*b).loss) for number, b in enumerate(batches)]
    np.testing.assert_allclose(got, losses, rtol=2e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)


def test_a_tie_is_made_and_cut() -> None:
    row = Row("mlp", "adamw")
    reference, ours = row.new(), row.new()
    for model, _ in (reference, ours):
        model.layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)]

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        for layer in model.layers:
            x = layer(x)
        return nn.losses.cross_entropy(x, y, reduction="mean")

    halve(*reference)
    ours[0].update(copy_tree(reference[0].parameters()))
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for number, batch in enumerate(row.case.batches(6)):
        for model, _ in (reference, ours):
            if number == 2:
                model.layers[1] = model.layers[0]
            if number == 4:
                model.layers[1] = nn.Linear(16, 16)
                model.layers[1].update(copy_tree(model.layers[0].parameters()))
        np.testing.assert_allclose(step(*batch).loss, take(*batch)[0], rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)


@pytest.mark.parametrize("returns", ["no layer", "the layer", "another layer"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "several", "own"])
def test_a_layer_is_taken_from_the_end_and_comes_back(optimizer: str, returns: str) -> None:
    kinds: dict[str, Callable[[], optim.Optimizer]] = {
        "sgd": lambda: optim.SGD(0.1),
        "momentum": lambda: optim.SGD(0.1, momentum=0.9),
        "adam": lambda: optim.Adam(0.01),
        "several": lambda: optim.MultiOptimizer(
            [optim.Adam(0.01), optim.SGD(0.1, momentum=0.9)], [lambda name, _: "weight" in name]
        ),
        "own": lambda: Averaged(0.1),
    }
    losses = []
    for fast in (False, True):
        mx.random.seed(1)
        model, own = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), kinds[optimizer]()
        more = nn.Linear(4, 4)
        mx.eval(model.state, more.state)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            return mx.square(model(x)).mean()

        plain, step = plain_step(model, own, loss_fn), Step(model, own, loss_fn)
        losses.append([])
        for number in range(8):
            if number == 2:
                last = model.layers.pop()
            if number == 5 and returns != "no layer":
                model.layers.append(last if returns == "the layer" else more)
            x = mx.random.normal((8, 4), key=mx.random.key(number))
            losses[-1].append(float(step(x).loss if fast else plain(x)[0]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


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


SLOPE = 1.0


class Sloped(nn.Module):
    """An activation whose slope is a global."""

    def __call__(self, x: mx.array) -> mx.array:
        """Scale."""
        return x * SLOPE


def test_a_layer_of_another_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for ours in (False, True):
        monkeypatch.setitem(globals(), "SLOPE", 1.0)
        mx.random.seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        teacher = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer, x = optim.SGD(0.1), mx.random.normal((8, 4))

        def loss_fn(model: nn.Module, x: mx.array, teacher: nn.Module = teacher) -> mx.array:
            return mx.square(model(x) - teacher(x)).mean()

        step: StepFn = plain_step(model, optimizer, loss_fn)
        if ours:
            native = Step(model, optimizer, loss_fn)
            step = native
        taken = []
        for change in (
            lambda: None,
            lambda model=model: model.layers.__setitem__(1, nn.Tanh()),
            lambda teacher=teacher: teacher.layers.__setitem__(1, nn.Sigmoid()),
            lambda model=model: model.layers.__setitem__(1, Sloped()),
            lambda: monkeypatch.setitem(globals(), "SLOPE", 3.0),
            lambda model=model: model.layers.__setitem__(1, nn.Tanh()),
            model.eval,
            lambda teacher=teacher: teacher.layers.__setitem__(1, Sloped()),
            lambda: monkeypatch.setitem(globals(), "SLOPE", 0.5),
            model.train,
            lambda: monkeypatch.setitem(globals(), "SLOPE", 0.25),
        ):
            change()
            taken += [step(x), step(x)]
        losses.append([float(each.loss if ours else each[0]) for each in taken])  # type: ignore[union-attr, index]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert native.stats.mode == "native"


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("change", ["shared", "taken away", "frozen"])
@pytest.mark.parametrize("make", [lambda: optim.SGD(0.05), lambda: optim.Adam(0.01)])
def test_other_trained_tensors_between_steps(make: Callable[[], optim.Optimizer], change: str, compiled: bool) -> None:
    def loss_fn(model: Any, x: mx.array) -> mx.array:
        for layer in model.layers:
            x = mx.tanh(layer(x))
        return mx.square(x).mean()

    def run(fast: bool) -> tuple[list[float], dict[str, np.ndarray]]:
        mx.random.seed(3)
        model, optimizer, losses = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), make(), []
        layers = model.layers
        step, take = Step(model, optimizer, loss_fn, compile=compiled), plain_step(model, optimizer, loss_fn)
        for number in range(9):
            if number in (3, 6):
                if change == "shared":
                    layers[1] = layers[0] if number == 3 else nn.Linear(4, 4)
                elif change == "frozen":
                    layers[1].freeze() if number == 3 else layers[1].unfreeze()
                elif number == 3:
                    layers.pop()
                else:
                    layers.append(nn.Linear(4, 4))
            x = mx.random.normal((8, 4))
            losses.append(float(step(x).loss if fast else take(x)[0]))
        return losses, snapshot(model)

    losses, parameters = run(fast=True)
    wanted, reference = run(fast=False)
    assert_same(losses, wanted, 2e-5, on_gpu=1e-3)
    assert_close(parameters, reference, 2e-5)


class Collecting(nn.Module):
    """A loop collects what it likes in attributes of it, before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self._history: list[float] = SHARED
        self._history.clear()
        self._metrics, self._arrays = {"last": 1.0}, [mx.ones((1,))]
        self._memory, self._note, self._seen = collections.deque[float](), "", np.ones(2)
        self._parts = list[nn.Module]()

    def __call__(self, x: mx.array) -> mx.array:
        return self.net(x)

    def total(self) -> float:
        return sum(self._history)


class Telling(Collecting):
    def _extra_repr(self) -> str:
        return "+" * len(self._history)


SHARED: list[float] = []
COLLECTS: dict[str, Callable[[Any, int], object]] = {
    "numbers": lambda model, number: model._history.append(number / 4),
    "metrics": lambda model, number: model._metrics.update({f"step {number}": 1.0, "last": number / 2}),
    "arrays": lambda model, number: model._arrays.append(mx.full((1,), number)),
    "memory": lambda model, number: model._memory.append((np.full(3, number), number % 3)),
    "text": lambda model, number: setattr(model, "_note", "." * (number + 1)),
    "NumPy": lambda model, number: setattr(model, "_seen", np.full(2, number + 1)),
    "modules": lambda model, number: model._parts.append(nn.Linear(1, 1)),
}
HALF = "_his"
KEYS: dict[str, Any] = {"key": "_history", "all": lambda model: len(model._history), "text": "%s"}


def matched(model: nn.Module) -> int:
    match model:
        case {"_history": found}:
            return len(found)
    return 0


# what is collected, and how the loss reads it
READS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "by its name": ("numbers", lambda model: len(model._history)),
    "in a method": ("numbers", lambda model: model.total()),
    "in a function of a dict": ("numbers", lambda model: KEYS["all"](model)),
    "getattr": ("numbers", lambda model: len(getattr(model, HALF + "tory"))),
    "item": ("numbers", lambda model: len(model["_history"])),
    "made item": ("numbers", lambda model: len(model[HALF + "tory"])),
    "item of a text": ("numbers", lambda model: len(model[KEYS["key"]])),
    "get": ("numbers", lambda model: len(model.get(HALF + "tory"))),
    "items": ("numbers", lambda model: sum(len(each) for name, each in model.items() if name.startswith(HALF))),
    "keys": ("numbers", lambda model: sum(len(model[name]) for name in model if name.startswith(HALF))),
    "unpacked": ("numbers", lambda model: len({**model}[HALF + "tory"])),
    "joined": ("numbers", lambda model: next(len(each) for each in (model | {}).values() if type(each) is list)),
    "arguments": ("numbers", lambda model: len(dict(**model)[HALF + "tory"])),
    "pattern": ("numbers", matched),
    "itemgetter": ("numbers", lambda model: len(operator.itemgetter(HALF + "tory")(model))),
    "dunder": ("numbers", lambda model: len(model.__getitem__(HALF + "tory"))),
    "state": ("numbers", lambda model: len(model.state[HALF + "tory"])),
    "children": ("numbers", lambda model: sum(len(each) for each in model.children().values() if type(each) is list)),
    "copy": ("numbers", lambda model: len(copy.copy(model)[HALF + "tory"])),
    "repr": ("numbers", lambda model: repr(model).count("+")),
    "percent": ("numbers", lambda model: (KEYS["text"] % model).count("+")),
    "the same list": ("numbers", lambda model: len(SHARED)),
    "a number": ("metrics", lambda model: model._metrics["last"]),
    "all numbers": ("metrics", lambda model: sum(getattr(model, "_met" + "rics").values())),
    "an array": ("arrays", lambda model: model._arrays[-1].sum()),
    "all arrays": ("arrays", lambda model: sum(each.sum() for each in model["_arr" + "ays"])),
    "a tree": ("arrays", lambda model: sum(each.sum() for name, each in tree_flatten(model) if "_arr" in name)),
    "a deque": ("memory", lambda model: float(vars(model)["_mem" + "ory"][-1][0].sum())),
    "a text": ("text", lambda model: len(model._note)),
    "a made text": ("text", lambda model: len(getattr(model, "_no" + "te"))),
    "NumPy": ("NumPy", lambda model: float(model._seen.sum())),
    "modules": ("modules", lambda model: len(model.modules())),
    "a list of modules": ("modules", lambda model: len(model._parts)),
}


def collect(
    what: str, reads: list[Callable[[Any], Any]], kind: type[Collecting] = Collecting, *, fast: bool
) -> tuple[list[float], Tree, list[Step], list[int]]:
    """Take 24 steps, half of them by the first way of reading, the others by the last."""
    mx.random.seed(5)
    model, optimizer = kind(), optim.SGD(0.05)

    def losses_of(read: Callable[[Any], Any]) -> Callable[..., mx.array]:
        return lambda model, x: mx.square(model(x) - x).mean() * (2 + mx.tanh(mx.array(read(model)) * 0.05))

    fns = [losses_of(read) for read in reads]
    steps = [Step(model, optimizer, fn) for fn in fns] if fast else []
    takes = [plain_step(model, optimizer, fn) for fn in fns]
    codes, found, called = {fn.__code__ for fn in fns}, list[float](), list[int]()
    for number in range(24):
        COLLECTS[what](model, number)
        at = 0 if number < 12 else -1
        x = mx.random.normal((6, 4))
        events = list[object]()
        sys.setprofile(lambda frame, event, _: events.append(event) if frame.f_code in codes else None)  # noqa: B023
        loss = steps[at](x).loss if fast else takes[at](x)[0]
        sys.setprofile(None)
        found.append(float(loss.item()))
        called.append(events.count("call"))
    return found, snapshot(model.net), steps, called


@pytest.mark.parametrize("what", COLLECTS)
def test_what_is_collected_on_the_model_and_not_read_is_no_part_of_it(what: str) -> None:
    reads: list[Callable[[Any], Any]] = [lambda model: float(len(model.net.layers))]
    wanted, reference, *_ = collect(what, reads, fast=False)
    losses, parameters, steps, called = collect(what, reads, fast=True)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)
    assert (steps[0].stats.mode, steps[0].stats.traced <= 4) == ("native", True)
    assert sum(called[14:]) <= 1  # a check of the trace


@pytest.mark.filterwarnings("ignore:faststep. attributes of the model have changed")
@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("way", READS)
def test_what_is_collected_on_the_model_is_seen_however_it_is_read(way: str, at_first: bool) -> None:
    """By the first loss, or by one that comes when it has been left apart."""
    what, read = READS[way]
    reads = [read] if at_first else [lambda model: 2.0, read]
    kind = Telling if way in ("repr", "percent") else Collecting
    wanted, reference, *_ = collect(what, reads, kind, fast=False)
    losses, parameters, *_ = collect(what, reads, kind, fast=True)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)


def test_a_function_that_begins_to_read_what_is_collected_is_seen_at_once() -> None:
    def run(fast: bool) -> tuple[list[float], Step]:
        mx.random.seed(5)
        model, optimizer, hooks = Collecting(), optim.SGD(0.05), {"scale": lambda model: 2.0}

        def loss_fn(model: Collecting, x: mx.array) -> mx.array:
            return mx.square(model(x) - x).mean() * hooks["scale"](model)

        step, take = Step(model, optimizer, loss_fn), plain_step(model, optimizer, loss_fn)
        found = []
        for number in range(20):
            COLLECTS["numbers"](model, number)
            if number == 10:
                hooks["scale"] = lambda model: mx.array(len(model._history) / 8)
            x = mx.random.normal((6, 4))
            found.append(float((step(x).loss if fast else take(x)[0]).item()))
        return found, step

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "faststep: attributes of the model have changed")
        losses, _ = run(fast=True)
    assert_same(losses, run(fast=False)[0], 1e-6)


def test_what_is_collected_on_a_model_is_seen_by_the_loss_of_another_one() -> None:
    def run(fast: bool) -> list[float]:
        mx.random.seed(5)
        model, other = Collecting(), nn.Linear(4, 4)
        optimizers = optim.SGD(0.05), optim.SGD(0.05)

        def alone(model: nn.Module, x: mx.array) -> mx.array:
            return mx.square(model(x)).mean()

        def loss_fn(other: nn.Module, x: mx.array) -> mx.array:
            return mx.square(other(x)).mean() * (1 + mx.tanh(model._arrays[-1].sum() * len(model._history) / 64))

        pairs = (model, alone), (other, loss_fn)
        steps = [Step(each, optimizer, fn) for (each, fn), optimizer in zip(pairs, optimizers, strict=True)]
        takes = [plain_step(each, optimizer, fn) for (each, fn), optimizer in zip(pairs, optimizers, strict=True)]
        found = []
        for number in range(16):
            for at in (0, 1) if number > 7 else (0,):
                COLLECTS["arrays"](model, number)
                COLLECTS["numbers"](model, number)
                x = mx.random.normal((6, 4))
                found.append(float((steps[at](x).loss if fast else takes[at](x)[0]).item()))
        return found

    assert_same(run(fast=True), run(fast=False), 1e-6)
