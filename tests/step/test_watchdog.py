"""A call that does not return is reported, and graphs that nobody evaluates are named."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step

HANGS = """
import sys, threading, time
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
from faststep import Step

lock = threading.Lock()

def loss_fn(model, batch):
    if batch["x"].shape[0] == 3:
        wait_for_ever()
    return model(batch["x"]).square().mean()

def wait_for_ever():
    lock.acquire()
    print("in the loss", flush=True)
    lock.acquire()

step = Step(nn.Linear(4, 2), optim.Adam(1e-3), loss_fn, hang_timeout=1.0)
step({"x": mx.ones((2, 4))})
time.sleep(2)  # between two calls nothing hangs
step({"x": mx.ones((3, 4))})
"""


def test_a_loss_that_waits_is_reported_with_its_line_and_its_batch(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "in the loss\n"
        said = []
        while not any("wait_for_ever" in line for line in said):
            said.append(process.stderr.readline())
            assert process.poll() is None, "".join(said)
        process.kill()
    before, _, text = "".join(said).rpartition("no progress for")
    assert "between" not in before  # on a busy machine the first call may take as long
    assert "calling the loss function" in text
    assert "batch: 0.x float32 [3, 4]" in text
    assert "traces: 1 so far" in text
    assert "available in the machine" in text


def small() -> tuple[nn.Module, optim.Optimizer]:
    return nn.Linear(4, 2), optim.Adam(1e-3)


def test_another_thread_sees_the_stages() -> None:
    seen = set()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        seen.add(stage())
        return model(x).square().mean()

    def stage() -> str:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(step.stage()[0]))
        thread.start()
        thread.join()
        return found[0]

    step = Step(*small(), loss_fn)
    assert stage() == "idle"
    step(mx.ones((2, 4)))
    assert seen == {"trace"}
    assert stage() == "idle"
    before = step.stage()[1]
    with pytest.raises(ValueError, match=r"matmul|addmm"):
        step(mx.ones((2, 5)))
    assert stage() == "idle"
    assert step.stage()[1] > before
    assert "graph: 0 operations" not in step.hang_report("evaluation", 1.0)


def test_the_watchdog_ends_with_its_step() -> None:
    def watchdogs() -> int:
        return sum(each.name == "faststep-watchdog" for each in threading.enumerate())

    before = watchdogs()
    step = Step(*small(), lambda model, x: model(x).square().mean(), hang_timeout=0.1)
    assert watchdogs() == before + 1
    del step
    gc.collect()
    while watchdogs() > before:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1.0, ValueError), ("10m", TypeError), (True, TypeError)]
)
def test_a_timeout_is_a_number_of_seconds(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="hang_timeout: expected a number"):
        Step(*small(), lambda model, x: model(x).square().mean(), hang_timeout=value)


def test_a_sum_of_losses_that_nobody_evaluates_is_told_once() -> None:
    step = Step(*small(), lambda model, x: model(x).square().mean())
    x, total = mx.ones((2, 4)), mx.array(0.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2500):
            total = total + step(x).loss
    assert [str(each.message)[:34] for each in told] == ["faststep: the losses of more than "]
    assert "total = total + loss" in str(told[0].message)
    mx.eval(total)


@pytest.mark.parametrize("kind", ["read", "evaluated", "list", "dropped"])
def test_losses_kept_otherwise_are_no_matter(kind: str) -> None:
    step = Step(*small(), lambda model, x: model(x).square().mean())
    x, total, kept = mx.ones((2, 4)), mx.array(0.0), list[Any]()
    for number in range(2500):
        loss = step(x).loss
        if kind == "read":
            kept.append(loss.item())
        elif kind == "list":
            kept.append(loss)
        elif kind == "evaluated":
            total = total + loss
            if number % 100 == 0:
                mx.eval(total)


def test_a_large_graph_behind_an_argument_or_a_parameter_is_told_once_by_name() -> None:
    def grown(array: mx.array, operations: int) -> mx.array:
        for _ in range(operations):
            array = mx.negative(array)
        return array

    model, optimizer = small()
    step = Step(model, optimizer, lambda model, batch: model(batch["x"]).square().mean())
    step({"x": grown(mx.ones((2, 4)), 50)})
    assert 50 <= step.stats.lazy < 60
    with pytest.warns(RuntimeWarning, match=r'argument batch\["x"\] waits for 1\d{4} operations'):
        step({"x": grown(mx.ones((2, 4)), 12_000)})
    step({"x": grown(mx.ones((2, 4)), 12_000)})  # told once
    assert 12_000 <= step.stats.lazy < 12_010

    step = Step(*(pair := small()), lambda model, x: model(x).square().mean())
    step(mx.ones((2, 4)))
    pair[0].weight = grown(pair[0].weight, 11_000)
    with pytest.warns(RuntimeWarning, match=r"model\.weight waits for 11\d{3} operations"):
        step(mx.ones((2, 4)))
