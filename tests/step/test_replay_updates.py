"""Called updates of one's own optimizers: captured like the batch before them, on a CPU with the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.cuda import IS_CUDA
from support.helpers import Row, Tree, assert_close, plain_step, snapshot
from support.replays import NEEDS_REPLAY, replayed, tolerance

pytestmark = [NEEDS_REPLAY, pytest.mark.timeout(600)]

ROW = Row("conv", "adamw")  # draws random numbers, and has buffers
STEPS = 14
State = dict[str, Any]


class Counts(optim.Optimizer):
    """AdamW that counts its updates in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.updates, self.fails = 0, False

    def init_single(self, parameter: mx.array, state: State) -> None:
        """Begin with zeros."""
        state["m"], state["v"] = mx.zeros_like(parameter), mx.zeros_like(parameter)

    def apply_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        """Count, then update."""
        self.updates += 1
        return super().apply_gradients(gradients, parameters)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Correct the moments by the count."""
        state["m"] = 0.9 * state["m"] + 0.1 * gradient
        state["v"] = 0.99 * state["v"] + 0.01 * mx.square(gradient)
        if self.fails and parameter.ndim == 1:
            raise KeyError("no vectors")
        rate, scale = 1e-2 / (1 - 0.9**self.updates), (1 - 0.99**self.updates) ** -0.5
        return 0.999 * parameter - rate * state["m"] / (mx.sqrt(state["v"]) * scale + 1e-6)


class Lowers(Counts):
    """Descent with momentum at a rate that is a number in Python, in lists that it makes anew."""

    def init_single(self, parameter: mx.array, state: State) -> None:
        """Begin with zeros."""
        state["v"] = [mx.zeros_like(parameter)]

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Go along the velocity."""
        state["v"] = [0.9 * state["v"][0] + gradient]
        return parameter - 0.1 / self.updates * state["v"][0]


class Lists(optim.Lion):
    """Lion that keeps its rates in a list."""

    def __init__(self) -> None:
        super().__init__(1e-3)
        self.rates: list[float] = []

    def apply_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        """Note the rate, then update."""
        self.rates.append(1e-3)
        return super().apply_gradients(gradients, parameters)


class Draws(Counts):
    """Adds noise, of the batch's random key."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Add noise."""
        noise = 1e-3 * mx.random.normal(gradient.shape)
        return super().apply_single(gradient + noise, parameter, state)


MAKE: dict[str, Callable[[], Any]] = {"counts": Counts, "lowers": Lowers, "lists": Lists, "draws": Draws}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"max_grad_norm": 0.05},
    "value": {"max_grad_value": 1e-3},
    "average": {"ema_decay": 0.9},
    "masters": {"compute_dtype": mx.bfloat16},
    "scale": {"compute_dtype": mx.float16},
    "allow": {"nonfinite": "allow"},
}


def with_moments(tree: Any) -> dict[str, Any]:
    """Return the first dict that has moments."""
    if not isinstance(tree, dict | list) or "m" in tree:
        return tree if isinstance(tree, dict) else {}
    return next(filter(None, map(with_moments, tree.values() if isinstance(tree, dict) else tree)), {})


def updates(step: Step) -> list[str]:
    """Return what became of the captures of the updates."""
    return [str(trace.replay) for trace in step.stats.traces if "update" in trace.cause]


def is_captured(step: Step) -> bool:
    """Return whether the last update and the last batch are launched."""
    last = [str(trace.replay) for trace in step.stats.traces if "update" not in trace.cause][-1]
    return last.startswith("captured") and updates(step)[-1].startswith("captured")


def trained(make: Callable[[], Any], replay: bool, bad: tuple[int, ...] = (), **options: Any) -> tuple[Any, Step]:
    """Train on some batches, of which the bad ones are no numbers; the state and the losses, and the step."""
    model, optimizer = ROW.new()[0], make()
    step, losses = Step(model, optimizer, ROW.case.loss_fn, replay=replay, **options), []
    mx.random.seed(3)
    for number, (x, y) in enumerate(ROW.case.batches(STEPS)):
        out = step(x * float("nan") if number in bad else x, y)
        losses.append(float(out.loss))
        assert bool(out.skipped) == (number in bad)
    state = snapshot(model, optimizer, kept=step.state)
    state["losses"] = np.array(losses)
    counts = getattr(optimizer, "updates", len(getattr(optimizer, "rates", ())))
    assert counts == STEPS - len(bad)
    return state, step


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MAKE)
def test_a_called_update_is_captured(name: str, options: str) -> None:
    wanted, _ = trained(MAKE[name], replay=False, **OPTIONS[options])
    got, step = trained(MAKE[name], replay=True, **OPTIONS[options])
    assert is_captured(step), replayed(step)
    assert step.stats.mode == "called"
    assert_close(got, wanted, tolerance(5e-3 if "compute_dtype" in OPTIONS[options] else 1e-4))


