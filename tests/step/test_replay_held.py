"""Arrays that are held, read or changed between replays of a step, beside plain evaluation."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import Row, assert_close, copy_tree, flat, snapshot, to_numpy
from support.places import Child
from support.replays import NEEDS_CPU, NEEDS_REPLAY, STEPS, is_captured, replayed, tolerance

pytestmark = [NEEDS_REPLAY, pytest.mark.timeout(600)]  # a first kernel of each kind costs seconds of CUDA's compiler


def both(
    act: Callable[[int, nn.Module, optim.Optimizer, Step, list[Any]], None],
    model: str = "mlp",
    optimizer: str = "adamw",
    steps: int = 12,
) -> Step:
    """Train with and without replay, `act` before each step; compare what it has written down and the end."""
    row = Row(model, optimizer, 0.05)
    ends = []
    for replay in (False, True):
        pair = row.new()
        step = Step(*pair, row.case.loss_fn, max_grad_norm=0.05, replay=replay)
        mx.random.seed(11)
        kept: list[Any] = []
        for i, batch in enumerate(row.case.batches(steps)):
            act(i, *pair, step, kept)
            kept.append(step(*batch).loss)
        written = {f"kept {i}": to_numpy(array) for i, array in enumerate(kept)}
        ends.append(snapshot(*pair) | written)
    assert_close(ends[1], ends[0], tolerance(row.case.tolerance))
    assert is_captured(step), replayed(step)
    return step


def test_arrays_that_the_user_holds_keep_their_values() -> None:
    def act(i: int, model: nn.Module, optimizer: optim.Optimizer, step: Step, kept: list[Any]) -> None:
        parameters = list(flat(model.parameters()).values())
        kept.append(parameters[i % len(parameters)])  # held, and never asked for until the end
        kept.append(parameters[0].sum() * 2)  # computed from one, lazily
        if i % 3 == 0:
            kept.extend(flat(optimizer.state).values())

    both(act)


def test_a_host_may_read_any_array_at_any_time() -> None:
    def act(i: int, model: nn.Module, optimizer: optim.Optimizer, step: Step, kept: list[Any]) -> None:
        for array in [*flat(model.parameters()).values(), *flat(optimizer.state).values()][i::3]:
            kept.append(mx.array(np.array(array)))
        if i % 4 == 3:
            kept.append(mx.array(float(kept[-1].sum())))

    both(act)


def test_another_thread_reads_what_nobody_has_evaluated() -> None:
    def act(i: int, model: nn.Module, optimizer: optim.Optimizer, step: Step, kept: list[Any]) -> None:
        if i % 3 == 1:
            return
        held = [*flat(model.parameters()).values(), *flat(optimizer.state).values()][i % 2 :: 2]
        read: list[mx.array] = []

        def look() -> None:
            read.extend(mx.array(np.array(array)) for array in held)
            read.append(mx.array(float((held[0] * 2).sum())))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert len(read) == len(held) + 1
        kept.extend(read)

    both(act, optimizer="sgd-momentum")
    both(act, model="tied")


def test_other_streams_read_what_is_replaced() -> None:
    stream = mx.new_stream(mx.default_device())

    def act(i: int, model: nn.Module, optimizer: optim.Optimizer, step: Step, kept: list[Any]) -> None:
        with mx.stream(stream):
            sums = [array.sum() for array in flat(model.parameters()).values()]
        mx.async_eval(sums)
        kept.extend(sums)

    both(act)


def test_everything_may_be_evaluated_and_printed_at_each_step() -> None:
    def act(i: int, model: nn.Module, optimizer: optim.Optimizer, step: Step, kept: list[Any]) -> None:
        mx.eval(model.parameters(), optimizer.state)
        if i % 4 == 3:
            assert str(model.layers[0].weight) == repr(mx.array(np.array(model.layers[0].weight)))

    both(act)


def test_changes_between_calls_are_taken_over() -> None:
    def act(i: int, model: nn.Module, optimizer: optim.Optimizer, step: Step, kept: list[Any]) -> None:
        if i % 3 == 2:
            optimizer.learning_rate = optimizer.learning_rate * 0.5
        if i in (6, 9):
            model.update({"layers": [{"weight": model.layers[0].weight * 0.9}]})
        if i == 8:
            mx.random.seed(5)
        if i == 10:
            model.load_weights(list(flat(copy_tree(model.parameters())).items()))

    both(act)


class Vector(nn.Module):
    """Numbers that a step of 1 takes one from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.zeros(300_000)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the sum of the products."""
        return (self.weight * x).sum()


@NEEDS_CPU
def test_another_thread_reads_what_it_was_given_while_steps_are_taken() -> None:
    model = Vector()
    step = Step(model, optim.SGD(1.0), lambda model, x: model(x), replay=True)
    given: queue.SimpleQueue[tuple[int, mx.array] | None] = queue.SimpleQueue()
    wrong: list[int] = []

    def read() -> None:
        while (item := given.get()) is not None:
            number, weight = item
            if not (np.array(weight) == -number).all():
                wrong.append(number)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(1, 101):
        step(mx.ones(1))
        given.put((number, model.weight))
    given.put(None)
    thread.join()
    assert is_captured(step), replayed(step)
    assert wrong == []
    assert (np.array(model.weight) == -100).all()


@NEEDS_CPU
def test_other_threads_go_on_while_a_step_is_taken() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    step = Step(model, optim.SGD(1e-3), lambda model, x: model(x).square().mean(), replay=True)
    x = mx.random.normal((512, 512))
    for _ in range(STEPS):
        step(x)
    assert is_captured(step), replayed(step)
    counted, ended = [0], threading.Event()

    def count() -> None:
        while not ended.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    during = []
    for _ in range(10):
        before = counted[0]
        step(x)
        during.append(counted[0] - before)
    ended.set()
    thread.join()
    assert sum(during) > 1000  # with the lock held for a step of milliseconds there would be a few


FORKED = """
import os
import mlx.core as mx
import numpy as np
from faststep import Step
from support.helpers import Row, flat

row = Row("mlp", "adamw", 0.05)
model, optimizer = row.new()
step = Step(model, optimizer, row.case.loss_fn, replay=True)
for batch in row.case.batches(9):
    step(*batch)
assert step.stats.traces[0].replay.startswith("captured"), step.stats.traces[0].replay
ends, begins = os.pipe()
process = os.fork()
text = " ".join(str(float(np.array(value).sum())) for value in flat(model.parameters()).values())
if process == 0:
    os.write(begins, text.encode())
    os._exit(0)
os.waitpid(process, 0)
assert os.read(ends, 1 << 16).decode() == text
print("read")
"""


@NEEDS_CPU
def test_the_child_of_a_fork_reads_parameters(child: Child) -> None:
    assert child(FORKED).stdout.strip() == "read"
