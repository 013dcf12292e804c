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

STEPS = 12
OTHER: Any = Box(None)
MODEL: Any = Box(None)


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


class Slotted:
    """An optimizer that is none of MLX's, with its rate and an array in slots."""

    __slots__ = ("__dict__", "__weakref__", "mean", "rate")

    def __init__(self, rate: float) -> None:
        self.rate, self.mean = rate, mx.array(0.0)
        self.state: dict[str, Any] = {}

    def update(self, model: nn.Module, gradients: Any) -> None:
        old = model.trainable_parameters()
        model.update(tree_map(lambda old, each: old - self.rate * each, old, gradients))


class Keeping(Slotted):
    """Keeps an array in a slot."""

    def update(self, model: nn.Module, gradients: Any) -> None:
        self.mean = 0.9 * self.mean + mx.abs(gradients["layer"]["weight"]).mean()
        super().update(model, tree_map(lambda each: each / (1 + self.mean), gradients))


class Tracker:
    """A plain object on a model."""

    def __init__(self) -> None:
        self.last, self.calls = mx.array(1.0), 0


class Tracked(Net):
    """Has such an object, a dict and a tuple of arrays, which a loss replaces, and a number of its class."""

    strength = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.tracker, self._stats, self._pair, self._scale = Tracker(), {"mean": mx.array(1.0)}, (mx.array(1.0), 1), 1.0


class Limited(Net):
    """Bounds its weights by a number that the program sets, and averages them in a new dict."""

    def update(self, parameters: Any, strict: bool = True) -> nn.Module:
        super().update(tree_map(lambda each: mx.clip(each, -OTHER.limit, OTHER.limit), parameters), strict)
        self._average = {"weight": 0.9 * self._average["weight"] + 0.1 * self.layer.weight}
        return self


