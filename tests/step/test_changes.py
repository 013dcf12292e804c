"""Changes by the user between two calls are seen by the next, as the plain loop sees them."""

from __future__ import annotations

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
from faststep._step._own import Hung
from mlx.utils import tree_map
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
    hung = Hung.at(*ours)
    assert (0 if hung is None else len(hung.programs)) == (way == "fast_step")


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


@pytest.mark.parametrize("by_filter", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_model_s_own_code_says_is_trained_is_asked_at_each_step(stage: str, by_filter: bool) -> None:
    def run(fast: bool) -> tuple[list[float], Any, Step]:
        mx.random.seed(0)
        model = (Staged if by_filter else StagedByMethod)(STAGES[stage], by_filter)
        optimizer, losses = optim.SGD(0.1), []

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            return mx.square(model(x) - 1).mean()

        step, take = Step(model, optimizer, loss_fn), plain_step(model, optimizer, loss_fn)
        for number in range(30):
            model.epoch = number
            model._history.append(number)
            model.phase += "b"
            STAGE["frozen"] = 10 <= number < 20
            x = mx.random.normal((6, 4))
            losses.append(float((step(x).loss if fast else take(x)[0]).item()))
        return losses, snapshot(model), step

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "faststep: (attributes of the model have changed|.* traces have been made)")
        losses, parameters, step = run(fast=True)
    wanted, reference, _ = run(fast=False)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)
    assert step.stats.mode == "native" or by_filter or stage != "global"


class Clipped(nn.Module):
    """Keeps its weights small as they are updated, as the critic of a WGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x)

    def update(self, parameters: Any, strict: bool = True) -> nn.Module:
        return super().update(tree_map(lambda weight: mx.clip(weight, -0.1, 0.1), parameters), strict)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("optimizer", [lambda: optim.SGD(0.1), lambda: optim.Adam(0.05), lambda: Averaged(0.1)])
def test_a_model_s_own_update_is_called(optimizer: Callable[[], optim.Optimizer], compiled: bool) -> None:
    def run(fast: bool) -> tuple[list[float], Any]:
        mx.random.seed(0)
        model, own, losses = Clipped(), optimizer(), []

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            return mx.square(model(x) - 1).mean()

        step, take = Step(model, own, loss_fn, compile=compiled), plain_step(model, own, loss_fn)
        for _ in range(12):
            x = mx.random.normal((6, 4))
            losses.append(float((step(x).loss if fast else take(x)[0]).item()))
        return losses, snapshot(model)

    losses, parameters = run(fast=True)
    wanted, reference = run(fast=False)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)
