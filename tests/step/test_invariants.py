"""Invariants over any number of steps: dtypes, shapes, objects, traces, memory."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import mlx.core as mx
import pytest
from faststep import Step
from support.helpers import Row, flat, random_key
from support.models import MODELS
from support.places import Child

STATM = Path("/proc/self/statm")
TRACES = 3  # of one's own optimizer: it is called, its arrays are taken over, its update is left out
MEMORY = """
import gc, json, sys
import mlx.core as mx, mlx.nn as nn
from support.helpers import OPTIMIZERS, Row
from faststep import Step, fast_step

row = Row(MODEL, OPTIMIZER, 1.0)
model, optimizer = row.new()
batches = row.case.batches(8)
# by itself it is captured when its kernels are compiled, which may be late
step = Step(model, optimizer, row.case.loss_fn, max_grad_norm=1.0, replay=True)
held = [model.state, optimizer.state] if HOLDS else None

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def take(count):
    for number in range(count):
        out = step(*batches[number % 8])
        if HOLDS:
            mx.eval(out.loss, held)
            float(out.loss)
    del out
    step.synchronize()
    gc.collect()
    return mx.get_active_memory(), resident(), len(gc.get_objects())

take(300)
before, after = take(50), take(1500)
print(json.dumps([b - a for a, b in zip(before, after)] + [len(step.stats.traces)]))
"""


@pytest.mark.parametrize("holds", [False, True], ids=["unread", "held"])
@pytest.mark.parametrize(("model", "optimizer"), [("conv", "adamw"), ("gpt", "sgd-momentum"), ("mlp", "user-adam")])
@pytest.mark.skipif(not STATM.exists(), reason="reads the resident size from /proc")
def test_memory_is_flat_over_1500_steps(child: Child, model: str, optimizer: str, holds: bool) -> None:
    names = f"MODEL, OPTIMIZER, HOLDS = {model!r}, {optimizer!r}, {holds}\n"
    active, resident, objects, traces = json.loads(child(names + MEMORY).stdout)
    assert active < 64 << 10
    assert resident < 32 << 20
    assert objects < 100
    assert traces == (TRACES if optimizer == "user-adam" else 1)


@pytest.mark.parametrize("name", MODELS)
def test_names_dtypes_and_shapes_are_kept(name: str) -> None:
    row = Row(name, "adamw", 1.0)
    model, optimizer = row.new()
    before = {path: (array.dtype, array.shape) for path, array in flat(model.parameters()).items()}
    trained = set(flat(model.trainable_parameters()))
    step = Step(model, optimizer, row.case.loss_fn, max_grad_norm=1.0)
    for batch in row.case.batches(3):
        step(*batch)
    assert {path: (array.dtype, array.shape) for path, array in flat(model.parameters()).items()} == before
    moments = {path: array for path, array in flat(optimizer.state).items() if path.endswith((".m", ".v"))}
    assert {path[:-2] for path in moments} == trained
    for path, moment in moments.items():
        assert (moment.dtype, moment.shape) == before[path[:-2]], path


@pytest.mark.parametrize("optimizer", ["adamw-joined", "adam-branching", "sgd-cosine", "user-adam", "multi"])
def test_one_trace_serves_all_steps(optimizer: str) -> None:
    row = Row("conv", optimizer)
    model, opt = row.new()
    step = Step(model, opt, row.case.loss_fn)
    for batch in row.case.batches(12):
        step(*batch)
    assert len(step.stats.traces) == (TRACES if optimizer == "user-adam" else 1)
    assert step.stats.steps == 12


def test_reading_and_evaluating_makes_no_trace() -> None:
    row = Row("mlp", "adamw", 1.0)
    model, optimizer = row.new()
    step = Step(model, optimizer, row.case.loss_fn, max_grad_norm=1.0)
    for batch in row.case.batches(6):
        float(step(*batch).loss)
        mx.eval(model.parameters(), optimizer.state)
        model(batch[0])
        gc.collect()
    assert len(step.stats.traces) == 1


def test_containers_and_modules_stay_the_same_objects() -> None:
    row = Row("nested", "adamw")
    model, optimizer = row.new()
    objects = [model.parts, model.parts["in"], model.parts["in"][1], model.parts["in"][0], model.gains]
    names = [list(vars(module)) for module in model.modules()]
    step = Step(model, optimizer, row.case.loss_fn)
    for batch in row.case.batches(3):
        step(*batch)
    now = [model.parts, model.parts["in"], model.parts["in"][1], model.parts["in"][0], model.gains]
    assert all(a is b for a, b in zip(now, objects, strict=True))
    assert [list(vars(module)) for module in model.modules()] == names


def test_arrays_that_a_step_does_not_change_stay_the_same_objects() -> None:
    row = Row("lora", "adamw")
    model, optimizer = row.new()
    frozen = [model.widen.weight, model.adapted[0].base.weight, model.adapted[1].base.scales]
    key = random_key()
    step = Step(model, optimizer, row.case.loss_fn)
    for batch in row.case.batches(3):
        step(*batch)
    now = [model.widen.weight, model.adapted[0].base.weight, model.adapted[1].base.scales]
    assert all(a is b for a, b in zip(now, frozen, strict=True))
    assert mx.array_equal(random_key(), key)
