"""A recording of a step: its stages fill the time, its operations are those of the step, and nothing changes by it."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Profile, Step, profile
from faststep._profile._recording import Held
from mlx.utils import tree_flatten, tree_map


def program(**options: Any) -> tuple[Step, mx.array]:
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.relu, nn.Linear(64, 8))
    step = Step(model, optim.AdamW(1e-2), lambda model, x: mx.square(model(x)).mean(), **options)
    return step, mx.random.normal((16, 32))


def recorded(step: Step, x: mx.array, steps: int) -> Profile:
    with profile(step) as found:
        for batch in found.data([x] * steps):
            time.sleep(0.002)
            step(batch)
        step.synchronize()
    return found


def test_stages_follow_each_other_and_fill_the_time() -> None:
    step, x = program()
    found = recorded(step, x, 6)
    assert found.steps == 6
    assert [cause for cause, _ in found.traces] == ["first call"]
    stages = found.stages()
    named = {"your loop", "data", "look", "show", "trace", "first evaluation", "build", "evaluation", "wait"}
    assert named == set(stages)
    assert stages["your loop"] >= 6 * 0.002
    for before, after in zip(found.spans, found.spans[1:], strict=False):
        assert before.began <= before.ended == pytest.approx(after.began, abs=1e-9)
    assert sum(stages.values()) == pytest.approx(found.seconds, rel=1e-6)
    assert all(span.active > 0 for span in found.spans)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"nonfinite": "raise"}, {"compile": False}, {"ema_decay": 0.9}]
)
def test_measuring_changes_nothing(options: dict[str, Any]) -> None:
    def numbers(measures: bool) -> list[Any]:
        step, x = program(**options)
        losses = []
        for _ in range(5):
            losses.append(step(x).loss.item())
            if measures:
                with profile(step) as found:
                    pass
                found.measure(x)
                assert len(found.operations) > 20
        arrays = [step.model.parameters(), step.optimizer.state, step.state, mx.random.state]
        return [losses, [array.tolist() for _, array in tree_flatten(arrays) if isinstance(array, mx.array)]]

    assert numbers(measures=True) == numbers(measures=False)


def is_product(name: str) -> bool:
    return name in ("Matmul", "TurnedProduct", "AddMM", "AddedProduct") or name.startswith(
        "faststep_small_product"
    )  # the latter on CUDA


def test_the_operations_are_those_of_forward_backward_and_update() -> None:
    step, x = program()
    found = recorded(step, x, 2)
    assert found.operations == []
    found.measure(x)
    products = [each for each in found.operations if is_product(each.name)]
    assert len(products) == 5  # two layers forward, three products backward: nothing needs the gradient of x
    assert products[0].output == "float32 (16,64)"
    assert products[0].bytes == 4 * (16 * 32 + 32 * 64 + 64 + 16 * 64)
    assert all(each.seconds >= 0 for each in found.operations)
    assert f"{len(found.operations)} operations of one step, each alone" in str(found)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"nonfinite": "raise"}, {"compute_dtype": mx.bfloat16}], ids=str
)
def test_memory_is_told_by_what_it_is_for(options: dict[str, Any]) -> None:
    gc.collect()  # arrays of other tests would count while the step is measured, and not in the plan
    mx.clear_cache()  # nor does it know that an array has got a larger buffer of theirs
    if mx.default_device().type == mx.gpu:
        mx.reset_peak_memory()  # of earlier tests, by which a step is measured there: a large one waits for the last
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm(256), nn.relu, nn.Linear(256, 64), nn.Linear(64, 4))
    model.layers[4].freeze()
    step = Step(model, optim.Adam(1e-3), lambda model, x: mx.square(model(x)).mean(), **options)
    x = mx.random.normal((512, 64))
    for _ in range(4):
        step(x)
    step.synchronize()
    with profile(step) as found:
        pass
    found.measure(x)
    planned, peak = step.memory_plan(x), found.peak()
    assert peak is not None
    scalars = 8192  # and arrays like them: some live until a thread of MLX's lets them go
    assert 0.9 * planned.steady_peak <= peak.held.in_use <= planned.steady_peak + scalars
    parameters = sum(each.nbytes for _, each in tree_flatten(model.trainable_parameters()))
    most = {kind: max(getattr(each.held, kind) for each in found.operations) for kind in Held._fields}
    assert parameters <= most["parameters"] <= 2.1 * parameters
    assert most["state"] >= 2 * parameters
    assert x.nbytes <= most["batch"] < x.nbytes + 4096
    frozen = sum(each.nbytes for _, each in tree_flatten(model.parameters())) - parameters
    assert frozen <= most["model"] <= 3 * frozen + 4096
    assert most["gradients"] >= model.layers[0].weight.nbytes / (2 if "compute_dtype" in options else 1)
    assert most["activations"] >= 512 * 256 * 2  # what ReLU gets and gives, which the backward pass reads
    assert most["backward"] >= 512 * 256 * 2
    table = str(found).partition("most in use in a step")[2]
    assert all(kind in table for kind, size in most.items() if size)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="events are CUDA's")
def test_cuda_times_operations_by_events() -> None:
    mx.random.seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    step = Step(model, optim.AdamW(1e-3), lambda model, x: mx.square(model(x)).mean(), max_grad_norm=1.0)
    x = mx.random.normal((4096, 2048))
    step(x)
    with profile(step) as found:
        pass
    found.measure(x)
    assert all(each.by_events for each in found.operations)
    assert "timed by the device\n" in str(found)
    products = [each.seconds for each in found.operations if each.name in ("Matmul", "TurnedProduct", "AddMM")]
    assert len(products) == 11
    rates = [2 * 4096 * 2048 * 2048 / seconds / 1e12 for seconds in products]
    assert 5 < min(rates) <= max(rates) < 2000, rates  # TFLOP/s: neither the host's time nor none
    views = [each.seconds for each in found.operations if each.name in ("Transpose", "Reshape", "Broadcast")]
    assert sum(views) < 0.1 * sum(each.seconds for each in found.operations)


def test_a_trace_file_has_every_stage_and_writes_over_nothing(tmp_path: Path) -> None:
    step, x = program()
    found = recorded(step, x, 3)
    found.measure(x)
    file = tmp_path / "trace.json"
    found.save(file)
    events = json.loads(file.read_text())["traceEvents"]
    durations = [event for event in events if event["ph"] == "X"]
    assert len(durations) == len(found.spans) + len(found.operations)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"MLX memory", "memory of a step"}
    counted = [event["args"] for event in events if event["name"] == "memory of a step"]
    assert len(counted) == len(found.operations)
    assert {"parameters", "state", "batch", "activations", "backward", "gradients"} <= set(counted[0])
    with pytest.raises(FileExistsError):
        found.save(file)


def test_a_step_that_was_never_called_can_be_measured() -> None:
    step, x = program()
    before = tree_map(mx.array, step.model.parameters())
    with profile(step) as found:
        pass
    found.measure(x)
    assert found.operations
    assert found.steps == 0
    assert step.stats.steps == 0
    for (name, now), (_, then) in zip(tree_flatten(step.model.parameters()), tree_flatten(before), strict=True):
        assert mx.array_equal(now, then), name


class Block(nn.Module):
    """A module with a residual sum of its own around two inner ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(32), nn.Linear(32, 32)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.softmax(x + self.inner(self.norm(mx.cumsum(x, axis=0))), axis=-1)


def test_operations_know_their_modules() -> None:
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(160, 32), Block())  # large enough for an update in place
    step = Step(model, optim.Adam(1e-3), lambda model, x: mx.square(model(x)).mean(), max_grad_norm=1.0)
    x = mx.random.normal((8, 160))
    with profile(step) as found:
        step(x)
    found.measure(x)
    modules = [(each.name, each.module) for each in found.operations]
    assert ("CumSum", "layers.1") in modules  # before inner modules are called
    assert "layers.1.norm" in {module for _, module in modules}
    assert ("Softmax", "layers.1") in modules
    products = [module for name, module in modules if is_product(name)]
    assert products[:2] == ["layers.0", "layers.1.inner"]  # forward
    assert "layers.1.inner" in products[2:]  # the gradient of its input reads its weight
    assert "" not in products
    assert {module for name, module in modules if name == "Fused"} == {"(update)"}
    assert step.stats.traced == 1
