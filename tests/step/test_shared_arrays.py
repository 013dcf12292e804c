"""Arrays and numbers that both a loss and the code of the optimizer read or set: the update comes behind the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, profile
from mlx.utils import tree_map
from support.beside import Box
from support.helpers import snapshot

STEPS, OTHER, MODEL = 12, Box(None), Box(None)


class Net(nn.Module):
    """A linear layer beside arrays that are not trained, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(4, 3), mx.ones(3)
        self._spread, self._average, self.calls = mx.ones(3), {"weight": mx.zeros((3, 4))}, 0
        self.freeze(keys=["frozen"], recurse=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x)


class Averaging(Net):
    """Sets an array beside its parameters whenever these are set."""

    def update(self, parameters: Any, strict: bool = True) -> nn.Module:
        super().update(parameters, strict)
        self._average["weight"] = 0.9 * self._average["weight"] + 0.1 * self.layer.weight
        return self


def error(model: Net, x: mx.array, y: mx.array) -> mx.array:
    return mx.square(model(x) - y).mean()


def weighed(model: Net, x: mx.array, y: mx.array) -> mx.array:
    return mx.square((model(x) - y) / (1 + model._spread)).mean()


def _spread(model: Net, x: mx.array) -> mx.array:
    return 0.5 * mx.stop_gradient(mx.abs(model(x)).mean(0))


def tracking(model: Net, x: mx.array, y: mx.array) -> mx.array:
    model._spread = 0.5 * model._spread + _spread(model, x)
    return error(model, x, y)


def tracking_frozen(model: Net, x: mx.array, y: mx.array) -> mx.array:
    model.frozen = 0.5 * model.frozen + _spread(model, x)
    return error(model, x, y)


def tracking_elsewhere(model: Net, x: mx.array, y: mx.array) -> mx.array:
    OTHER.value = 0.5 * OTHER.value + _spread(model, x)
    return error(model, x, y)


def counting(model: Net, x: mx.array, y: mx.array) -> mx.array:
    model.calls += 1
    return error(model, x, y)


def reads(scale: Callable[[Net], Any]) -> type[optim.SGD]:
    class Reading(optim.SGD):
        def update(self, model: nn.Module, gradients: Any) -> None:
            divisor = scale(model)  # type: ignore[arg-type]
            super().update(model, tree_map(lambda each: each / divisor, gradients))

    return Reading


def sets(change: Callable[[Net], None]) -> type[optim.SGD]:
    class Setting(optim.SGD):
        def update(self, model: nn.Module, gradients: Any) -> None:
            super().update(model, gradients)
            change(model)  # type: ignore[arg-type]

    return Setting


def shrink(model: Net) -> None:
    model._spread = 0.9 * model._spread


def shrink_in_place(model: Net) -> None:
    model._spread *= 0.9


def shrink_frozen(model: Net) -> None:
    model.frozen = 0.9 * model.frozen


def average(model: Net) -> None:
    model._average["weight"] = 0.9 * model._average["weight"] + 0.1 * model.layer.weight


def swap_shape(model: Net) -> None:
    model._spread = mx.ones(7 - model._spread.size)


def scheduled(factor: Callable[[Any], mx.array]) -> Callable[[float], optim.SGD]:
    return lambda rate: optim.SGD(lambda step: rate * factor(step))


Case = tuple[type[Net], Callable[..., mx.array], Callable[[float], optim.Optimizer]]
TRACED: dict[str, Case] = {
    "reads": (Net, tracking, reads(lambda model: 1 + model._spread.mean())),
    "reads what is frozen": (Net, tracking_frozen, reads(lambda model: 1 + model.frozen.mean())),
    "reads what the loss leaves": (Net, error, reads(lambda model: 1 + model._spread.mean())),
    "sets": (Net, tracking, sets(shrink)),
    "sets what is frozen": (Net, tracking_frozen, sets(shrink_frozen)),
    "sets what the loss leaves": (Net, error, sets(shrink)),
    "sets what the loss reads": (Net, weighed, sets(shrink)),
    "sets in place": (Net, weighed, sets(shrink_in_place)),
    "averages": (Net, tracking, sets(average)),
    "update() of the model averages": (Averaging, tracking, optim.Adam),
    "counts, and nobody reads it": (Net, counting, sets(shrink)),
}
UNCOMPILED: dict[str, tuple[Case, str]] = {
    "reads a count": (
        (Net, counting, reads(lambda model: 1 + 0.1 * model.calls)),
        "reads calls, which the loss changes",
    ),
    "reads another object": (
        (Net, tracking_elsewhere, reads(lambda model: 1 + OTHER.value.mean())),
        "reads .*value, which the loss changes",
    ),
    "sets another shape": ((Net, error, sets(swap_shape)), "gives _spread another shape or dtype"),
}


def batches() -> list[tuple[mx.array, mx.array]]:
    drawn = np.random.default_rng(0)
    both = ((drawn.normal(size=(5, 4)), drawn.normal(size=(5, 3))) for _ in range(STEPS))
    return [(mx.array(x.astype("float32")), mx.array(y.astype("float32"))) for x, y in both]


def build(case: Case) -> tuple[Net, Callable[..., mx.array], optim.Optimizer]:
    mx.random.seed(3)
    OTHER.value = mx.ones(3)
    make, loss_fn, optimizer = case
    MODEL.value = make()
    return MODEL.value, loss_fn, optimizer(0.05)


