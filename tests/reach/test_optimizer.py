"""What the code of optimizers and schedules reads, changes and keeps, and losses that reach an optimizer."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from faststep.checkpoints import Checkpoints
from mlx.utils import tree_flatten, tree_map
from support.beside import Variant, beside, cases, squares
from support.helpers import Row, Tree, assert_same, plain_step, to_numpy
from support.models import cross_entropy
from support.programs.reach import Program
from support.programs.reach.own_optimizers import KINDS, Momentum
from support.programs.reach.reads_optimizer import Halved

pytestmark = pytest.mark.filterwarnings("ignore:faststep:RuntimeWarning")
ROW = Row("mlp", "adamw")
STEPS = 5


@pytest.mark.parametrize(("program", "variant"), cases("optimizer"))
def test_a_program_is_its_plain_loop(program: Program, variant: Variant) -> None:
    beside(program, variant)


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_what_it_keeps(kind: str, tmp_path: Path) -> None:
    make = KINDS[kind]
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


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("kind", ["deep", "parts", "cyclic"])
def test_an_error_behind_an_inner_update_leaves_all_as_it_was(kind: str, steps: int) -> None:
    model = ROW.new()[0]
    optimizer = KINDS[kind](model)
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
    reference = KINDS[kind](other)
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


def test_an_option_that_the_loss_sets_is_that_of_its_update() -> None:
    weights = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), optim.SGD(0.1)

        def loss_fn(model: nn.Module, x: mx.array, optimizer: Any = optimizer) -> mx.array:
            optimizer.learning_rate = 0.5 * optimizer.learning_rate.item()
            return squares(model, x)

        take = Step(model, optimizer, loss_fn) if ours else plain_step(model, optimizer, loss_fn)
        for _ in range(4):
            take(mx.ones((3, 4)))
        weights.append(np.array(model.weight))
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-6)


def test_a_schedule_that_raises_has_counted_and_one_before_a_loss_that_raises_has_not() -> None:
    schedule = Halved()

    def loss_fn(model: nn.Module, x: mx.array, rows: int) -> mx.array:
        if rows > 3:
            raise LookupError("too many rows")
        return squares(model, x)

    step, x = Step(nn.Linear(4, 2), optim.SGD(schedule), loss_fn), mx.ones((3, 4))
    step(x, 3)
    begun = schedule.table["calls"]
    for raises, rows, calls in [(True, 3, 1), (False, 4, 1), (True, 3, 2), (False, 3, 3)]:
        schedule.raises = raises
        with pytest.raises(LookupError) if raises or rows > 3 else contextlib.nullcontext():
            step(x, rows)
        assert schedule.table["calls"] == begun + calls


@pytest.mark.parametrize("compiled", [True, False])
def test_a_plan_leaves_nothing_of_an_update_in_optimizer_and_model(compiled: bool) -> None:
    elsewhere = [0]

    class Counting(optim.SGD):
        """Counts updates in itself and elsewhere, and keeps an array on the model."""

        count = 0

        def update(self, model: nn.Module, gradients: Any) -> None:
            self.count += 1
            elsewhere[0] += 1
            model._kept = mx.array(self.count)
            super().update(model, tree_map(lambda each: each / self.count, gradients))

    model, optimizer, x = nn.Linear(4, 2), Counting(0.05), mx.ones((3, 4))
    step = Step(model, optimizer, squares, compile=compiled)
    assert step.memory_plan(x).peak > 0
    assert (optimizer.count, elsewhere, "_kept" in model) == (0, [1], False)  # what it does elsewhere stays
    for _ in range(4):
        step(x)
    step.memory_plan(x)
    assert (optimizer.count, elsewhere, model._kept.item()) == (4, [6], 4)
