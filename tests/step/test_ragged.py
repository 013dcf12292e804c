"""Batches of objects of which no two are alike: shapes, lengths, numbers, classes and methods change together."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import assert_close, assert_same, plain_step, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:faststep. 17 traces have been made"),
]


class Graph:
    """A graph as a user's class has it."""

    power = 1.0

    def __init__(self, rng: np.random.Generator, nodes: int) -> None:
        self.x = mx.array(rng.standard_normal((nodes, 3)).astype(np.float32))
        self.edges = mx.array(rng.integers(0, nodes, nodes + 1))
        self.scale, self.masked, self.extra = 1.0, False, [self.x[:1] * 2]
        self.info: dict[str, Any] = {"shift": 0.0}

    def features(self) -> mx.array:
        return self.x * self.scale + self.info["shift"]

    def weight(self) -> float:
        return 1.0


class Heavy(Graph):
    def weight(self) -> float:
        return 3.0


def of_graph(model: nn.Module, graph: Graph) -> mx.array:
    x = graph.features()
    if graph.masked:
        x = mx.maximum(x, 0)
    y = model(x)[graph.edges] * graph.weight() * graph.power
    for each in graph.extra:
        y = y + each.mean()
    return mx.square(y).mean()


def of_list(model: nn.Module, graphs: list[Graph]) -> mx.array:
    return sum((of_graph(model, graph) for graph in graphs), mx.array(0.0)) / len(graphs)


def with_value(model: nn.Module, graph: Graph) -> mx.array:
    return of_graph(model, graph) * (2.0 if graph.x.max().item() > 1.5 else 1.0)


def set_class(graph: Graph) -> None:
    graph.__class__ = Heavy


def take_away(graph: Graph) -> None:
    del graph.power  # that of the class is the one again


def set_method(graph: Graph) -> None:
    vars(graph)["weight"] = types.MethodType(lambda self: 5.0 * self.scale, graph)


def share(graph: Graph) -> None:
    graph.extra = [graph.x]


CHANGES: dict[str, Callable[[Graph], Any]] = {
    "number": lambda graph: setattr(graph, "scale", 1.5),
    "flag": lambda graph: setattr(graph, "masked", True),
    "class": set_class,
    "method": set_method,
    "attribute": lambda graph: setattr(graph, "power", 2.0),
    "length": lambda graph: graph.extra.append(graph.x + 1),
    "none": lambda graph: graph.extra.clear(),
    "array for a number": lambda graph: setattr(graph, "scale", mx.array(1.25)),
    "dtype": lambda graph: setattr(graph, "x", graph.x.astype(mx.float16)),
    "dimension": lambda graph: graph.extra.append(mx.array(3.0)),
    "shared": share,
    "item": lambda graph: graph.info.update(shift=0.5),
    "key": lambda graph: setattr(graph, "info", {"other": 1, "shift": 0.25}),
    "numpy": lambda graph: setattr(graph, "scale", np.float32(1.75)),
}


def graphs(seed: int, count: int, change: Callable[[np.random.Generator, Graph], None]) -> list[Graph]:
    rng = np.random.default_rng(seed)
    made = [Graph(rng, nodes) for nodes in rng.permutation(np.arange(2, 2 + count))]
    for graph in made:
        change(rng, graph)
    return made


def losses(
    take: Callable[..., Any], batches: list[Any], before: Callable[[int], None] = lambda at: None
) -> list[float]:
    """Take a step with each batch, after what happens before it."""
    found = []
    for at, batch in enumerate(batches):
        before(at)
        loss = take(batch)
        found.append((loss[0] if isinstance(loss, tuple) else loss.loss).item())
    return found


def model() -> tuple[nn.Module, optim.Optimizer]:
    mx.random.seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), optim.Adam(1e-2)


