"""The memory plan against the peaks that MLX measures, and that making one changes nothing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import MemoryPlan, Step
from support.helpers import SignedDescent, random_key, snapshot
from support.models import MODELS
from support.places import Child
from support.plans import CASES, cross_entropy, mlp

TOLERANCE = 0.15
SMALL = 1 << 18  # a few arrays of a small step, which a quick worker has freed before others are there
FIRST = 0.4  # of the first step alone, at most so much more, or near the later ones: when memory is freed varies there

# Run in a child: a plan, the peaks of the first update and of those after it, and a plan of more of them.
MEASURE = """
    import json
    import faststep, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    from support.helpers import SignedDescent
    from support.plans import *

    mx.random.seed(0)
    model, batch = {model}
    optimizer = {optimizer}
    mx.eval(model.parameters(), batch)
    step = faststep.Step(model, optimizer, {loss}, replay=False, {options})
    plan = step.memory_plan(*batch)
    one = mx.array(1.0)

    def peak(steps):
        mx.reset_peak_memory()
        # The device has 30 ms and no bytes to do first: `in_flight` steps are behind it, however slow this process is.
        mx.async_eval(mx.broadcast_to(one, (10_000, 1_000)).sum())
        for _ in range(steps):
            step(*batch)
        step.synchronize()
        mx.synchronize()
        return mx.get_peak_memory()

    first, steady = peak(step.accumulate), peak(12)
    later = step.memory_plan(*batch)
    print(json.dumps([[plan.first_peak, first], [plan.peak, max(first, steady)], [later.peak, steady]]))
"""


UNCOMPILED = pytest.mark.xfail(
    strict=True,
    reason="before the first step the plan has an own update as it is called, not as it is compiled: 20 % too high",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[UNCOMPILED] * (name == "mlp-own-optimizer")) for name in CASES]
)
def test_plan_is_near_the_measured_peak(name: str, child: Child) -> None:
    """The peak is known before the first step, and that of more steps after them."""
    model, optimizer, loss, options = CASES[name]
    done = child(MEASURE.format(model=model, optimizer=optimizer, loss=loss, options=options))
    (planned, measured), *peaks = json.loads(done.stdout)
    most = max((1 + FIRST) * measured, (1 + TOLERANCE) * peaks[0][1])
    assert (1 - TOLERANCE) * measured < planned < most, done.stdout
    for planned, measured in peaks:
        assert abs(planned - measured) < max(TOLERANCE * measured, SMALL), done.stdout


def pair(optimizer: optim.Optimizer | None = None) -> tuple[Step, tuple[mx.array, ...]]:
    """Make a step that is ready to be planned, with its batch."""
    model, batch = mlp(32, 64, 8)
    mx.eval(model.parameters(), batch)
    return Step(model, optimizer or optim.AdamW(1e-2), cross_entropy), batch


@pytest.mark.parametrize("name", ["mlp", "conv", "gpt", "decorated", "lora", "lstm"])
@pytest.mark.parametrize("make", [lambda: optim.AdamW(1e-2), lambda: SignedDescent(1e-3)], ids=["native", "own"])
def test_plan_changes_nothing(name: str, make: Callable[[], optim.Optimizer]) -> None:
    """Training goes on as if no plan had been made, before the first step and later."""
    case = MODELS[name]
    results, traces = [], []
    for plans in (False, True):
        mx.random.seed(7)
        model, optimizer = case.make(), make()
        mx.eval(model.parameters())
        step = Step(model, optimizer, case.loss_fn)
        for batch in case.batches(3):
            if plans:
                before = snapshot(model, optimizer)
                plan = step.memory_plan(*batch)
                after = snapshot(model, optimizer)
                assert before.keys() == after.keys()
                assert all((before[key] == after[key]).all() for key in before)
                assert plan.peak > plan.parameters > 0
            step(*batch)
        results.append(snapshot(model, optimizer))
        traces.append(len(step.stats.traces))
        assert step.stats.steps == 3
    parts = 2 if isinstance(make(), SignedDescent) else 1  # an update of one's own is a part, with or without plans
    assert traces == [parts, parts]
    assert all((results[0][key] == results[1][key]).all() for key in results[0])


def test_plan_takes_no_memory_and_evaluates_nothing() -> None:
    """A model and a batch that have not been computed yet are not computed for a plan."""
    before = mx.get_active_memory()
    model, batch = mlp(512, 4096, 1 << 14)
    key = random_key()
    plan = Step(model, optim.Adam(1e-3), cross_entropy).memory_plan(*batch)
    assert mx.get_active_memory() - before < 1 << 16
    assert random_key() is key
    assert plan.parameters == 4 * (512 * 4096 + 2 * 4096**2 + 16 * 4096 + 3 * 4096 + 16)
    assert plan.state >= 2 * plan.parameters
    assert plan.others >= batch[0].nbytes + batch[1].nbytes


def test_the_plan_s_trace_is_the_first_step_s() -> None:
    """The loss is called once for each plan and each step, and traced once for all."""
    called = []

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        called.append(len(x))
        return cross_entropy(model, x, y)

    model, batch = mlp(32, 64, 8)
    step = Step(model, optim.Adam(1e-3), loss_fn)
    first, second = step.memory_plan(*batch), step.memory_plan(*batch)
    loose = ("cache", "others", "first_peak", "steady_peak")  # scalars come and go in the process
    assert all(abs(getattr(first, name) - getattr(second, name)) < 1024 for name in loose)
    assert replace(first, **dict.fromkeys(loose, 0)) == replace(second, **dict.fromkeys(loose, 0))
    assert step.stats.steps == 0
    step(*batch)
    step.memory_plan(*batch)
    assert (len(step.stats.traces), called) == (1, [8] * 4)


def test_plan_does_not_initialise_the_optimizer() -> None:
    """As long as there has been no step, the optimizer's state is what its constructor left."""
    optimizer = optim.Adam(1e-3)
    before = set(optimizer.state)
    step, batch = pair(optimizer)
    step.memory_plan(*batch)
    assert set(optimizer.state) == before


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((mx.zeros((8, 31)), mx.zeros((8,), mx.int32)), ValueError, "shape"),
        ((mx.zeros((8, 32)),), TypeError, "missing 1 required positional argument"),
        ((mx.zeros((8, 32)), object()), AttributeError, "ndim"),
    ],
)
def test_a_bad_batch_raises_what_a_step_raises(batch: tuple[object, ...], error: type[Exception], message: str) -> None:
    """A plan fails as the step would have, and leaves everything as it was."""
    step, good = pair()
    before = snapshot(step.model, step.optimizer)
    with pytest.raises(error, match=message) as planned:
        step.memory_plan(*batch)
    with pytest.raises(error, match=message) as stepped:
        step(*batch)
    assert str(planned.value) == str(stepped.value)
    after = snapshot(step.model, step.optimizer)
    assert all((before[key] == after[key]).all() for key in before)
    step.memory_plan(*good)


