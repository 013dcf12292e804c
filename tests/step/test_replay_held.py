"""Arrays that are held, read or changed between replays of a step, beside plain evaluation. Needs an NVIDIA GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.cuda import NEEDS_CUDA, is_captured, replayed
from support.helpers import Row, assert_close, copy_tree, flat, snapshot, to_numpy

pytestmark = [NEEDS_CUDA, pytest.mark.timeout(600)]  # a first kernel of each kind costs seconds of CUDA's compiler


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
    assert_close(ends[1], ends[0], row.case.tolerance)
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

    both(act, optimizer="user")
    both(act, model="tied")


def test_other_streams_read_what_is_replaced() -> None:
    stream = mx.new_stream(mx.gpu)

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
