"""Within a window: batches that are not taken, changes, errors. What is in it stays, and nothing counts twice."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_map, tree_unflatten
from support.changes import CHANGES
from support.helpers import Pair, Row, Tree, assert_close, average, flat, learn, plain_step, snapshot, spoilt
from support.models import Batch, cross_entropy
from support.places import Child

ROW = Row("mlp", "adamw")
WAYS = ["adamw", "sgd-momentum", "adamw-joined", "user-adam", "multi", "adafactor"]


class Ours(Exception):
    """Raised by losses and optimizers of these tests."""


def everything(pair: Pair, step: Step) -> dict[str, np.ndarray]:
    """Copy all that a call may change, the open window and the counts among it."""
    return snapshot(*pair, step.state)


def scaled(model: nn.Module, x: mx.array, y: mx.array, factor: mx.array) -> mx.array:
    return cross_entropy(model, x, y) * factor


@pytest.mark.parametrize("bad", [(1,), (0,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize(("optimizer", "compile"), [*((way, True) for way in WAYS), ("adamw", False), ("multi", False)])
def test_a_window_averages_over_what_was_not_skipped(optimizer: str, compile: bool, bad: tuple[int, ...]) -> None:
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    step = Step(*ours, cross_entropy, accumulate=3, max_grad_norm=0.1, compile=compile)
    batches = row.case.batches(6)
    for window in (batches[:3], batches[3:]):
        learn(reference, [batch for number, batch in enumerate(window) if number not in bad], max_grad_norm=0.1)
        outs = [step(*(spoilt(batch) if number in bad else batch)) for number, batch in enumerate(window)]
        assert [bool(out.skipped) for out in outs] == [number in bad for number in range(3)]
        assert [bool(out.updated) for out in outs] == [False, False, True]
        assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert (step.stats.steps, step.stats.updates, step.stats.skipped) == (6, 2, 2 * len(bad))


@pytest.mark.parametrize(("factor", "max_loss"), [(float("inf"), None), (1e30, None), (1e4, 100.0)])
def test_a_loss_or_a_gradient_too_large_is_no_part_of_a_window(factor: float, max_loss: float | None) -> None:
    reference, ours = ROW.new(), ROW.new()
    step, batches = Step(*ours, scaled, accumulate=2, max_loss=max_loss), ROW.case.batches(3)
    learn(reference, batches[:1])
    learn(reference, batches[1:])
    outs = [step(*batches[call], mx.array(by)) for call, by in ((0, 1.0), (2, factor), (1, 1.0), (2, 1.0))]
    assert [bool(out.skipped) for out in outs] == [False, True, False, False]
    assert_close(snapshot(*ours), snapshot(*reference), 5e-5)  # AdamW, and a gradient that is all but nothing


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize(("optimizer", "compile"), [*((way, True) for way in WAYS), ("user-adam", False)])
def test_a_window_of_which_all_was_skipped_updates_nothing(optimizer: str, compile: bool, flushed: bool) -> None:
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    step, batches = Step(*ours, cross_entropy, accumulate=3, compile=compile), row.case.batches(6)
    learn(reference, batches[:3])
    for batch in batches[:3]:
        step(*batch)
    before = snapshot(*ours)
    outs = [step(*spoilt(batch)) for batch in batches[: 2 if flushed else 3]]
    assert step.flush() is flushed
    assert [(bool(out.skipped), bool(out.updated)) for out in outs] == [(True, False)] * len(outs)
    assert_close(snapshot(*ours), before, 0)  # the step counter among it
    assert (step.stats.steps, step.stats.updates, step.stats.skipped) == (3 + len(outs), 1, len(outs))
    learn(reference, batches[3:])
    for batch in batches[3:]:
        step(*batch)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_batch_whose_weight_is_no_weight_is_skipped(weight: float) -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array, weight: mx.array) -> Tree:
        return cross_entropy(model, x, y), weight

    reference, ours = ROW.new(), ROW.new()
    step, batches = Step(*ours, loss_fn, accumulate=3, weighted=True), ROW.case.batches(3)
    for _ in range(2):
        learn(reference, [batches[0], batches[2]], [1, 2])
        outs = [step(*batch, mx.array(each)) for batch, each in zip(batches, (1.0, weight, 2.0), strict=True)]
        assert [bool(out.skipped) for out in outs] == [False, True, False]
        assert bool(outs[-1].updated)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def rooted(model: nn.Module, x: mx.array, y: mx.array, factor: mx.array) -> mx.array:
    """Return a finite loss; where the factor is 0, its gradient for one bias is no number."""
    return cross_entropy(model, x, y) + mx.sqrt(factor * model.head.bias.square()).sum()


@pytest.mark.parametrize("optimizer", ["adamw", "adam-branching", "user-adam", "multi"])
def test_raising_leaves_the_window_as_if_the_batch_had_not_come(optimizer: str) -> None:
    row, good, bad = Row("conv", optimizer), mx.array(1.0), mx.array(0.0)
    reference, ours = row.new(), row.new()
    ours[1].init(ours[0].trainable_parameters())
    step, batches = Step(*ours, rooted, accumulate=2, nonfinite="raise"), row.case.batches(4)
    mx.random.seed(1)
    for first in (0, 2):
        learn(reference, [(*batch, good) for batch in batches[first : first + 2]], loss_fn=rooted)
    wanted = snapshot(*reference)
    mx.random.seed(1)
    for number, batch in enumerate(batches):  # as the first of a window, and as the one that would fill it
        before = everything(ours, step)
        with pytest.raises(FloatingPointError, match=r"head\.bias"):
            step(*batch, bad)
        assert_close(everything(ours, step), before, 0)
        assert bool(step(*batch, good).updated) == (number % 2 == 1)
    assert_close(snapshot(*ours), wanted, 1e-5)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("accumulate", [4, 5])  # five are more than there are: they are flushed
def test_a_sum_that_overflows_is_not_taken(accumulate: int, nonfinite: Tree) -> None:
    ours, (*batches, last), huge = ROW.new(), ROW.case.batches(4), mx.array(1.2e19)
    ours[1].init(ours[0].trainable_parameters())
    step = Step(*ours, scaled, accumulate=accumulate, nonfinite=nonfinite)
    before = snapshot(*ours)
    for batch in batches:
        assert not bool(step(*batch, huge).skipped)

    def fill() -> None:
        step(*last, huge)
        step.flush()

    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match="window"):
            fill()
    else:
        fill()
    assert_close(snapshot(*ours), before, 0)
    assert step.stats.updates == 0
    assert not step.flush()


@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
@pytest.mark.parametrize("compile", [True, False])
def test_a_skipped_batch_that_opens_a_window_leaves_nothing_of_the_last_one(optimizer: str, compile: bool) -> None:
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    step, batches = Step(*ours, cross_entropy, accumulate=2, compile=compile), row.case.batches(4)
    learn(reference, batches[:2])
    for batch in batches[:2]:
        step(*batch)
    step.accumulate = 3
    assert bool(step(*spoilt(batches[0])).skipped)
    assert not any(array.any() for array in flat(step.state["window"]).values())
    for model in (reference[0], ours[0]):
        model.layers[0].freeze()
    step(*batches[2])
    ours[0].layers[0].unfreeze()
    assert bool(step(*spoilt(batches[3])).updated)
    learn_after_thawing(reference, batches[2:3], 1)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def learn_after_thawing(pair: Pair, window: list[Batch], frozen: int) -> None:
    """Update by the average over a window, of which the first layer, frozen so far, saw all but so many batches."""
    model, optimizer = pair
    model.layers[0].unfreeze()
    grads = [nn.value_and_grad(model, cross_entropy)(model, *batch)[1] for batch in window]
    for each in grads[:frozen]:
        each["layers"][0] = tree_map(mx.zeros_like, each["layers"][0])
    optimizer.update(model, average(grads))
    mx.eval(model.state, optimizer.state)


def test_nothing_of_a_window_that_was_refused_is_in_the_next() -> None:
    reference, ours = ROW.new(), ROW.new()
    step, batches = Step(*ours, scaled, accumulate=4, nonfinite="raise"), ROW.case.batches(4)
    huge, one = mx.array(1.2e19), mx.array(1.0)
    ours[1].init(ours[0].trainable_parameters())
    step(*batches[0], huge)
    ours[0].layers[0].freeze()
    for batch in batches[1:3]:
        step(*batch, huge)
    with pytest.raises(FloatingPointError, match="window"):
        step(*batches[3], huge)
    assert step.state["batches"] == 0
    step(*batches[0], one)
    ours[0].layers[0].unfreeze()
    for batch in batches[1:]:
        step(*batch, one)
    learn_after_thawing(reference, batches, 1)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def test_a_step_that_allows_everything_takes_nothing_of_a_window_of_which_all_was_skipped() -> None:
    ours, batches = ROW.new(), ROW.case.batches(2)
    ours[1].init(ours[0].trainable_parameters())
    guarded, allowing = (Step(*ours, cross_entropy, accumulate=2, nonfinite=each) for each in ("skip", "allow"))
    before = snapshot(*ours)
    for batch in batches:
        guarded(*spoilt(batch))
        assert allowing.flush()
    assert_close(snapshot(*ours), before, 0)
    assert allowing.stats.updates == 0


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adam-branching", "user-branching"])
def test_an_update_that_was_missed_leaves_the_rate_of_a_users_schedule(optimizer: str, accumulate: int) -> None:
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    step, batches = Step(*ours, cross_entropy, accumulate=accumulate), row.case.batches(3)
    for _ in range(2):  # after which the schedule would give another rate
        learn(reference, batches[:accumulate])
        for batch in batches[:accumulate]:
            step(*batch)
    for _ in range(3 * accumulate):
        assert bool(step(*spoilt(batches[0])).skipped)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    learn(reference, batches[2:])
    step(*batches[2])
    step.flush()
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def shorter(batch: Batch) -> Batch:
    """Return a batch of other shapes."""
    return tuple(part[:5] for part in batch)


@pytest.mark.parametrize("change", [name for name in CHANGES if not name.startswith("freeze")])
@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
def test_a_change_within_a_window_is_seen_and_keeps_what_is_in_it(optimizer: str, change: str) -> None:
    row = Row("conv", optimizer, accumulate=3)
    reference, ours = row.new(), row.new()
    step = Step(*ours, cross_entropy, accumulate=3)

    def nine(pair: Pair, take: Callable[..., mx.array]) -> tuple[list[float], dict[str, np.ndarray]]:
        mx.random.seed(5)
        losses = []
        for number, batch in enumerate(row.case.batches(9)):
            if number == 4:
                CHANGES[change](*pair)
            losses.append(float(take(*batch)))
        return losses, snapshot(*pair)

    plain = plain_step(*reference, cross_entropy, accumulate=3)
    losses, state = nine(reference, lambda *batch: plain(*batch)[0])
    our_losses, our_state = nine(ours, lambda *batch: step(*batch).loss)
    tolerance = 5e-3 if change == "dtype" else 2e-5
    np.testing.assert_allclose(our_losses, losses, rtol=tolerance)
    assert_close(our_state, state, tolerance)
    assert step.stats.updates == 3


def test_another_shape_within_a_window_keeps_what_is_in_it() -> None:
    reference, ours = ROW.new(), ROW.new()
    step, batches = Step(*ours, cross_entropy, accumulate=3), ROW.case.batches(6)
    batches = [batch if number % 2 else shorter(batch) for number, batch in enumerate(batches)]
    for window in (batches[:3], batches[3:]):
        learn(reference, window)
        for batch in window:
            step(*batch)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert step.stats.traced == 3  # one for each shape, and the update


@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
@pytest.mark.parametrize("trains", ["yyn", "ynn", "nyy", "nny", "yny"])
def test_freezing_within_a_window_keeps_what_is_in_it(trains: str, optimizer: str) -> None:
    row = Row("mlp", optimizer)
    (model, opt), ours = row.new(), row.new()
    first, *window = row.case.batches(4)
    step = Step(*ours, cross_entropy)
    step(*first)
    learn((model, opt), [first])
    sums: dict[str, mx.array] = {}
    step.accumulate = 3
    for batch, letter in zip(window, trains, strict=True):
        for each in (model, ours[0]):
            each.layers[0].unfreeze() if letter == "y" else each.layers[0].freeze()
        for name, gradient in flat(nn.value_and_grad(model, cross_entropy)(model, *batch)[1]).items():
            sums[name] = sums.get(name, mx.array(0.0)) + gradient
        step(*batch)
    trained = flat(model.trainable_parameters())
    opt.update(model, tree_unflatten([(name, sums[name] / 3) for name in trained]))
    assert len(trained) == (4 if trains[-1] == "y" else 2)
    assert_close(snapshot(*ours), snapshot(model, opt), 1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "user-adam", "multi"])
def test_an_error_in_the_loss_within_a_window_changes_nothing(optimizer: str) -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        loss = cross_entropy(model, x, y)
        if len(x) == 5:
            raise error
        return loss

    row = Row("conv", optimizer)
    reference, ours = row.new(), row.new()
    step, batches = Step(*ours, loss_fn, accumulate=3), row.case.batches(3)
    mx.random.seed(2)
    learn(reference, batches)
    wanted = snapshot(*reference)
    mx.random.seed(2)
    for batch in batches:  # as the first of a window, in its middle, and as the one that would fill it
        before = everything(ours, step)
        for error in (Ours("no"), KeyboardInterrupt()):
            with pytest.raises(type(error)) as caught:
                step(*shorter(batch))
            assert caught.value is error
        with pytest.raises(ValueError, match=r"\[reshape\]"):
            step(batch[0][:, :7], batch[1])
        assert_close(everything(ours, step), before, 0)
        step(*batch)
    assert_close(snapshot(*ours), wanted, 1e-5)


class Unwilling(optim.Adam):
    """A user's optimizer that fails when it is to update."""

    willing = False

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Tree]) -> mx.array:
        """Refuse, or do what Adam does."""
        if not self.willing:
            raise Ours("not yet")
        updated: mx.array = super().apply_single(gradient, parameter, state)
        return updated


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("nonfinite", ["skip", "raise", "allow"])
def test_an_error_in_the_update_takes_its_batch_back(nonfinite: Tree, compile: bool) -> None:
    row = Row("conv", "adamw")
    reference, ours = (row.new()[0], optim.Adam(1e-2)), (row.new()[0], Unwilling(1e-2))
    step = Step(*ours, cross_entropy, accumulate=2, nonfinite=nonfinite, compile=compile)
    batches = row.case.batches(2)
    mx.random.seed(2)
    learn(reference, batches)
    wanted = snapshot(*reference)
    mx.random.seed(2)
    step(*batches[0])
    before = everything(ours, step)
    for _ in range(2):
        with pytest.raises(Ours, match="not yet"):
            step(*batches[1])
        assert_close(everything(ours, step), before, 0)
    ours[1].willing = True
    assert bool(step(*batches[1]).updated)
    assert_close(snapshot(*ours), wanted, 1e-5)