def test_what_does_not_fit_is_warned_of() -> None:
    """A batch of more bytes than any machine has is planned for all the same."""
    model, _ = mlp(1 << 20, 64, 1)
    step = Step(model, optim.SGD(1e-2), cross_entropy)
    batch = mx.zeros((1 << 22, 1 << 20)), mx.zeros((1 << 22,), mx.int32)
    with pytest.warns(RuntimeWarning, match="a step will take up to"):
        plan = step.memory_plan(*batch)
    assert not plan.fits
    assert str(plan).splitlines()[-1].startswith("does not fit into")


def test_plan_prints_as_a_table() -> None:
    """Every number is there, in megabytes and as a share of the device's memory."""
    step, batch = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = step.memory_plan(*batch)
    assert isinstance(plan, MemoryPlan)
    assert plan.fits
    lines = str(plan).splitlines()
    assert [line[:16].strip() for line in lines[:4]] == ["parameters", "gradients", "state", "activations"]
    assert all(line.endswith("%") for line in lines[:-1])
    assert lines[-1].startswith("fits into")


def test_a_loss_that_reads_values_is_planned() -> None:
    """It is called, and computes what it reads."""

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        loss = cross_entropy(model, x, y)
        return loss if loss.item() < 1e9 else 0 * loss

    model, batch = mlp(32, 64, 8)
    mx.eval(model.parameters(), batch)
    step = Step(model, optim.Adam(1e-3), loss_fn)
    plan = step.memory_plan(*batch)
    assert plan.peak > 4 * plan.parameters
    step(*batch)
    assert (step.stats.mode, len(step.stats.traces)) == ("called", 1)
