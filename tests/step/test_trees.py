"""Property tests: parameters and batches as any tree of arrays, of any shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map
from support.helpers import (
    Row,
    SignedDescent,
    Tree,
    assert_close,
    assert_same,
    compiled_step,
    flat,
    plain_step,
    snapshot,
)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.SGD(0.1, momentum=0.9),
    "adam": lambda: optim.Adam(0.1, eps=1e-3),  # an epsilon that float16 has
    "adamw": lambda: optim.AdamW(0.1, eps=1e-3),
    "lion": lambda: optim.Lion(0.1),
    "rmsprop": lambda: optim.RMSprop(0.1, eps=1e-3),
    "adamax": lambda: optim.Adamax(0.1, eps=1e-3),
    "user": lambda: SignedDescent(0.1),
}
NAMES = st.sampled_from(["a", "b", "weight", "0", "two words", "_hidden"])
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)
# (shape, dtype, trains): what an array of the tree is made of
LEAVES = st.tuples(SHAPES, st.sampled_from(DTYPES), st.booleans())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


class Leaf(nn.Module):
    """A module with one array, so that it can be frozen."""

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype, trains: bool) -> None:
        super().__init__()
        self.weight = mx.random.normal(shape).astype(dtype)
        if not trains:
            self.freeze()


class Anything(nn.Module):
    """A tree of such modules, and one array that always trains."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.always = mx.array([0.5, -0.5])
        self.tree = build(tree)


def build(tree: Tree) -> Tree:
    """Make modules out of a drawn tree."""
    if isinstance(tree, tuple):
        return Leaf(*tree)
    if isinstance(tree, list):
        return [build(each) for each in tree]
    return {name: build(each) for name, each in tree.items()}


def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
    """Give every element of every array a gradient of its own, with operations that need no compiled kernel."""
    arrays = [array.astype(mx.float32).flatten() for array in flat(model.parameters()).values()]
    return mx.stack([array @ (mx.arange(array.size) + x) for array in arrays]).sum()


def new(tree: Tree, optimizer: str) -> tuple[nn.Module, optim.Optimizer]:
    """Build model and optimizer, equal each time."""
    mx.random.seed(1)
    model = Anything(tree)
    mx.eval(model.parameters())
    return model, OPTIMIZERS[optimizer]()


@pytest.mark.slow
@SETTINGS
@given(TREES, st.sampled_from(list(OPTIMIZERS)))
def test_any_tree_of_parameters_has_the_bits_of_the_compiled_reference(tree: Tree, optimizer: str) -> None:
    reference, ours = new(tree, optimizer), new(tree, optimizer)
    plain, step = compiled_step(*reference, loss_fn), Step(*ours, loss_fn)
    for number in range(3):
        loss, _ = plain(mx.array(0.5 * number))
        assert_same(step(mx.array(0.5 * number)).loss, loss, on_gpu=1e-2)  # in half precision, too
    assert_close(snapshot(*ours), snapshot(*reference), 0)
    assert step.stats.mode == (
        "called" if optimizer == "user" else "native"
    )  # an update may be left out from the fourth on
    assert len(step.stats.traces) == (2 if optimizer == "user" else 1)  # a called update is a part of its own


@SETTINGS
@given(TREES, st.data())
def test_any_array_may_be_held_or_changed(tree: Tree, data: st.DataObject) -> None:
    reference, ours = new(tree, "adamw"), new(tree, "adamw")
    plain, step = compiled_step(*reference, loss_fn), Step(*ours, loss_fn)
    names = list(flat(ours[0].parameters()))
    for _ in range(3):
        arrays = flat(ours[0].parameters())
        held = {name: arrays[name] for name in data.draw(st.sets(st.sampled_from(names)))}
        del arrays
        values = {name: np.array(array.astype(mx.float32)) for name, array in held.items()}
        if data.draw(st.booleans()):
            for model, _ in (reference, ours):
                model.always = model.always + 1
        x = mx.array(data.draw(st.floats(-1, 1, width=16)))
        assert_same(step(x).loss, plain(x)[0], on_gpu=1e-2)
        for name, value in values.items():
            np.testing.assert_array_equal(held[name].astype(mx.float32), value, err_msg=name)
    assert_close(snapshot(*ours), snapshot(*reference), 0)