def shrinking(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Assign to a parameter, as `BatchNorm` does to statistics that `unfreeze()` of the whole has made trainable."""
    loss = cross_entropy(model, x, y)
    layer = model.layers[0]
    layer.weight = mx.stop_gradient(0.9 * layer.weight + 1e-2 * loss)
    return loss


@pytest.mark.parametrize("nonfinite", ["skip", "allow", "raise"])
@pytest.mark.parametrize(("optimizer", "compile"), [*((way, True) for way in WAYS), ("adamw", False), ("multi", False)])
def test_what_a_loss_assigns_to_a_parameter_stays(optimizer: str, compile: bool, nonfinite: str) -> None:
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    step = Step(*ours, shrinking, accumulate=3, nonfinite=nonfinite, compile=compile)
    batches = row.case.batches(6)
    for window in (batches[:3], batches[3:]):
        if nonfinite == "skip":
            assert bool(step(*spoilt(window[0])).skipped)
            window = window[1:]
        learn(reference, window, loss_fn=shrinking)
        for batch in window:
            step(*batch)
    assert step.stats.updates == 2
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def test_a_loss_that_reads_values_keeps_what_is_in_the_window() -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array, reads: bool) -> mx.array:
        loss = cross_entropy(model, x, y)
        return loss if not reads or float(loss) > 0 else -loss

    reference, ours = ROW.new(), ROW.new()
    step, batches = Step(*ours, loss_fn, accumulate=3), ROW.case.batches(6)
    step(*batches[0], False)
    step(*batches[1], True)
    for batch in batches[2:]:
        step(*batch, False)
    learn(reference, batches[:3])
    learn(reference, batches[3:])
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert (step.stats.mode != "plain", step.stats.updates) == (True, 2)


@pytest.mark.parametrize("model", ["mlp", "conv", "decorated"])
@pytest.mark.parametrize("compile", [True, False])
def test_gradients_within_a_window_change_nothing(model: str, compile: bool) -> None:
    row = Row(model, "adamw")
    reference, ours, untouched = row.new(), row.new(), row.new()[0]
    take = plain_step(*reference, cross_entropy, accumulate=2)
    step = Step(*ours, cross_entropy, accumulate=2, compile=compile)
    first, second = row.case.batches(2)
    for number, batch in enumerate((first, second)):
        mx.random.seed(number)
        take(*batch)
    wanted = snapshot(*reference)
    mx.random.seed(0)
    step(*first)
    mx.random.seed(1)
    before = everything(ours, step)
    loss, grads = step.gradients(*second)
    assert_close(everything(ours, step), before, 0)
    plain_loss, plain_grads = nn.value_and_grad(untouched, cross_entropy)(untouched, *second)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    for name, gradient in flat(plain_grads).items():
        np.testing.assert_allclose(flat(grads)[name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)
    mx.random.seed(1)
    assert bool(step(*second).updated)
    assert_close(snapshot(*ours), wanted, 1e-5)


FAILING_COMPILER = """
import os, shutil, warnings
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
from pathlib import Path

folder = Path(os.environ["TMPDIR"])
shim = folder / "g++"
shim.write_text(f'#!/bin/sh\\n[ ! -e {folder}/full ] && exec {shutil.which("g++")} "$@"\\nexit 1\\n')
shim.chmod(0o755)
os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"

from faststep import Step
from support.helpers import assert_close, average, snapshot

def loss_fn(model, x):
    return model(x).sum()

def new():
    mx.random.seed(0)
    return nn.Linear(4, 3), optim.SGD(0.1, momentum=0.9)

reference, ours = new(), new()
batches = [mx.random.normal((2, 4)) for _ in range(4)]
step = Step(*ours, loss_fn, accumulate=2)
step(batches[0])
(folder / "full").touch()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert step(batches[1]).updated
assert ["compiler" in str(each.message) for each in caught] == [True], caught
for batch in batches[2:]:
    step(batch)
mx.disable_compile()
for window in (batches[:2], batches[2:]):
    grads = [nn.value_and_grad(reference[0], loss_fn)(reference[0], batch)[1] for batch in window]
    reference[1].update(reference[0], average(grads))
assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
"""


@pytest.mark.skipif(not mx.default_device().type == mx.cpu or sys.platform == "win32", reason="only the CPU needs g++")
def test_an_update_that_cannot_be_compiled_takes_each_batch_once(child: Child, tmp_path: Path) -> None:
    child(FAILING_COMPILER, TMPDIR=os.fspath(tmp_path), FASTSTEP_KERNELS="0")  # with them none is needed