def plainly(case: Case, window: int) -> tuple[list[float], Any]:
    model, loss_fn, optimizer = build(case)
    gradients_of, losses, sums = nn.value_and_grad(model, loss_fn), [], None
    for number, (x, y) in enumerate(batches(), start=1):
        loss, gradients = gradients_of(model, x, y)
        losses.append(loss.item())
        sums = gradients if sums is None else tree_map(mx.add, sums, gradients)
        if number % window == 0:
            optimizer.update(model, tree_map(lambda each: each / window, sums))
            sums = None
        mx.eval(model.state, optimizer.state, sums or [])
    return losses, left(model)


def left(model: Net) -> Any:
    return [
        snapshot(model),
        np.array(model._spread),
        np.array(model.frozen),
        np.array(model._average["weight"]),
        model.calls,
    ]


def by_step(case: Case, window: int, compiled: bool) -> tuple[list[float], Any, Step]:
    model, loss_fn, optimizer = build(case)
    step = Step(model, optimizer, loss_fn, compile=compiled, accumulate=window)
    losses = [step(x, y).loss.item() for x, y in batches()]
    return losses, left(model), step


def compare(ours: tuple[list[float], Any, Step], reference: tuple[list[float], Any]) -> None:
    near = {"rtol": 2e-5, "atol": 1e-6} if mx.default_device() == mx.cpu else {"rtol": 2e-3, "atol": 1e-4}
    np.testing.assert_allclose(ours[0], reference[0], **near)
    (tree, *arrays), (wanted, *others) = ours[1], reference[1]
    for one, other in zip([*tree.values(), *arrays], [*wanted.values(), *others], strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), **near)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", TRACED)
def test_what_the_loss_and_the_update_share_on_the_model(name: str, compiled: bool, window: int) -> None:
    losses, state, step = by_step(TRACED[name], window, compiled)
    compare((losses, state, step), plainly(TRACED[name], window))
    assert step.stats.mode == ("traced" if compiled else "plain")


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_a_trace_cannot_share(name: str, compiled: bool, window: int) -> None:
    case, why = UNCOMPILED[name]
    if compiled:
        with pytest.warns(RuntimeWarning, match=why):
            ours = by_step(case, window, compiled)
    else:
        ours = by_step(case, window, compiled)
    compare(ours, plainly(case, window))


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_skipped_step_leaves_what_the_optimizer_sets(compiled: bool, window: int) -> None:
    model, loss_fn, optimizer = build(TRACED["averages"])
    step = Step(model, optimizer, loss_fn, compile=compiled, accumulate=window, nonfinite="skip")
    good, (x, y) = batches()[: 2 * window], batches()[-1]
    for each in good:
        step(*each)
    before = left(model)
    for _ in range(window):
        assert step(x * float("nan"), y).skipped
    for one, other in zip(left(model)[1:], before[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    step(x, y)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["of the model", "elsewhere", "a number"])
def test_a_schedule_that_reads_what_the_loss_changes_is_told(kind: str, compiled: bool) -> None:
    factors: dict[str, tuple[Callable[..., mx.array], Callable[[Any], mx.array]]] = {
        "of the model": (tracking, lambda _: 1 / (1 + MODEL.value._spread.mean())),
        "elsewhere": (tracking_elsewhere, lambda _: 1 / (1 + OTHER.value.mean())),
        "a number": (counting, lambda _: mx.array(1 / (1 + MODEL.value.calls))),
    }
    loss_fn, factor = factors[kind]
    model, _, optimizer = build((Net, loss_fn, scheduled(factor)))
    step = Step(model, optimizer, loss_fn, compile=compiled)
    with pytest.warns(RuntimeWarning, match=r"a schedule of the optimizer may read .*, which the loss changes") as told:
        losses = [step(x, y).loss for x, y in batches()]
    assert (len(told), len(losses)) == (1, STEPS)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_schedule_that_reads_what_the_loss_leaves(compiled: bool) -> None:
    def factor(_: Any) -> mx.array:
        return 1 / (1 + mx.abs(MODEL.value.layer.weight).mean() + OTHER.value.mean())

    case: Case = (Net, tracking, scheduled(factor))
    results = []
    for fast in (True, False):
        model, loss_fn, optimizer = build(case)
        step, gradients_of, losses = (
            Step(model, optimizer, loss_fn, compile=compiled),
            nn.value_and_grad(model, loss_fn),
            [],
        )
        for x, y in batches():
            if fast:
                losses.append(step(x, y).loss.item())
            else:
                loss, gradients = gradients_of(model, x, y)
                optimizer.update(model, gradients)
                losses.append(loss.item())
        results.append((losses, left(model), step))
    compare(results[0], results[1][:2])


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("compiled", [True, False])
def test_such_a_step_is_planned_and_profiled_and_flushed(compiled: bool, window: int) -> None:
    model, loss_fn, optimizer = build(TRACED["sets"])
    step, (first, *rest) = Step(model, optimizer, loss_fn, compile=compiled, accumulate=window), batches()
    assert step.memory_plan(*first).peak > 0
    step(*first)
    assert step.flush() == (window > 1)
    reference, _, plain = build(TRACED["sets"])
    _, gradients = nn.value_and_grad(reference, loss_fn)(reference, *first)
    plain.update(reference, gradients)
    np.testing.assert_allclose(np.array(model._spread), np.array(reference._spread), rtol=1e-5)
    with profile(step) as found:
        found.measure(*first)
        for each in rest[:window]:
            step(*each)
    assert f"{window} steps" in str(found)
