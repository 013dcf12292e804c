"""Updates by the average of several batches: what a window gives, by which weights, of how many calls, at what cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from support.helpers import HalvedAdam, LossFn, Row, Tree, assert_close, learn, plain_step, snapshot
from support.models import Batch, cross_entropy
from support.places import Child

ROW = Row("mlp", "adamw")
WAYS = ["adamw", "sgd-momentum", "adamw-joined", "user-adam", "multi", "adafactor"]
SCHEDULED = ["sgd-cosine", "adamw-halving", "adam-branching", "user-branching"]


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("optimizer", [*WAYS, *SCHEDULED])
def test_every_call_leaves_what_the_plain_loop_leaves(optimizer: str, max_grad_norm: float | None) -> None:
    row = Row("conv", optimizer, max_grad_norm, accumulate=3)
    reference, ours = row.new(), row.new()
    reference[1].init(reference[0].trainable_parameters())
    take, step = plain_step(*reference, cross_entropy, **row.options), Step(*ours, cross_entropy, **row.options)
    for number, batch in enumerate(row.case.batches(8)):
        mx.random.seed(number)
        loss, norm = take(*batch)
        wanted = snapshot(*reference)
        mx.random.seed(number)
        out = step(*batch)
        np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
        assert_close(snapshot(*ours), wanted, 1e-5)  # buffers, random key, step counter and learning rate among it
        full = number % 3 == 2
        assert (bool(out.updated), bool(out.skipped), out.grad_norm is not None) == (full, False, full)
        if norm is not None:
            np.testing.assert_allclose(float(out.grad_norm), float(norm), rtol=1e-5)  # type: ignore[arg-type]
    assert (step.stats.steps, step.stats.updates, step.stats.skipped) == (8, 2, 0)


@pytest.mark.parametrize(("max_grad_norm", "has_norm"), [(None, False), (0.1, True)])
def test_without_a_guard_only_clipping_needs_the_norm(max_grad_norm: float | None, has_norm: bool) -> None:
    step = Step(*ROW.new(), cross_entropy, accumulate=2, nonfinite="allow", max_grad_norm=max_grad_norm)
    outs = [step(*batch) for batch in ROW.case.batches(2)]
    assert [(out.updated, out.skipped) for out in outs] == [(False, False), (True, False)]
    assert [out.grad_norm is not None for out in outs] == [False, has_norm]


def summed(model: nn.Module, tokens: mx.array, targets: mx.array) -> mx.array:
    """Return the loss of all tokens together."""
    return nn.losses.cross_entropy(model(tokens), targets, reduction="sum")


def by_number(model: nn.Module, tokens: mx.array, targets: mx.array) -> Tree:
    return summed(model, tokens, targets) / targets.size, targets.size, tokens[0, 0]


def by_array(model: nn.Module, tokens: mx.array, targets: mx.array) -> Tree:
    count = (targets >= 0).sum()
    return summed(model, tokens, targets) / count, count, tokens[0, 0]


def moved(loss_fn: LossFn, batches: list[Batch], weighted: bool) -> np.ndarray:
    """Return how far a window has moved the embedding: at this learning rate, its gradient."""
    model = Row("tied", "sgd").new()[0]
    before = np.array(model.embedding.weight)
    step = Step(model, optim.SGD(1.0), loss_fn, accumulate=len(batches), weighted=weighted)
    outs = [step(*batch) for batch in batches]
    assert bool(outs[-1].updated)
    for out, (tokens, _) in zip(outs, batches, strict=True):
        assert out.aux[-1].item() == tokens[0, 0].item()
        assert len(out.aux) == 2 - weighted  # the weight is not among them
    distance: np.ndarray = np.subtract(before, model.embedding.weight)
    return distance


def test_batches_of_8_and_200_tokens_count_by_their_tokens() -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(32, size=(2, *shape), dtype=np.int32) for shape in ((2, 4), (4, 50))]
    batches = [(mx.array(tokens), mx.array(targets)) for tokens, targets in drawn]

    def of_all(model: nn.Module) -> mx.array:
        return (summed(model, *batches[0]) + summed(model, *batches[1])) / 208

    model = Row("tied", "sgd").new()[0]
    wanted = np.array(nn.value_and_grad(model, of_all)(model)[1]["embedding"]["weight"])
    for loss_fn in (by_number, by_array):
        np.testing.assert_allclose(moved(loss_fn, batches, True), wanted, rtol=1e-4, atol=1e-6)
        off = np.linalg.norm(moved(loss_fn, batches, False) - wanted)  # the mean of the means is another gradient
        assert off > 0.5 * np.linalg.norm(wanted)
        assert len(fast_step(model, optim.SGD(1.0), loss_fn, *batches[0], weighted=True)) == 3


def masked(model: nn.Module, x: mx.array, y: mx.array, count: mx.array) -> Tree:
    """Return the mean over the first rows, and how many they are."""
    losses = mx.where(mx.arange(len(y)) < count, nn.losses.cross_entropy(model(x), y), 0)
    return losses.sum() / mx.maximum(count, 1), count


def counted(batches: list[Batch], counts: Sequence[int]) -> list[Batch]:
    """Join batches and the numbers of their rows that count."""
    return [(*batch, mx.array(count)) for batch, count in zip(batches, counts, strict=True)]


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("counts", [(8, 0, 3), (0, 8, 3), (3, 8, 0), (0, 0, 5)], ids=str)
def test_a_batch_of_weight_0_counts_for_nothing(counts: tuple[int, ...], nonfinite: Tree) -> None:
    reference, ours = ROW.new(), ROW.new()
    batches = counted(ROW.case.batches(3), counts)
    step = Step(*ours, masked, accumulate=3, weighted=True, nonfinite=nonfinite)
    for _ in range(2):
        learn(reference, batches, counts, lambda *args: masked(*args)[0])
        assert bool([step(*batch) for batch in batches][-1].updated)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])  # three are more than there are: they are flushed
def test_nothing_but_weight_0_updates_nothing(accumulate: int, nonfinite: Tree) -> None:
    reference, ours = ROW.new(), ROW.new()
    ours[1].init(ours[0].trainable_parameters())
    step = Step(*ours, masked, accumulate=accumulate, weighted=True, nonfinite=nonfinite)
    before, batches = snapshot(*ours), ROW.case.batches(2)
    outs = [step(*batch) for batch in counted(batches, (0, 0))]
    assert step.flush() == (accumulate == 3)
    assert not any(bool(out.updated) for out in outs)
    assert_close(snapshot(*ours), before, 0)
    assert (step.stats.steps, step.stats.updates) == (2, 0)
    step.accumulate = 2
    learn(reference, counted(batches, (8, 3)), (8, 3), lambda *args: masked(*args)[0])
    for batch in counted(batches, (8, 3)):
        step(*batch)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


@pytest.mark.parametrize(
    ("loss_fn", "error", "text"),
    [
        (cross_entropy, TypeError, "weight"),
        (lambda model, x, y: (cross_entropy(model, x, y), "many"), TypeError, "weight"),
        (lambda model, x, y: (cross_entropy(model, x, y), mx.ones((8,))), ValueError, "scalar weight"),
    ],
    ids=["none", "text", "vector"],
)
def test_a_loss_without_a_weight_is_refused(loss_fn: LossFn, error: type[Exception], text: str) -> None:
    ours, batch = ROW.new(), ROW.case.batches(1)[0]
    step = Step(*ours, loss_fn, accumulate=2, weighted=True)
    before = snapshot(*ours, step.state)
    with pytest.raises(error, match=text):
        step(*batch)
    assert_close(snapshot(*ours, step.state), before, 0)


@pytest.mark.parametrize("optimizer", WAYS)
def test_a_window_that_is_not_full_is_averaged_by_what_is_in_it(optimizer: str) -> None:
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    step, batches = Step(*ours, cross_entropy, accumulate=4, max_grad_norm=0.1), row.case.batches(7)
    assert step.flush() is False
    for window, flushed in ((batches[:2], True), (batches[2:6], False), (batches[6:], True)):
        learn(reference, window, max_grad_norm=0.1)
        for batch in window:
            step(*batch)
        assert step.flush() is flushed
        assert step.flush() is False
        assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert (step.stats.steps, step.stats.updates) == (7, 3)


def test_the_number_of_batches_may_change_at_any_call() -> None:
    reference, ours = ROW.new(), ROW.new()
    step, batches = Step(*ours, cross_entropy, accumulate=3), ROW.case.batches(11)
    numbers = [3, 2, 4, 4, 1, 1, 1, 2, 2, 5, 5]
    windows = [[0, 1], [2, 3, 4], [5], [6], [7, 8]]
    updated = []
    for number, batch in zip(numbers, batches, strict=True):
        step.accumulate = number
        updated.append(bool(step(*batch).updated))
    assert [call for call, each in enumerate(updated) if each] == [window[-1] for window in windows]
    with pytest.raises(ValueError, match="accumulate"):
        step.accumulate = 0
    assert step.accumulate == 5
    assert step.flush()
    for window in [*windows, [9, 10]]:
        learn(reference, [batches[call] for call in window])
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def test_steps_of_one_pair_share_its_window() -> None:
    def scaled(model: nn.Module, x: mx.array, y: mx.array, factor: float) -> mx.array:
        return factor * cross_entropy(model, x, y)

    def other(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return scaled(model, x, y, 0.5)

    reference, ours = ROW.new(), ROW.new()
    batches = ROW.case.batches(6)
    one, two = Step(*ours, cross_entropy, accumulate=3), Step(*ours, other, accumulate=3, max_grad_norm=0.1)
    fast_step(*ours, cross_entropy, *batches[0], accumulate=3)
    assert not one(*batches[1]).updated
    assert two(*batches[2]).updated
    fast_step(*ours, cross_entropy, *batches[3], accumulate=3)
    assert one.flush()
    one(*batches[4])
    fast_step(*ours, other, *batches[5], accumulate=2)
    assert not two.flush()
    calls = [(*batch, factor) for batch, factor in zip(batches, (1, 1, 0.5, 1, 1, 0.5), strict=True)]
    learn(reference, calls[:3], loss_fn=scaled, max_grad_norm=0.1)
    learn(reference, calls[3:4], loss_fn=scaled)
    learn(reference, calls[4:], loss_fn=scaled)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


class Counting:
    """A schedule whose value depends on how often it is called."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, step: mx.array) -> mx.array:
        """Return less at every call."""
        self.calls.append(int(step))
        return mx.array(1e-2 / len(self.calls))


