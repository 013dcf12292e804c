"""Small steps on a CPU, computed by the thread that calls in place of MLX's worker."""

from __future__ import annotations

import resource
import sys
import threading
import time

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep import Step
from support.helpers import Row, assert_close, compiled_step, flat, snapshot
from support.models import cross_entropy
from support.places import Child

pytestmark = pytest.mark.skipif(
    mx.default_device().type == mx.gpu or not sys.platform.startswith("linux"), reason="for CPUs on Linux"
)

# Train with all that a user may do on the CPU between steps; print the bits of what comes out.
BITS = """
import faststep, mlx.core as mx, numpy as np
from support.helpers import Row, snapshot

for compile in (True, False):
    row = Row("mlp", "adamw")
    pair = row.new()
    step = faststep.Step(*pair, row.case.loss_fn, max_grad_norm=0.5, compile=compile)
    other = mx.new_stream(mx.cpu)
    for number, (x, y) in enumerate(row.case.batches(40)):
        if number % 5 == 1:
            mx.async_eval(mx.ones((256, 256)) @ mx.ones((256, 256)))
        if number % 5 == 2:
            mx.synchronize()
        if number % 5 == 3:
            x = mx.add(x, 1, stream=other) - 1
        step(x, y)
    for name, value in snapshot(*pair).items():
        print(name, np.asarray(value).tobytes().hex())
"""


def test_every_bit_is_that_of_the_worker(child: Child) -> None:
    ours, theirs = (child(BITS, FASTSTEP_CALLER=caller).stdout for caller in ("1", "0"))
    assert len(ours) > 10_000
    assert ours == theirs


def busy_elsewhere(step: Step, batches: list[tuple[mx.array, ...]]) -> float:
    """Return which share of the processor time of steps is that of other threads."""
    for batch in batches:
        step(*batch)
    process, thread = time.process_time(), time.thread_time()
    for batch in batches * 10:
        step(*batch)
    step.synchronize()
    process, thread = time.process_time() - process, time.thread_time() - thread
    return 1 - thread / process


def test_the_worker_does_nothing() -> None:
    before = mx.zeros(64 << 20)  # more than a step takes; it has been in use before, and is not the step's
    mx.eval(before)
    del before
    mx.clear_cache()
    peak = mx.get_peak_memory()
    row = Row("mlp", "adamw")

    def share() -> float:  # of a new step: one that was slow when it was measured is left to the worker
        step = Step(*row.new(), row.case.loss_fn, max_grad_norm=1.0)
        return busy_elsewhere(step, row.case.batches(20))

    assert any(share() < 0.15 for _ in range(40))
    assert mx.get_peak_memory() == peak


def test_the_worker_does_nothing_where_another_part_is_frozen_before_each_step() -> None:
    row = Row("mlp", "adamw")
    batches = row.case.batches(20)

    def switches() -> int:  # of threads, in steps of a new engine each
        model, optimizer = row.new()
        step = Step(model, optimizer, row.case.loss_fn)
        frozen, before = model.leaf_modules()["layers"][0], 0
        for number in range(120):
            if number == 80:
                step.synchronize()
                before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
            (frozen.freeze if number % 2 else frozen.unfreeze)()
            step(*batches[number % 20])
        step.synchronize()
        assert (step.stats.mode, len(step.stats.traces)) == ("native", 2)
        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

    assert any(switches() < 40 for _ in range(10))


def test_a_large_step_is_left_to_the_worker() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    row = Row("mlp", "adamw")
    step = Step(
        model, row.new()[1], lambda m, x: m(x).square().mean(), replay=False
    )  # whoever calls a capture computes it
    assert busy_elsewhere(step, [(mx.random.normal((256, 256)),)] * 5) > 0.2


def doubtful(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Compute a loss that fails while it is computed where x is zero."""
    inverse = mx.linalg.inv(x.mean() * mx.eye(4), stream=mx.cpu)
    return cross_entropy(model, x, y) + 1e-9 * mx.stop_gradient(inverse).sum()


def test_a_failure_is_raised_as_it_is_with_the_worker() -> None:
    row = Row("mlp", "sgd")
    pair = row.new()
    step = Step(*pair, doubtful)
    x, y = row.case.batches(1)[0]
    x = mx.abs(x)
    weights = [(name, mx.array(value)) for name, value in flat(pair[0].parameters()).items()]

    def go_on() -> None:
        for batch in (0 * x, x, x, x):
            step(batch, y)
        step.synchronize()

    for _ in range(3):
        for _ in range(12):
            step(x, y)
        with pytest.raises(RuntimeError, match=r"(?s)a step failed on the device.*Inverse"):
            go_on()
        pair[0].load_weights(weights)
        assert np.isfinite(float(step(x, y).loss))


def test_threads_take_steps_of_their_own_at_once() -> None:
    row = Row("mlp", "adamw")
    batches = [tuple(np.array(array) for array in batch) for batch in row.case.batches(60)]
    reference = row.new()
    compiled = compiled_step(*reference, row.case.loss_fn)
    for batch in batches:
        compiled(*map(mx.array, batch))
    ends: list[dict[str, np.ndarray]] = []

    def train() -> None:
        pair = row.new()
        step = Step(*pair, row.case.loss_fn)
        for batch in batches:
            step(*map(mx.array, batch))
        ends.append(snapshot(*pair))

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == len(threads)
    for end in ends:
        assert_close(end, snapshot(*reference), 0)