@pytest.mark.parametrize("name", MAKE)
def test_a_bad_batch_calls_no_update(name: str) -> None:
    bad = (2, 6, 10, 11)
    wanted, _ = trained(MAKE[name], replay=False, bad=bad, max_grad_norm=0.05)
    got, step = trained(MAKE[name], replay=True, bad=bad, max_grad_norm=0.05)
    assert is_captured(step), replayed(step)
    assert_close(got, wanted, tolerance(1e-4))


def test_it_is_the_plain_loop() -> None:
    reference, ours = (ROW.new()[0], Counts()), (ROW.new()[0], Counts())
    take, step = plain_step(*reference, ROW.case.loss_fn), Step(*ours, ROW.case.loss_fn, replay=True)
    for side in (take, step):
        mx.random.seed(7)
        for batch in ROW.case.batches(STEPS):
            side(*batch)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-4)


def test_an_error_in_an_update_changes_nothing() -> None:
    ends = []
    for replay in (False, True):
        model, optimizer = ROW.new()[0], Counts()
        step = Step(model, optimizer, ROW.case.loss_fn, replay=replay)
        mx.random.seed(3)
        for number, batch in enumerate(ROW.case.batches(STEPS)):
            if number in (5, 9):
                before, optimizer.fails = snapshot(model, optimizer), True
                with pytest.raises(KeyError, match="no vectors"):
                    step(*batch)
                optimizer.fails = False
                assert_close(snapshot(model, optimizer), before, 0)
                assert optimizer.updates == number
            step(*batch)
        assert optimizer.updates == STEPS
        ends.append(snapshot(model, optimizer))
    assert is_captured(step), replayed(step)
    assert_close(ends[1], ends[0], tolerance(1e-4))


def test_what_somebody_holds_or_changes_is_theirs() -> None:
    ends = []
    for replay in (False, True):
        model, optimizer = ROW.new()[0], Counts()
        step = Step(model, optimizer, ROW.case.loss_fn, replay=replay)
        mx.random.seed(3)
        held, read = [], []
        for number, batch in enumerate(ROW.case.batches(STEPS)):
            step(*batch)
            moments = with_moments(optimizer.state)
            if number in (6, 8):
                held.append((moments["m"], mx.array(np.array(moments["m"]))))
            if number == 9:
                moments["v"] = moments["v"] * 4.0
            if number == 11:
                optimizer.updates = 3
            read.append(float(moments["m"].abs().sum().item()) if number % 4 == 0 else 0.0)
        assert all(mx.array_equal(*pair) for pair in held)
        ends.append(snapshot(model, optimizer) | {"read": np.array(read)})
    assert is_captured(step), replayed(step)
    assert_close(ends[1], ends[0], tolerance(1e-4))


class Keeps(Counts):
    """Keeps its gradients and the last moments beside its state."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        object.__setattr__(self, "note", kept.append)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Note the gradient and a moment."""
        updated = super().apply_single(gradient, parameter, state)
        if parameter.ndim == 1:
            self.note((gradient, state["m"], updated))
        return updated


def test_what_an_update_keeps_elsewhere_has_its_values() -> None:
    ends = []
    for replay in (False, True):
        kept: list[Any] = []
        _, _ = trained(lambda kept=kept: Keeps(kept), replay=replay)
        ends.append({str(at): np.array(each) for at, each in enumerate(mx.stack(list(row)) for row in kept)})
    assert_close(ends[1], ends[0], tolerance(1e-4))


def test_one_that_changes_what_it_computes_goes_on() -> None:
    class Turns(Counts):
        """Takes every third gradient by its sign."""

        def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
            """Turn."""
            if self.updates % 3 == 0:
                return parameter - 1e-3 * mx.sign(gradient)
            return super().apply_single(gradient, parameter, state)

    wanted, _ = trained(Turns, replay=False)
    got, step = trained(Turns, replay=True)
    assert is_captured(step), replayed(step)
    assert_close(got, wanted, tolerance(1e-4))


@pytest.mark.skipif(IS_CUDA, reason="the allocator of CUDA keeps what it has")
def test_memory_stays_as_it_is() -> None:
    mx.random.seed(1)
    model, optimizer, x = nn.Linear(16, 16), Counts(), mx.random.normal((4, 16))
    step = Step(model, optimizer, lambda model, x: model(x).square().mean(), replay=True)
    found = []
    for number in range(2000):
        step(x)
        if number % 500 == 499:
            gc.collect()
            found.append((mx.get_active_memory(), len(gc.get_objects())))
    assert abs(found[3][0] - found[1][0]) < 1024
    assert abs(found[3][1] - found[1][1]) < 20
