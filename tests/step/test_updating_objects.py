"""Objects with an `update(model, gradients)` that are no `mlx.optimizers.Optimizer`, beside the plain loop."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step, fast_step
from faststep.checkpoints import Checkpoints
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from support.helpers import Row, Tree, assert_same, to_numpy
from support.models import cross_entropy

ROW = Row("mlp", "adamw")
STEPS = 5


class Momentum:
    """Keeps an average for each parameter, made at the first update."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        self.learning_rate = learning_rate
        self.averages: dict[str, mx.array] = {}

    def update(self, model: nn.Module, gradients: Tree) -> None:
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

    def update(self, model: nn.Module, gradients: Tree) -> None:
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

    def update(self, model: nn.Module, gradients: Tree) -> None:
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

    def update(self, model: nn.Module, gradients: Tree) -> None:
        """Update by the other."""
        self.inner.update(model, gradients)
        if self.fails:
            raise KeyError("no update")

    @property
    def state(self) -> Tree:
        """What the other keeps."""
        return self.inner.state


class Counting(Wrapping):
    """Counts its updates in a number."""

    updates = 0

    def update(self, model: nn.Module, gradients: Tree) -> None:
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


KINDS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "momentum": (lambda _: Momentum(), "traced"),
    "counted": (lambda _: Counted(), "plain"),
    "remembering": (Remembering, "traced"),
    "several": (lambda _: Several(), "traced"),
    "deep": (lambda _: Wrapping(Wrapping(Wrapping(optim.Adam(1e-2)))), "traced"),
    "parts": (lambda _: Wrapping(Parts()), "traced"),
    "cyclic": (lambda _: known_to_the_outer(), "traced"),
    "counted deep": (lambda _: Wrapping(Counting(Wrapping(optim.Lion(1e-3)))), "plain"),
}


def same(got: Tree, wanted: Tree, tolerance: float = 0) -> None:
    found, expected = dict(tree_flatten([got])), dict(tree_flatten([wanted]))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert_same(to_numpy(found[path]), to_numpy(value), tolerance, on_gpu=30 * tolerance or 1e-5)


def plain(model: nn.Module, optimizer: Any, batches: list[Any]) -> list[mx.array]:
    losses = []
    for batch in batches:
        loss, gradients = nn.value_and_grad(model, cross_entropy)(model, *batch)
        optimizer.update(model, gradients)
        mx.eval(loss, model.state, optimizer.state)
        losses.append(loss)
    return losses


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("call", ["Step", "fast_step"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_called_as_the_plain_loop_calls_it(kind: str, call: str) -> None:
    make, mode = KINDS[kind]
    theirs, ours = ROW.new()[0], ROW.new()[0]
    reference, optimizer = make(theirs), make(ours)
    batches = list(ROW.case.batches(STEPS))
    wanted = plain(theirs, reference, batches)
    step = Step(ours, optimizer, cross_entropy)
    for loss, batch in zip(wanted, batches, strict=True):
        taken = step(*batch).loss if call == "Step" else fast_step(ours, optimizer, cross_entropy, *batch)
        # Newton and Schulz's iteration differs in rounding where it is compiled
        same(taken, loss, 1e-4 if kind == "several" else 0)
    tolerance = 1e-3 if kind == "several" else 0
    same(ours.parameters(), theirs.parameters(), tolerance)
    same(optimizer.state, reference.state, tolerance)
    if call == "Step":
        assert step.stats.mode == mode


def test_what_is_changed_in_it_is_seen() -> None:
    theirs, ours = ROW.new()[0], ROW.new()[0]
    reference, optimizer = Momentum(), Momentum()
    step = Step(ours, optimizer, cross_entropy)
    for number, batch in enumerate(ROW.case.batches(STEPS)):
        for each in (reference, optimizer):
            each.learning_rate = 1e-2 / (1 + number // 2)
            if number == 3:
                each.averages = {path: 0.5 * value for path, value in each.averages.items()}
        plain(theirs, reference, [batch])
        step(*batch)
    same(ours.parameters(), theirs.parameters())


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_what_it_keeps(kind: str, tmp_path: Path) -> None:
    make, _ = KINDS[kind]
    model = ROW.new()[0]
    step, batches = Step(model, make(model), cross_entropy), list(ROW.case.batches(2 * STEPS))
    for batch in batches[:STEPS]:
        step(*batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, number=STEPS)
    for batch in batches[STEPS:]:
        step(*batch)
    other = ROW.new()[0]
    resumed = Step(other, make(other), cross_entropy)
    assert Checkpoints(tmp_path).restore(resumed)
    for batch in batches[STEPS:]:
        resumed(*batch)
    same(other.parameters(), model.parameters())


class Enclosing:
    """Leaves the update to an optimizer of MLX's that is none of its attributes."""

    def __init__(self) -> None:
        optimizer = optim.Adam(1e-2)
        self.inner = lambda: optimizer

    def update(self, model: nn.Module, gradients: Tree) -> None:
        """Update by the other."""
        self.inner().update(model, gradients)

    @property
    def state(self) -> Tree:
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


@pytest.mark.parametrize("make", [Enclosing, lambda: Wrapping(Slotted(optim.Adam(1e-2))), Far])
def test_an_optimizer_that_is_none_of_its_attributes_updates_uncompiled(make: Callable[[], Any]) -> None:
    theirs, ours = ROW.new()[0], ROW.new()[0]
    reference, optimizer = make(), make()
    batches = list(ROW.case.batches(STEPS))
    wanted = plain(theirs, reference, batches)
    step = Step(ours, optimizer, cross_entropy)
    with pytest.warns(RuntimeWarning, match=r"reaches another one \(Adam\) that is none of its attributes"):
        losses = [step(*batch).loss for batch in batches]
    same(losses, wanted)
    same(ours.parameters(), theirs.parameters())
    same(optimizer.state, reference.state)
    assert step.stats.mode == "plain"


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("kind", ["deep", "parts", "cyclic"])
def test_an_error_behind_an_inner_update_leaves_all_as_it_was(kind: str, steps: int) -> None:
    model = ROW.new()[0]
    optimizer = KINDS[kind][0](model)
    step, batches = Step(model, optimizer, cross_entropy), list(ROW.case.batches(steps + 1))
    for batch in batches[:steps]:
        step(*batch)
    before = tree_map(lambda each: mx.array(to_numpy(each)), [model.parameters(), optimizer.state])
    optimizer.fails = True
    with pytest.raises(KeyError, match="no update"):
        step(*batches[steps])
    same([model.parameters(), optimizer.state], before)
    optimizer.fails = False
    step(*batches[steps])
    other = ROW.new()[0]
    reference = KINDS[kind][0](other)
    plain(other, reference, batches)
    same([model.parameters(), optimizer.state], [other.parameters(), reference.state], 1e-5)


def test_it_is_kept_no_longer_than_by_its_user() -> None:
    model, optimizer = ROW.new()[0], Momentum()
    fast_step(model, optimizer, cross_entropy, *ROW.case.batches(1)[0])
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    step = Step(model, Momentum(), cross_entropy)
    step(*ROW.case.batches(1)[0])
    assert step.optimizer.learning_rate == 1e-2