class Patched(Net):
    """Has such a bound in an `update` of the object, not of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.update = self.bounded

    def bounded(self, parameters: Any, strict: bool = True) -> nn.Module:
        limit = OTHER.limit
        return nn.Module.update(self, tree_map(lambda each: mx.clip(each, -limit, limit), parameters), strict)


def leaving(leave: Callable[[Any, mx.array], None]) -> Callable[..., mx.array]:
    def loss_fn(model: Net, x: mx.array, y: mx.array) -> mx.array:
        loss = error(model, x, y)
        leave(model, mx.stop_gradient(loss))
        return loss

    return loss_fn


def replace_stats(model: Any, loss: mx.array) -> None:
    model._stats = {"mean": 0.5 * model._stats["mean"] + loss}


def count_in_tracker(model: Any, _: mx.array) -> None:
    model.tracker.calls += 1


def count_in_optimizer(_: Any, __: mx.array) -> None:
    OTHER.optimizer.calls += 1


def between(number: int) -> None:
    """Set what updates read, between the steps."""
    MODEL.value._scale = 1.0 + number // 4
    Tracked.strength = 1.0 + number // 6
    OTHER.limit = 1.0 / (1 + number // 5)
    if isinstance(OTHER.optimizer, Slotted):
        OTHER.optimizer.rate = 0.1 / (1 + number // 4)


Case = tuple[type[Net], Callable[..., mx.array], Callable[[float], Any]]
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
    "reads a new dict": (Tracked, leaving(replace_stats), reads(lambda model: 1 + model._stats["mean"])),  # type: ignore[attr-defined]
    "reads a number of the class": (Tracked, error, reads(lambda model: type(model).strength)),  # type: ignore[attr-defined]
    "reads a number in a slot": (Net, error, Slotted),
    "update() of the model reads": (Limited, tracking, optim.SGD),
    "update() of the object reads": (Patched, tracking, optim.SGD),
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
    "reads a tuple": (
        (
            Tracked,
            leaving(lambda model, loss: setattr(model, "_pair", (loss, 1))),
            reads(lambda model: 1 + model._pair[0]),  # type: ignore[attr-defined]
        ),
        "reads .*_pair.*, which the loss changes",
    ),
    "reads an object of the model": (
        (
            Tracked,
            leaving(lambda model, loss: setattr(model.tracker, "last", loss)),
            reads(lambda model: 1 + model.tracker.last),
        ),
        "reads model.tracker.last, which the loss changes",
    ),
    "reads a count in an object of the model": (
        (Tracked, leaving(count_in_tracker), reads(lambda model: 1 + 0.1 * model.tracker.calls)),
        "tracker.calls|depends on what it changes itself",
    ),
    "has an array that the loss sets": (
        (
            Net,
            leaving(lambda _, loss: setattr(OTHER.optimizer, "last", loss)),
            reads(lambda _: 1 + OTHER.optimizer.last),
        ),
        r"changes the optimizer that updates it \(last\)",
    ),
    "has a count of the loss": (
        (Net, leaving(count_in_optimizer), reads(lambda _: 1 + 0.1 * OTHER.optimizer.calls)),
        r"changes the optimizer that updates it \(calls\)",
    ),
    "keeps an array in a slot": ((Net, error, Keeping), "keeps an array in an object beside its state"),
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
    OTHER.optimizer = optimizer(0.05)
    OTHER.optimizer.last, OTHER.optimizer.calls = mx.array(1.0), 0
    return MODEL.value, loss_fn, OTHER.optimizer


def plainly(case: Case, window: int) -> tuple[list[float], Any]:
    model, loss_fn, optimizer = build(case)
    gradients_of, losses, sums = nn.value_and_grad(model, loss_fn), [], None
    for number, (x, y) in enumerate(batches(), start=1):
        between(number - 1)
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
    losses = []
    for number, (x, y) in enumerate(batches()):
        between(number)
        losses.append(step(x, y).loss.item())
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


def test_what_the_optimizer_keeps_elsewhere_has_nothing_of_a_bad_batch() -> None:
    class Norms(optim.SGD):
        """Keeps norms in an object, and a mean on the model, from its first update on."""

        def update(self, model: nn.Module, gradients: Any) -> None:
            norm = mx.abs(gradients["layer"]["weight"]).mean()
            OTHER.value = 0.5 * OTHER.value + norm
            model._norm = norm if "_norm" not in model else 0.5 * model._norm + norm
            OTHER.calls = getattr(OTHER, "calls", 0) + 1
            super().update(model, gradients)

    results = []
    for bad in (False, True):
        model, loss_fn, optimizer = build((Net, error, Norms))
        OTHER.value, OTHER.calls = mx.array(0.0), 0
        step = Step(model, optimizer, loss_fn, compile=False)
        for number, (x, y) in enumerate(batches()):
            if bad and number in (0, 4):
                assert step(x * float("nan"), y).skipped
            step(x, y)
        results.append([OTHER.value.item(), model._norm.item(), OTHER.calls])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
def test_a_plan_leaves_nothing_of_an_update(compiled: bool) -> None:
    class Counting(optim.SGD):
        """Counts updates in itself and elsewhere, and keeps an array on the model."""

        count = 0

        def update(self, model: nn.Module, gradients: Any) -> None:
            self.count += 1
            OTHER.calls += 1
            model._kept = mx.array(self.count)
            super().update(model, tree_map(lambda each: each / self.count, gradients))

    model, loss_fn, optimizer = build((Net, error, Counting))
    OTHER.calls = 0
    step = Step(model, optimizer, loss_fn, compile=compiled)
    assert step.memory_plan(*batches()[0]).peak > 0
    assert (optimizer.count, OTHER.calls, "_kept" in model) == (0, 0, False)  # type: ignore[attr-defined]
    for each in batches()[:4]:
        step(*each)
    step.memory_plan(*batches()[0])
    assert (optimizer.count, OTHER.calls, model._kept.item()) == (4, 4, 4)  # type: ignore[attr-defined]


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


class Shared:
    """What a loss and the code of an optimizer have in common."""

    def __init__(self) -> None:
        self.numbers, self.named, self.weight = [1.0], {"first": 1.0}, 0.0


SHARED: Any = Box(Shared())
CONTENTS: dict[str, tuple[Callable[[], float], Callable[[], object]]] = {
    "a list": (lambda: sum(SHARED.value.numbers), lambda: SHARED.value.numbers.append(0.5)),
    "a dict": (lambda: sum(SHARED.value.named.values()), lambda: SHARED.value.named.update(second=1.0)),
    "a new attribute": (
        lambda: getattr(SHARED.value, "late", 1.0),
        lambda: setattr(SHARED.value, "late", 2.0),
    ),
    "there and back": (
        lambda: sum(SHARED.value.numbers),
        lambda: SHARED.value.numbers.pop() if len(SHARED.value.numbers) > 1 else SHARED.value.numbers.append(1.0),
    ),
}


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("by", ["the loss", "the update"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_what_comes_into_a_container_that_the_update_reads(kind: str, by: str, window: int) -> None:
    read, change = CONTENTS[kind]

    class Reading(optim.SGD):
        def update(self, model: nn.Module, gradients: Any) -> None:
            if by == "the update":
                change()
            divisor = read()
            super().update(model, tree_map(lambda each: each / divisor, gradients))

    def late(model: Net, x: mx.array, y: mx.array) -> mx.array:
        if by == "the loss" and SHARED.value.weight > 4:
            change()
        return error(model, x, y) * (1 + SHARED.value.weight / 100)

    def train(fast: bool) -> tuple[list[float], Any, Any]:
        SHARED.value = Shared()
        model, loss_fn, optimizer = build((Net, late, Reading))
        step = Step(model, optimizer, loss_fn, accumulate=window) if fast else None
        gradients_of, losses, total = nn.value_and_grad(model, loss_fn), list[float](), None
        for number, (x, y) in enumerate(batches() * 2):
            SHARED.value.weight = number
            if step:
                losses.append(step(x, y).loss.item())
                continue
            loss, gradients = gradients_of(model, x, y)
            losses.append(loss.item())
            total = gradients if total is None else tree_map(mx.add, total, gradients)
            if number % window == window - 1:
                optimizer.update(model, tree_map(lambda each: each / window, total))
                total = None
        return losses, left(model), step

    wanted = train(False)
    with pytest.warns(RuntimeWarning, match="the optimizer's code reads"):
        got = train(True)
    compare(got, wanted[:2])


@pytest.mark.parametrize("window", [1, 3])
def test_an_array_that_loss_and_update_read_is_an_input(window: int) -> None:
    def reading(model: Net, x: mx.array, y: mx.array) -> mx.array:
        return error(model, x, y) * (1 + OTHER.value.mean())

    case: Case = (Net, reading, reads(lambda model: 1 + OTHER.value.mean()))
    losses, state, step = by_step(case, window, True)
    compare((losses, state, step), plainly(case, window))
    assert step.stats.mode == "traced"


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