STATIC = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["a", "b"])
BATCHES = st.recursive(
    SHAPES | STATIC,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@SETTINGS
@given(BATCHES)
def test_any_batch_reaches_the_loss_as_it_is(shapes: Tree) -> None:
    def make(tree: Tree) -> Tree:
        if isinstance(tree, tuple):
            return mx.random.normal(tree)
        if isinstance(tree, list):
            return [make(each) for each in tree]
        return {name: make(each) for name, each in tree.items()} if isinstance(tree, dict) else tree

    def outline(tree: Tree) -> Tree:
        return tree_map(lambda leaf: ("array", leaf.shape) if isinstance(leaf, mx.array) else leaf, tree)

    def summing(model: nn.Module, batch: Tree) -> mx.array:
        seen.append(outline(batch))
        return mx.stack([model.always.sum(), *[each.sum() for each in flat([batch]).values()]]).sum()

    seen: list[Tree] = []
    model, optimizer = new([], "sgd")
    batch = make(shapes)
    start = model.always
    loss = Step(model, optimizer, summing)(batch).loss
    assert seen[0] == outline(batch)
    model.always = start
    np.testing.assert_allclose(loss, summing(model, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_a_checkpointed_module_is_given_while_gradients_are_taken_does_not_stay(accumulate: int) -> None:
    row = Row("decorated", "adamw")
    model, optimizer = row.new()
    step = Step(model, optimizer, row.case.loss_fn, accumulate=accumulate)
    batch = row.case.batches(1)[0]
    weight = model.first.weight
    step.gradients(*batch)
    assert model.first.weight is weight
    for _ in range(4):
        step(*batch)
        mx.eval(model.parameters())


class Named(nn.Module):
    """Two layers and a normalisation, one of the layers under several names: `named` puts it there."""

    def __init__(self, named: Callable[[nn.Module, nn.Module], None]) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        layer.norm = nn.BatchNorm(4)
        named(self, layer)
        self.head = nn.Linear(4, 1)
        self.part = lambda: layer

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 4] to [batch, 1]."""
        layer = self.part()
        y: mx.array = self.head(nn.tanh(layer(layer.norm(x))))
        return y


def listed(model: nn.Module, layer: nn.Module) -> None:
    """Keep it in a private list, then under a public name (ports of PyTorch's `add_module`)."""
    model._layers, model.layer_0 = [layer], layer


def listed_behind(model: nn.Module, layer: nn.Module) -> None:
    """Keep it under a public name, then in a private dict."""
    model.layer_0, model._layers = layer, {"layer_0": layer}


def listed_between(model: nn.Module, layer: nn.Module) -> None:
    """Keep it under two public names, and in private lists before, between and behind."""
    model._a, model.b, model._c, model.d, model._e = [layer], layer, [layer], [layer], [layer]


def frozen_first(model: nn.Module, layer: nn.Module) -> None:
    """Freeze one of two names, as `freeze(keys=...)` does."""
    model.a, model.b = layer, layer
    model.freeze(keys=["a"], recurse=False)


def frozen_last(model: nn.Module, layer: nn.Module) -> None:
    """Freeze the other."""
    model.a, model.b = layer, layer
    model.freeze(keys=["b"], recurse=False)


@pytest.mark.parametrize("options", [{}, {"compile": False}, {"accumulate": 2, "max_grad_norm": 0.5}], ids=str)
@pytest.mark.parametrize("optimizer", ["adam", "user"])
@pytest.mark.parametrize("named", [listed, listed_behind, listed_between, frozen_first, frozen_last])
def test_a_part_trains_that_has_a_private_or_a_frozen_name_too(
    named: Callable[[nn.Module, nn.Module], None], optimizer: str, options: dict[str, Any]
) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return (model(x) - x.sum(axis=-1, keepdims=True)).square().mean()

    mx.random.seed(4)
    reference, ours = Named(named), Named(named)
    ours.update(reference.parameters())
    theirs, own = OPTIMIZERS[optimizer](), OPTIMIZERS[optimizer]()
    within = {name: value for name, value in options.items() if name != "compile"}
    take, step = plain_step(reference, theirs, loss_fn, **within), Step(ours, own, loss_fn, **options)
    before = mx.array(ours.part().weight)
    for x in mx.random.normal((6, 8, 4)):
        take(x)
        step(x)
    assert_close(snapshot(ours, own), snapshot(reference, theirs), 1e-5)
    assert not mx.array_equal(before, ours.part().weight)
    if not options:
        assert step.stats.mode == "native"
    step.optimizer.learning_rate = 0.0
    ours.part().weight = before  # seen under each of its names
    step(x)
    assert mx.array_equal(before, ours.part().weight)


def test_a_part_may_lead_back_to_the_whole() -> None:
    def make() -> nn.Module:
        mx.random.seed(2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
        for part in (model.layers[0], model.layers[1]):
            object.__setattr__(part, "parent", model)  # which MLX takes for no part
        return model

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return model.layers[0].parent(x).square().mean()

    reference, ours = (make(), optim.AdamW(0.1)), (make(), optim.AdamW(0.1))
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for x in mx.random.normal((5, 8, 4)):
        take(x)
        step(x)
    assert step.stats.mode == "native"
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