def compare(
    loss_fn: Callable[..., mx.array], batches: list[Any], before: Callable[[int], None] = lambda at: None
) -> Step:
    """Train on batches in the plain loop and in the step, and compare; return the step."""
    ours, reference = model(), model()
    step = Step(*ours, loss_fn)
    wanted = losses(plain_step(*reference, loss_fn), batches, before)
    assert_same(losses(step, batches, before), wanted, 1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    return step


@pytest.mark.parametrize("loss_fn", [of_graph, with_value])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_comes_with_other_shapes_is_seen(name: str, loss_fn: Callable[..., mx.array]) -> None:
    def change(rng: np.random.Generator, graph: Graph) -> None:
        if rng.random() < 0.4:
            CHANGES[name](graph)

    compare(loss_fn, graphs(0, 42, change))


@pytest.mark.parametrize("seed", range(4))
def test_all_kinds_of_changes_that_come_with_other_shapes_are_seen(seed: int) -> None:
    def change(rng: np.random.Generator, graph: Graph) -> None:
        for name in rng.permutation(list(CHANGES))[: rng.integers(0, 4)]:
            CHANGES[name](graph)

    rng = np.random.default_rng(seed)
    made = graphs(seed, 60, change)
    batches = [*made, *rng.permutation(np.array(made, object))[:30]]
    compare([of_graph, with_value][seed % 2], batches)
    of_lists = [[made[at] for at in rng.integers(0, len(made), rng.integers(1, 5))] for _ in range(60)]
    compare(of_list, of_lists)


@pytest.mark.parametrize("loss_fn", [of_graph, with_value])
def test_a_change_of_the_class_between_batches_of_other_shapes_is_seen(
    loss_fn: Callable[..., mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "power", 1.0)
    monkeypatch.setattr(Graph, "weight", Graph.weight)

    def before(at: int) -> None:
        Graph.power = 1.0 + at // 5 % 3
        Graph.weight = [lambda self: 1.0, lambda self: 2.0 * self.scale][at // 7 % 2]  # type: ignore[method-assign]

    compare(loss_fn, graphs(1, 60, lambda rng, graph: None), before)


@pytest.mark.parametrize("loss_fn", [of_graph, with_value, of_list])
def test_ever_new_shapes_are_not_traced_for_ever(loss_fn: Callable[..., mx.array]) -> None:
    made = graphs(2, 70, lambda rng, graph: setattr(graph, "scale", float(rng.random())))
    batches = [made[at : at + 3] for at in range(0, 67)] if loss_fn is of_list else made
    step = compare(loss_fn, batches)
    assert step.stats.mode == "plain"
    assert step.stats.traced <= 33


def test_shapes_that_come_back_are_native() -> None:
    made = graphs(3, 4, lambda rng, graph: None)
    step = compare(of_graph, made * 5)
    assert (step.stats.mode, step.stats.traced) == ("native", 4)
    causes = {record.cause for record in step.stats.traces}
    assert causes == {"first call", "the loss: it computes something else"}


def test_lists_of_other_lengths_are_the_plain_loops() -> None:
    made = graphs(4, 60, lambda rng, graph: None)
    rng = np.random.default_rng(4)
    compare(of_list, [[made[at] for at in rng.integers(0, 60, rng.integers(1, 6))] for _ in range(80)])
    lists = [[mx.ones((2, 3))] * length for length in (1, 2, 3, 1, 2, 3, 3)]
    compare(lambda model, arrays: sum(model(x).mean() for x in arrays) + 1.0, lists)


class Weight:
    def __init__(self, value: float) -> None:
        self.value = value


@pytest.mark.parametrize("kind", [float, Weight])
def test_numbers_in_a_longer_list_are_seen(kind: Callable[[float], Any]) -> None:
    def loss_fn(model: nn.Module, weights: list[Any]) -> mx.array:
        return sum(getattr(each, "value", each) for each in weights) * mx.square(model(mx.ones((2, 3)))).mean()

    numbers = ([1.0], [1.0, 2.0], [1.0, 3.0], [1.0, 30.0], [2.0], [1.0, 3.0, 4.0], [1.0, 3.0, 5.0], [2.0, 30.0])
    compare(loss_fn, [[kind(number) for number in each] for each in numbers])


class Nested:
    """Lists in a list, of any lengths."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.lists = [
            [mx.array(rng.standard_normal((int(rng.integers(1, 4)), 3)).astype(np.float32))] * int(rng.integers(1, 5))
            for _ in range(rng.integers(1, 9))
        ]
        self.scale = float(rng.random())


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. its loss has computed something else")
def test_structures_of_which_no_two_are_alike_are_not_traced_at_each_call(reads: bool) -> None:
    def loss_fn(model: nn.Module, nested: Nested) -> mx.array:
        total = sum(model(x).mean() for each in nested.lists for x in each) * nested.scale
        return total * (2.0 if reads and total.item() > 0 else 1.0)

    rng = np.random.default_rng(5)
    batches = [Nested(rng) for _ in range(140)]
    step = compare(loss_fn, batches)
    assert step.stats.mode == "plain"
    assert step.stats.traced <= 33


@pytest.mark.parametrize("more", [0, 1, 12])
def test_a_number_on_the_model_that_changes_at_each_call_is_an_input(more: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale, self.flag = nn.Linear(3, 1), 1.0, False
            self.act: Callable[[mx.array], mx.array] = nn.tanh

        def __call__(self, x: mx.array) -> mx.array:
            y = self.act(self.layer(x)) * self.scale
            return -y if self.flag else y

    def run(take: Callable[..., Any], model: Scaled) -> list[float]:
        def before(at: int) -> None:
            model.scale, model.flag = 1.0 + at / 7, at % 5 == 3
            if more and at % more == more - 1:
                model.act = nn.relu if model.act is nn.tanh else nn.tanh

        return losses(take, [mx.ones((2, 3)) * at for at in range(40)], before)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x) - 1).mean()

    mx.random.seed(2)
    ours, reference = Scaled(), Scaled()
    reference.update(ours.parameters())
    step = Step(ours, optim.Adam(1e-2), loss_fn)
    wanted = run(plain_step(reference, optim.Adam(1e-2), loss_fn), reference)
    assert_same(run(step, ours), wanted, 1e-5)
    assert step.stats.traced <= 8  # two, a number and an input, for each sign and each activation


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU's step is not where MLX inverts matrices")
@pytest.mark.parametrize("compiled", [True, False])
def test_a_failure_of_an_uncompiled_batch_of_its_own_shape_changes_nothing(compiled: bool) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        inverse = mx.linalg.inv(x.mean() * mx.eye(4), stream=mx.cpu)
        return mx.square(model(x)).mean() + 1e-9 * mx.stop_gradient(inverse).sum()

    pair = model()
    step = Step(*pair, loss_fn, compile=compiled)
    for length in range(1, 40):
        step(mx.ones((length, 3)))
    before = snapshot(*pair)
    with pytest.raises(RuntimeError, match="Inverse"):
        step(mx.zeros((50, 3)))
    assert_close(snapshot(*pair), before, 0)
    step(mx.ones((60, 3)))
    assert pair[1].state["step"].item() == 40


def test_texts_of_which_each_makes_another_graph_are_not_traced_for_ever() -> None:
    """A loss that makes tokens of them, say; what comes again is traced."""

    def loss_fn(model: nn.Module, text: str) -> mx.array:
        x = mx.array([[float(ord(each) % 7) for each in text[at : at + 3]] for at in range(len(text) - 2)])
        return mx.square(model(x)).mean()

    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdef"), 5 + number % 7)) for number in range(60)]
    reference, ours = model(), model()
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for text in [*texts, *texts[-4:] * 3]:
        np.testing.assert_allclose(step(text).loss, take(text)[0], rtol=1e-5, atol=1e-7)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert len(step.stats.traces) <= 38
    assert step.stats.mode != "plain"


def test_what_an_uncompiled_loss_keeps_is_right_whatever_the_shapes() -> None:
    kept = types.SimpleNamespace(total=mx.array(0.0))

    def loss_fn(model: nn.Module, kept: types.SimpleNamespace, graph: Graph) -> mx.array:
        loss = with_value(model, graph)
        kept.total = kept.total + mx.stop_gradient(loss)
        return loss

    made = graphs(6, 40, lambda rng, graph: None)
    step = Step(*model(), functools.partial(loss_fn, kept=kept))
    total = sum(step(graph=graph).loss.item() for graph in made)
    assert kept.total.item() == pytest.approx(total, rel=1e-5)


class Keeps(nn.Module):
    """A model that keeps something of its last batch, in a way of its own."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.layer, self.norm, self.keeps = nn.Linear(3, 2), nn.BatchNorm(2), keeps
        self._last = mx.zeros((6, 2))
        self._pair = (mx.zeros((6, 2)), mx.zeros((6,), mx.uint32))
        self._by_name = {"last": mx.zeros((6,))}
        self.calls = 0

    def __call__(self, x: mx.array) -> mx.array:
        y = self.norm(mx.tanh(self.layer(x)))
        if self.keeps == "an array that it reads":
            y = y + 0.1 * self._last.mean(axis=0)
        if self.keeps == "a mask":
            if self._last.shape[0] != len(x):
                self._last = mx.full((len(x), 2), 1.0 + len(x))
            y = y * self._last
        elif self.keeps == "a tuple":
            self._pair = (mx.stop_gradient(y), mx.argmax(y, axis=1))
        elif self.keeps == "a dict":
            self._by_name["last"] = mx.stop_gradient(y.sum(axis=1))
        elif self.keeps != "nothing":
            self._last = mx.stop_gradient(y)
        self.calls += self.keeps == "an array and a count"
        return y

    def kept(self) -> list[mx.array]:
        return [self._last, *self._pair, self._by_name["last"], mx.array(self.calls), self.norm.running_mean]


class Carries:
    """The same of the object whose method is the loss."""

    def __init__(self, carries: bool) -> None:
        self.carries, self.hidden, self.calls = carries, (mx.zeros((6,)), mx.zeros((6, 2))), 0

    def loss(self, model: nn.Module, x: mx.array) -> mx.array:
        y = model(x)
        if self.carries:
            y = y + 0.1 * self.hidden[1].mean(axis=0)
            self.hidden = (mx.stop_gradient(y.sum(axis=1)), mx.stop_gradient(y))
            self.calls += 1
        return mx.square(y - 1).mean()


@pytest.mark.parametrize("lengths", [[6, 6, 6, 3], [6, 5, 3]])
@pytest.mark.parametrize(
    ("keeps", "carries"),
    [
        *((keeps, False) for keeps in ("an array", "an array that it reads", "a mask", "a tuple", "a dict")),
        ("an array and a count", False),
        ("nothing", True),
        ("a tuple", True),
    ],
)
def test_what_is_kept_of_a_shorter_batch_has_its_shape(keeps: str, carries: bool, lengths: list[int]) -> None:
    """The last batch of each epoch is shorter: once such a call has come before, it has its trace."""
    mx.random.seed(5)
    models, agents = [Keeps(keeps) for _ in range(2)], [Carries(carries) for _ in range(2)]
    models[1].update(models[0].parameters())
    optimizers = [optim.SGD(1e-2) for _ in models]
    step = Step(models[0], optimizers[0], agents[0].loss)
    take = plain_step(models[1], optimizers[1], agents[1].loss)
    rng = np.random.default_rng(6)
    for at in range(24):
        x = mx.array(rng.standard_normal((lengths[at % len(lengths)], 3)).astype(np.float32))
        assert_same(step(x).loss.item(), take(x)[0].item(), 1e-5, on_gpu=1e-3)
        for ours, reference in zip(models[0].kept(), models[1].kept(), strict=True):
            assert_same(ours, reference, 1e-5, on_gpu=1e-3)
        for ours, reference in zip(agents[0].hidden, agents[1].hidden, strict=True):
            assert_same(ours, reference, 1e-5, on_gpu=1e-3)
        assert agents[0].calls == agents[1].calls
    assert step.stats.mode == "called"
    made = len(step.stats.traces)
    step(mx.ones((lengths[0], 3)))
    assert len(step.stats.traces) == made


def test_what_the_model_would_keep_of_a_skipped_batch_of_another_shape_is_left_out() -> None:
    mx.random.seed(5)
    model, agent = Keeps("an array"), Carries(True)
    step = Step(model, optim.Adam(1e-2), agent.loss)
    good = {length: mx.array(np.random.default_rng(length).standard_normal((length, 3))) for length in (6, 3)}
    for length in (6, 6, 3) * 3:
        step(good[length])
    before = [np.array(each) for each in model.kept()]
    assert step(good[6] * float("nan")).skipped.item()
    for ours, value in zip(model.kept(), before, strict=True):
        assert_same(ours, value)
    assert all(bool(mx.isnan(each).all()) for each in agent.hidden)  # beside the model: as the call has left it
    agent.hidden = (mx.zeros((6,)), mx.zeros((6, 2)))
    assert not step(good[6]).skipped
    assert model._last.shape == (6, 2)
    assert agent.hidden[0].shape == (6,)
