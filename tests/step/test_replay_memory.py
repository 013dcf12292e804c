"""Memory of a replayed step: its plan, what it keeps, when it gives it back."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from faststep import Step
from support.helpers import Row, assert_close, snapshot
from support.places import Child
from support.plans import BLOCKS, GPT24
from support.replays import NEEDS_CPU, NEEDS_REPLAY, STEPS, is_captured, replayed, tolerance

pytestmark = [NEEDS_REPLAY, pytest.mark.timeout(600)]  # a first kernel of each kind costs seconds of CUDA's compiler


def test_a_plan_knows_what_a_capture_takes() -> None:
    row = Row("mlp", "adamw", 0.05)
    batch, *_ = row.case.batches(1)
    for replay in (False, True):
        step = Step(*row.new(), row.case.loss_fn, max_grad_norm=0.05, replay=replay)
        plan = step.memory_plan(*batch)
        for _ in range(STEPS):
            step(*batch)
        assert (plan.replay > 0) == replay
        assert step.stats.bytes["replay"] <= plan.replay, (step.stats.bytes, plan)


def test_memory_is_given_back_when_others_take_it() -> None:
    row = Row("mlp", "adamw", 0.05)
    batches = list(row.case.batches(24))
    ends = []
    for replay in (False, True):
        pair = row.new()
        step = Step(*pair, row.case.loss_fn, max_grad_norm=0.05, replay=replay)
        for i, batch in enumerate(batches):
            if i == 9 and replay:
                assert is_captured(step), replayed(step)
                limit = mx.set_memory_limit(mx.get_active_memory())  # as if the rest were taken
            step(*batch)
            if i == 9 and replay:
                mx.set_memory_limit(limit)
                assert replayed(step) == ["not replayed yet"]
                assert step.stats.bytes["replay"] == 0
        ends.append(snapshot(*pair))
    assert is_captured(step), replayed(step)
    assert_close(ends[1], ends[0], tolerance(row.case.tolerance))


def test_memory_stays_flat_and_is_given_back() -> None:
    row = Row("mlp", "adamw", 0.05)
    (x, y), *_ = row.case.batches(1)
    mx.eval(x, y)
    gc.collect()
    start = mx.get_active_memory()
    pair = row.new()
    step = Step(*pair, row.case.loss_fn, max_grad_norm=0.05, replay=True, max_traces=4)
    for _ in range(100):
        step(x, y)
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(2000):
        step(x, y)
    mx.synchronize()
    after = mx.get_active_memory()
    assert after <= before + 16384, (before, after)  # flags that nobody has read yet
    held = []
    for n in range(1, 9):
        for _ in range(6):
            step(x[:n], y[:n])
        mx.synchronize()
        held.append(mx.get_active_memory())
    assert max(held[4:]) <= 1.1 * max(held[:5]), held
    assert step.stats.bytes["replay"] > 0
    del step, pair
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() <= start + 512, (start, held)  # random keys, flags


@NEEDS_CPU
def test_captures_on_a_cpu_share_their_memory() -> None:
    """They run one after the other: batches of ten sizes take no more than the largest."""
    row = Row("mlp", "adamw", 0.05)
    (x, y), *_ = row.case.batches(1)
    x, y = mx.repeat(x, 64, axis=0), mx.repeat(y, 64, axis=0)
    ends = []
    for replay in (False, True):
        pair = row.new()
        step = Step(*pair, row.case.loss_fn, max_grad_norm=0.05, replay=replay)
        held = []
        for size in range(len(x), len(x) - 10, -1):
            for _ in range(STEPS):
                step(x[:size], y[:size])
            held.append(step.stats.bytes["replay"])
        for size in range(len(x) - 10, len(x)):
            step(x[: size + 1], y[: size + 1])
        ends.append(snapshot(*pair))
    assert is_captured(step), replayed(step)
    assert len(step.stats.traces) == 10
    assert held[-1] <= 1.1 * held[0], held
    assert_close(ends[1], ends[0], 0)


PEAK = """
import mlx.optimizers as optim
import mlx.core as mx
from faststep import Step
from support.plans import *
from support.replays import STEPS, is_captured, replayed

mx.random.seed(0)
model, batch = {model}
mx.eval(model.parameters(), batch)
step = Step(model, optim.AdamW(1e-3), cross_entropy, max_grad_norm=1.0, replay={replay})
for _ in range(2 * STEPS):
    step(*batch)
step.synchronize()
assert not {replay} or is_captured(step), replayed(step)
mx.reset_peak_memory()
mx.async_eval(mx.broadcast_to(mx.array(1.0), (10_000, 1_000)).sum())  # the worker is behind, however slowly it is fed
for _ in range(STEPS):
    step(*batch)
step.synchronize()
print(max(mx.get_peak_memory(), mx.get_active_memory()))  # a replayed step may allocate nothing
"""


@NEEDS_CPU
@pytest.mark.parametrize("model", [GPT24, "transformer(256, 128, 4, (4, 64))", "mlp(128, 128, 64)", BLOCKS])
def test_a_captured_step_has_the_peak_of_an_evaluated_one(model: str, child: Child) -> None:
    evaluated, captured = (int(child(PEAK.format(model=model, replay=replay)).stdout) for replay in (False, True))
    assert captured <= 1.02 * evaluated, (captured, evaluated)