@pytest.mark.parametrize("make", [optim.Adam, HalvedAdam])
def test_a_schedule_of_the_users_is_called_once_a_window(make: Callable[..., optim.Optimizer]) -> None:
    schedules = Counting(), Counting()
    reference, ours = [(ROW.new()[0], make(schedule)) for schedule in schedules]
    step, batches = Step(*ours, cross_entropy, accumulate=3), ROW.case.batches(8)
    for batch in batches:
        step(*batch)
    assert step.flush()
    for first in (0, 3, 6):
        learn(reference, batches[first : first + 3])
    assert schedules[1].calls == schedules[0].calls == [0, 0, 1, 2]  # the first: when the optimizer is made
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-joined", "adam-branching", "user-adam", "multi"])
def test_two_traces_serve_all_windows(optimizer: str) -> None:
    row = Row("conv", optimizer)
    step, batches = Step(*row.new(), cross_entropy, accumulate=3), row.case.batches(10)
    for number in range(50):
        step(*batches[number % 10])
    causes = ["first batch of a window", "first update by a window"]
    made = 3 if optimizer == "user-adam" else 1  # it is called, its arrays are taken over, its update is left out
    assert [trace.cause for trace in step.stats.traces][:2] == causes
    assert step.stats.traced == 2 * made
    for number in range(50):
        step.accumulate = 1 + number % 2
        step(*batches[number % 10])
        step.flush()
    assert step.stats.traced == 2 * made + (
        3 if optimizer == "user-adam" else 1
    )  # beside them, those of a step without a window


MEMORY = """
import gc, json
import mlx.core as mx
from support.helpers import Row
from faststep import Step

row = Row("conv", OPTIMIZER, 1.0)
batches = row.case.batches(8)
step = Step(*row.new(), row.case.loss_fn, max_grad_norm=1.0, accumulate=3)

def take(count):
    for number in range(count):
        step(*batches[number % 8])
    step.synchronize()
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    return mx.get_active_memory(), resident, len(gc.get_objects())

take(150)
print(json.dumps([after - before for before, after in zip(take(60), take(300))]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size from /proc")
@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
def test_memory_is_flat_over_300_calls(child: Child, optimizer: str) -> None:
    active, resident, objects = json.loads(child(f"OPTIMIZER = {optimizer!r}\n" + MEMORY).stdout)
    assert active < 16 << 10
    assert resident < 8 << 20
    assert objects < 100
