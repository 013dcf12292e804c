"""Calls of a step: aux outputs, trees, keywords, static values, and gradients alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, StepOutput, fast_step
from faststep._step._options import Options
from faststep._step._user_optimizer import StepCache
from support.helpers import Row, Tree, assert_close, assert_same, flat, plain_step, snapshot
from support.models import cross_entropy

ROW = Row("mlp", "adamw")


@pytest.fixture
def data() -> Iterator[tuple[mx.array, mx.array]]:
    return iter(ROW.case.batches(20))


def with_aux(model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, dict[str, mx.array], list[Any]]:
    logits = model(x)
    loss = nn.losses.cross_entropy(logits, y, reduction="mean")
    hits = (logits.argmax(axis=-1) == y).sum()
    return loss, {"logits": logits}, [hits, "named", None, 3]


def test_a_loss_alone(data: Iterator[tuple[mx.array, mx.array]]) -> None:
    model, optimizer = ROW.new()
    out = Step(model, optimizer, cross_entropy)(*next(data))
    assert isinstance(out, StepOutput)
    assert (out.loss.shape, out.loss.dtype) == ((), mx.float32)
    assert out.aux == ()
    assert out.grad_norm is not None
    assert out.skipped.item() is False
    loss = fast_step(model, optimizer, cross_entropy, *next(data))
    assert isinstance(loss, mx.array)
    assert loss.shape == ()


def test_what_follows_the_loss_comes_back_as_it_is(data: Iterator[tuple[mx.array, mx.array]]) -> None:
    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, with_aux), Step(*ours, with_aux)
    for _ in range(3):
        batch = next(data)
        (loss, logits, rest), _ = take(*batch)
        out = step(*batch)
        assert_same(out.loss, loss, 1e-6)
        assert len(out.aux) == 2
        assert_close({"": np.array(out.aux[0]["logits"])}, {"": np.array(logits["logits"])}, 1e-6, on_gpu=1e-4)
        assert out.aux[1][0].item() == rest[0].item()
        assert out.aux[1][1:] == ["named", None, 3]
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert len(step.stats.traces) == 1
    value = fast_step(*ours, with_aux, *next(data))
    assert isinstance(value, tuple)
    assert len(value) == 3
    assert value[1]["logits"].shape == (8, 4)


def tree_loss(model: nn.Module, batch: Tree, *, weight: mx.array, smooth: float = 0.0) -> mx.array:
    x, extra = batch["inputs"]
    losses = nn.losses.cross_entropy(model(x) + extra["bias"][0], batch["y"], label_smoothing=smooth)
    return (losses * weight).mean()


def test_batches_are_trees_and_arguments_have_names(data: Iterator[tuple[mx.array, mx.array]]) -> None:
    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, tree_loss), Step(*ours, tree_loss)
    for number in range(3):
        x, y = next(data)
        batch = {"inputs": (x, {"bias": [mx.array(0.1 * number), "unused"]}), "y": y}
        weight = mx.arange(8) / (number + 1)
        loss, _ = take(batch, weight=weight, smooth=0.1)
        out = step(batch, weight=weight, smooth=0.1)
        np.testing.assert_allclose(out.loss, loss, rtol=1e-6)
        named = fast_step(*ROW.new(), tree_loss, batch, weight=weight, smooth=0.1, max_grad_norm=1.0)
        assert named.shape == ()
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert len(step.stats.traces) == 1


def test_a_number_is_a_new_trace_where_it_changes_the_form_and_an_input_where_it_varies(
    data: Iterator[tuple[mx.array, mx.array]],
) -> None:
    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, tree_loss), Step(*ours, tree_loss)
    for smooth, traced in [(0.0, 1), (0.2, 2), (0.0, 2), (0.2, 2), (0.4, 3), (0.6, 3), (0.0, 3)]:
        x, y = next(data)
        batch, weight = {"inputs": [x, {"bias": [mx.array(0.0)]}], "y": y}, mx.ones(8)
        loss, _ = take(batch, weight=weight, smooth=smooth)
        np.testing.assert_allclose(step(batch, weight=weight, smooth=smooth).loss, loss, rtol=1e-5)
        assert step.stats.traced == traced
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def test_static_values_that_are_equal_but_not_the_same_type_are_told_apart() -> None:
    def loss_fn(model: nn.Module, x: mx.array, exponent: Tree) -> mx.array:
        seen.append(exponent)
        return (model(x) * (2.0 if exponent is True else 3.0)).mean()

    seen: list[Any] = []
    x = mx.ones((8, 16))
    losses = []
    for value in (True, 1, 1.0):
        model, optimizer = ROW.new()
        losses.append(float(Step(model, optimizer, loss_fn)(x, value).loss))
    model, optimizer = ROW.new()
    step = Step(model, optimizer, loss_fn)
    start = model.parameters()
    got = []
    for value in (True, 1, 1.0):
        model.update(start)
        got.append(float(step(x, value).loss))
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert {type(value) for value in seen[-3:]} >= {bool, int}


def test_a_new_shape_or_dtype_is_a_new_trace() -> None:
    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    x, y = ROW.case.batches(1)[0]
    batches = [(x, y), (x[:3], y[:3]), (x.astype(mx.bfloat16), y), (x, y), (x[:3], y[:3])]
    for batch in batches:
        loss, _ = take(*batch)
        np.testing.assert_allclose(step(*batch).loss, loss, rtol=2e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-4)
    assert len(step.stats.traces) == 3
    for trace in step.stats.traces:
        assert trace.cause
        assert trace.seconds > 0


@pytest.mark.parametrize("name", ["mlp", "conv", "frozen", "lora", "tied"])
def test_gradients_are_those_of_value_and_grad_and_change_nothing(name: str) -> None:
    row = Row(name, "adamw")
    (model, _), ours = row.new(), row.new()
    step = Step(*ours, row.case.loss_fn)
    batch = row.case.batches(1)[0]
    mx.random.seed(5)
    loss, grads = nn.value_and_grad(model, row.case.loss_fn)(model, *batch)
    mx.random.seed(5)
    before = ours[0].parameters()
    arrays = {path: np.array(array) for path, array in flat(ours[0].trainable_parameters()).items()}
    our_loss, our_grads = step.gradients(*batch)
    np.testing.assert_allclose(our_loss, loss, rtol=1e-6)
    wanted, got = flat(grads), flat(our_grads)
    assert got.keys() == wanted.keys()
    for path, grad in wanted.items():
        np.testing.assert_allclose(got[path], grad, rtol=1e-4, atol=1e-6, err_msg=path)
    for path, array in flat(ours[0].trainable_parameters()).items():
        np.testing.assert_array_equal(array, arrays[path])
    assert list(flat(before)) == list(flat(ours[0].parameters()))
    assert step.stats.steps == 0


def test_gradients_with_aux_give_what_the_loss_returns() -> None:
    model, optimizer = ROW.new()
    value, grads = Step(model, optimizer, with_aux).gradients(*ROW.case.batches(1)[0])
    assert len(value) == 3
    assert value[1]["logits"].shape == (8, 4)
    assert grads["layers"][0]["weight"].shape == (32, 16)


def test_steps_are_counted_and_synchronize_waits() -> None:
    model, optimizer = ROW.new()
    step = Step(model, optimizer, cross_entropy, max_grad_norm=1.0, in_flight=3)
    for batch in ROW.case.batches(7):
        out = step(*batch)
    step.synchronize()
    assert step.stats.steps == 7
    assert out.grad_norm is not None
    assert out.grad_norm.item() != 0
    assert int(optimizer.state["step"]) == 7


def split(model: nn.Module, x: mx.array) -> list[mx.array]:
    parts: list[mx.array] = mx.split(model(x), 2, axis=-1)
    return parts


# what MLX 0.32.4 loses when it compiles it: an output that equals another, or an inner value
EQUAL: dict[str, Callable[[nn.Module, mx.array], tuple[mx.array, ...]]] = {
    "an output computed twice": lambda model, x: (mx.square(model(x)).mean(), model(x)),
    "a sum computed twice": lambda model, x: ((model(x) * x[:, :4]).sum() / mx.square(x).sum(), mx.square(x).sum()),
    "the loss twice": lambda model, x: (mx.square(model(x)).mean(), mx.square(model(x)).mean()),
    "equal outputs": lambda model, x: (mx.square(model(x)).mean(), mx.exp(x), mx.exp(x), model(x), model(x)),
    "one array twice": lambda model, x: (loss := mx.square(model(x)).mean(), loss, x, x),
    "constants": lambda model, x: (
        mx.square(model(x)).mean() * mx.array(2.0),
        mx.array(2.0),
        mx.array(2.0),
        mx.zeros(()),
    ),
    "copies": lambda model, x: (mx.exp(model(x)).mean(), mx.array(mx.exp(model(x))), mx.stop_gradient(mx.array(x))),
    "parts": lambda model, x: (mx.square(split(model, x)[1]).mean(), *split(model, x)),
    "a parameter": lambda model, x: (mx.square(model(x)).mean(), model.layers[0].weight),
}


@pytest.mark.parametrize("returned", EQUAL)
def test_equal_outputs_are_native_and_those_of_the_plain_loop(returned: str) -> None:
    loss_fn = EQUAL[returned]
    reference, ours = ROW.new(), ROW.new()
    step = Step(*ours, loss_fn)
    for number in range(3):
        x = mx.random.normal((8, 16), key=mx.random.key(number))
        taken, gradients = nn.value_and_grad(reference[0], loss_fn)(reference[0], x)
        mx.eval(taken)
        reference[1].update(reference[0], gradients)
        mx.eval(reference[0].parameters(), reference[1].state)
        out = step(x)
        for got, wanted in zip((out.loss, *out.aux), taken, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert step.stats.mode == "native"


def test_each_option_of_fast_step_is_the_one_of_its_name() -> None:
    given: dict[str, Any] = {
        "max_grad_norm": 0.5,
        "max_grad_value": 0.25,
        "weighted": True,
        "nonfinite": "raise",
        "max_loss": 1e3,
        "compute_dtype": mx.bfloat16,
        "ema_decay": 0.75,
        "transform": lambda model, gradients: gradients,
        "compile": False,
        "replay": False,
        "in_flight": 1,
        "max_traces": 7,
        "clear_cache_every": 5,
        "sync": "broadcast",
        "check_ranks": 9,
    }
    of_adam: dict[str, Any] = {"state_bits": 8, "stochastic_rounding": True}  # without masters or `transform`
    assert given.keys() | of_adam.keys() == set(Options._fields)
    changed = given | of_adam
    assert all(repr(changed[name]) != repr(default) for name, default in Options._field_defaults.items())
    for options, optimizer in ((given, optim.SGD(0.1)), (of_adam, optim.Adam(0.1))):
        model = nn.Linear(2, 1)
        model.set_dtype(mx.bfloat16 if options is of_adam else mx.float32)
        loss_fn = lambda model, x: (model(x).sum(), mx.array(1.0))  # noqa: E731
        fast_step(model, optimizer, loss_fn, mx.ones((3, 2)), **options)
        hung = StepCache.at(model, optimizer)
        assert hung is not None
        kept = [program.options for _, _, program, _ in hung.programs.values()]
        assert kept == [Options(**options)]


def test_fast_step_tells_of_models_that_are_made_at_each_call() -> None:
    class Joint(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = list(layers)

    first, second, optimizer = nn.Linear(2, 3), nn.Linear(3, 1), optim.SGD(0.1)

    def train() -> None:
        for _ in range(20):
            joint = Joint(first, second)
            fast_step(joint, optimizer, lambda it, x: mx.square(it.layers[1](it.layers[0](x))).mean(), mx.ones((3, 2)))

    with pytest.warns(RuntimeWarning, match="more than 16 models with one optimizer") as told:
        train()
    assert len(told) == 1


def test_fast_step_tells_of_optimizers_that_are_made_at_each_call() -> None:
    model = nn.Linear(2, 1)

    def train() -> None:
        for number in range(20):
            optimizer = optim.SGD(0.1 / (1 + number))
            mx.eval(fast_step(model, optimizer, lambda model, x: mx.square(model(x)).mean(), mx.ones((3, 2))))

    with pytest.warns(RuntimeWarning, match="more than 16 optimizers with one model") as told:
        train()
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("calls", [1, 5, 20])
def test_fast_step_tells_of_models_and_optimizers_that_are_gone_after_a_few_calls(calls: int) -> None:
    x = mx.ones((3, 2))

    def square(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x)).mean()

    def client() -> None:
        model, optimizer = nn.Linear(2, 1), optim.SGD(0.1)
        for _ in range(calls):
            mx.eval(fast_step(model, optimizer, square, x))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(20):
            client()
    assert [str(each.message).split(":")[1] for each in told] == (
        [" 16 models in turn have been trained for fewer than 16 steps each"] if calls < 16 else []
    )
    assert {each.filename for each in told} <= {__file__}


def test_one_model_in_the_place_of_many_is_traced_once() -> None:
    first, rows = nn.Linear(2, 1), [mx.full((3, 2), float(each)) for each in range(4)]
    model, optimizer = nn.Linear(2, 1), optim.Adam(0.1)
    step = Step(model, optimizer, lambda model, x: mx.square(model(x)).mean())
    for _ in range(5):
        alone = nn.Linear(2, 1)
        alone.update(first.parameters())
        model.update(first.parameters())
        plain = plain_step(alone, optim.Adam(0.1), step.loss_fn)
        optimizer.state = optim.Adam(0.1).state
        for x in rows:
            assert step(x).loss.item() == pytest.approx(plain(x)[0].item(), rel=1e-5)
        np.testing.assert_allclose(np.array(model.weight), np.array(alone.weight), rtol=1e-5)
    assert step.stats.traced == 1


EXCHANGES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda it: pickle.loads(pickle.dumps(it)),
    "another": lambda _: optim.Adam(0.05),
    "with its state": lambda it: [each := optim.Adam(0.05), setattr(each, "state", it.state)][0],
    "of another class": lambda _: optim.SGD(0.05, momentum=0.9),
    "there and back": lambda it: it,
}


@pytest.mark.parametrize("change", ["none", "state", "item", "rate"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_optimizer_in_the_place_of_the_first_one_has_its_state(exchange: str, change: str) -> None:
    found: list[list[Any]] = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer, x = nn.Linear(4, 2), optim.Adam(1e-2), mx.ones((3, 4))
        first, weights = optimizer, list[Any]()
        step = Step(model, optimizer, lambda model, x: mx.square(model(x)).mean())
        for number in range(10):
            if number == 3:
                optimizer = EXCHANGES[exchange](optimizer)
            if number == 4 and exchange == "there and back":
                optimizer = optim.Adam(0.05)
            if number == 6 and exchange == "there and back":
                optimizer = first
            step.optimizer = optimizer
            if number == 7 and change == "state":
                state = copy.deepcopy(optimizer.state)
                state["weight"] = {name: each + 1 for name, each in state["weight"].items()}
                optimizer.state = state
            if number == 7 and change == "item":
                optimizer.state["weight"] = {name: each + 1 for name, each in optimizer.state["weight"].items()}
            if number == 7 and change == "rate":
                optimizer.learning_rate = 0.5
            if fast:
                step(x)
            else:
                plain_step(model, optimizer, step.loss_fn)(x)
            weights.append(model.weight.tolist())
        found.append([weights, flat(optimizer.state), flat(first.state)])
    (weights, *states), (theirs, *others) = found
    near = 1e-6 if mx.default_device() == mx.gpu else 0  # one is 0.002, of terms near 1, which a GPU rounds as it likes
    np.testing.assert_allclose(weights, theirs, rtol=1e-5, atol=near)
    for state, other in zip(states, others, strict=True):
        assert state.keys() == other.keys()
        for name, array in state.items():
            np.testing.assert_allclose(np.array(array), np.array(other[name]), rtol=1e-5, atol=1e-7)
