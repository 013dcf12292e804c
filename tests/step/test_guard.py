"""Steps whose loss or gradients are no numbers: nothing of them stays, and nobody waits to find out."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from support.helpers import Row, Tree, assert_close, plain_step, snapshot
from support.models import cross_entropy

OPTIMIZERS = ["adamw", "adamw-joined", "sgd-momentum", "sgd", "lion", "user-adam", "multi"]


def spoilt(batch: tuple[mx.array, ...], value: float = float("nan")) -> tuple[mx.array, ...]:
    """Return the batch with one value replaced."""
    first = mx.array(np.array(batch[0]))
    first[0] = value
    return (first, *batch[1:])


def scaled(model: nn.Module, x: mx.array, y: mx.array, factor: mx.array) -> mx.array:
    return cross_entropy(model, x, y) * factor


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bad_step_leaves_no_trace(optimizer: str, max_grad_norm: float | None) -> None:
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    plain, batches = plain_step(*reference, cross_entropy, max_grad_norm), row.case.batches(4)
    step = Step(*ours, cross_entropy, max_grad_norm=max_grad_norm)
    skipped = []
    for number, batch in enumerate(batches):
        plain(*batch)
        skipped.append(step(*batch).skipped)
        if number in (1, 2):
            before = snapshot(*ours)
            skipped.append(step(*spoilt(batch)).skipped)
            assert_close(snapshot(*ours), before, 0)
    assert [bool(each) for each in skipped] == [False, False, True, False, True, False]
    assert (step.stats.steps, step.stats.skipped) == (6, 2)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def test_the_first_step_may_be_the_bad_one() -> None:
    row = Row("mlp", "adamw")
    reference, ours = row.new(), row.new()
    plain, batches = plain_step(*reference, cross_entropy), row.case.batches(2)
    step = Step(*ours, cross_entropy)
    assert step(*spoilt(batches[0])).skipped
    for batch in batches:
        plain(*batch)
        step(*batch)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-6)


def test_buffers_keep_their_values() -> None:
    row = Row("conv", "adamw")
    model, optimizer = row.new()
    step, batches = Step(model, optimizer, row.case.loss_fn), row.case.batches(2)
    step(*batches[0])
    before = snapshot(model, optimizer)
    assert step(*spoilt(batches[1])).skipped
    after = snapshot(model, optimizer)
    assert (before.pop("random") != after.pop("random")).any()  # dropout has drawn from it
    assert_close(after, before, 0)


@pytest.mark.parametrize(("factor", "bad"), [(1.0, False), (1e4, True), (float("inf"), True), (-float("inf"), True)])
def test_a_loss_above_its_limit_is_bad(factor: float, bad: bool) -> None:
    row = Row("mlp", "adamw")
    ours, batch = row.new(), row.case.batches(1)[0]
    before = snapshot(ours[0])
    step = Step(*ours, scaled, max_loss=100.0)
    assert bool(step(*batch, mx.array(factor)).skipped) == bad
    changed = any(not np.array_equal(value, before[name]) for name, value in snapshot(ours[0]).items())
    assert changed != bad


def roots(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return a finite loss whose gradient for the last layer is infinite where its bias is 0."""
    return cross_entropy(model, x, y) + mx.sqrt(mx.abs(model.layers[-1].bias)).sum()


@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
def test_raising_names_the_first_tensor(optimizer: str) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    ours = model, {"adamw": optim.AdamW(1e-2), "user-adam": Row("mlp", "user-adam").new()[1]}[optimizer]
    batch = Row("mlp", "adamw").case.batches(1)[0]
    step = Step(*ours, roots, nonfinite="raise")
    step(*batch)
    model.layers[-1].bias = mx.zeros_like(model.layers[-1].bias)
    before = snapshot(*ours), mx.array(mx.random.state[0])
    with pytest.raises(FloatingPointError, match=r"layers\.2\.bias"):
        step(*batch)
    assert_close(snapshot(*ours), before[0], 0)
    with pytest.raises(FloatingPointError, match=r"layers\.0\.weight"):
        step(*spoilt(batch))
    model.layers[-1].bias = model.layers[-1].bias + 0.1
    assert not step(*batch).skipped


def test_what_is_allowed_is_what_the_plain_loop_does() -> None:
    row = Row("mlp", "adamw")
    model, optimizer = row.new()
    step = Step(model, optimizer, cross_entropy, nonfinite="allow")
    out = step(*spoilt(row.case.batches(1)[0]))
    assert out.skipped is False
    assert out.grad_norm is None
    assert all(np.isnan(value).any() for name, value in snapshot(model).items() if name.endswith("weight"))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"nonfinite": "ignore"}, "nonfinite"), ({"nonfinite": "allow", "max_loss": 1.0}, "max_loss")],
)
def test_options_out_of_range_are_refused(options: dict[str, Tree], text: str) -> None:
    row = Row("mlp", "adamw")
    with pytest.raises(ValueError, match=text):
        fast_step(*row.new(), cross_entropy, *row.case.batches(1)[0], **options)


@pytest.mark.parametrize("compiled", [True, False])
def test_what_a_loss_keeps_of_a_bad_batch_is_as_after_a_plain_loop_that_goes_on(compiled: bool) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        y = model(x)
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * mx.stop_gradient(y.mean(0))
        if len(x) == 3:
            kept["last"] = mx.stop_gradient(y.mean(0))
        return mx.square(y).mean()

    good, bad = mx.ones((2, 4)), mx.full((3, 4), float("nan"))
    found = []
    for fast in (False, True):
        mx.random.seed(1)
        kept: dict[str, mx.array] = {"mean": mx.zeros(3)}
        model, optimizer = nn.Linear(4, 3), optim.Adam(0.01)
        step = Step(model, optimizer, loss_fn, compile=compiled)
        plain = plain_step(model, optimizer, loss_fn)
        for x in (good, bad, good):
            before = snapshot(model, optimizer)
            if fast:
                assert bool(step(x).skipped) == (x is bad)
            elif x is bad:  # the plain loop sees the NaN, and goes on
                mx.eval(loss_fn(model, x), kept)
            else:
                plain(x)
            if x is bad:
                assert_close(snapshot(model, optimizer), before, 0)
        found.append(snapshot(model, optimizer) | {name: np.array(value) for name, value in kept.items()})
    assert_close(found[1], found[0], 1e-6)
