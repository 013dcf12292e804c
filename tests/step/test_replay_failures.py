"""Batches, losses and signals that interrupt a replayed step."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from faststep import Step
from support.cuda import IS_CUDA, NEEDS_CUDA
from support.helpers import Row, assert_close, flat, snapshot, spoilt
from support.models import cross_entropy
from support.replays import NEEDS_REPLAY, STEPS, is_captured, replayed, tolerance

pytestmark = [NEEDS_REPLAY, pytest.mark.timeout(600)]  # a first kernel of each kind costs seconds of CUDA's compiler

OTHER = mx.cpu if IS_CUDA else mx.new_stream(mx.cpu)


def test_ctrl_c_leaves_a_step_that_goes_on() -> None:
    row = Row("mlp", "adamw", 0.05)
    (x, y), *_ = row.case.batches(1)
    pair = row.new()
    step = Step(*pair, row.case.loss_fn, max_grad_norm=0.05, replay=True)
    for _ in range(STEPS):
        step(x, y)
    assert is_captured(step), replayed(step)
    running = threading.Event()

    def interrupt() -> None:
        running.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def train() -> None:
        while True:
            step(x, y)
            running.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        train()
    thread.join()
    for _ in range(3):
        step(x, y)
    taken = step.stats.steps
    reference = row.new()
    ordinary = Step(*reference, row.case.loss_fn, max_grad_norm=0.05)
    for _ in range(taken):
        ordinary(x, y)
    assert_close(snapshot(*pair), snapshot(*reference), tolerance(row.case.tolerance))
    assert is_captured(step), replayed(step)


def test_bad_batches_are_skipped_and_counted() -> None:
    row = Row("mlp", "adamw", 0.05)
    ends = []
    for replay in (False, True):
        pair = row.new()
        step = Step(*pair, row.case.loss_fn, max_grad_norm=0.05, replay=replay)
        batches = [spoilt(batch) if i in (1, 3, 7, 10) else batch for i, batch in enumerate(row.case.batches(14))]
        skipped = [bool(step(*batch).skipped) for batch in batches]
        assert [i for i, flag in enumerate(skipped) if flag] == [1, 3, 7, 10]
        assert step.stats.skipped == 4
        ends.append(snapshot(*pair))
    assert is_captured(step), replayed(step)
    assert_close(ends[1], ends[0], tolerance(row.case.tolerance))


def test_a_batch_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    row = Row("mlp", "adamw", 0.05)
    ends = []
    for replay in (False, True):
        pair = row.new()
        step = Step(*pair, row.case.loss_fn, max_grad_norm=0.05, replay=replay)
        for i, (x, y) in enumerate(row.case.batches(14)):
            if i in (6, 9):
                file = tmp_path / "batch.npy"
                np.save(file, np.array(x))
                lost = mx.load(str(file))
                file.write_bytes(file.read_bytes()[:130])
                with pytest.raises(RuntimeError):
                    float(step(lost, y).loss)
            step(x, y)
        ends.append(snapshot(*pair))
        assert not replay or is_captured(step), replayed(step)
    assert_close(ends[1], ends[0], tolerance(row.case.tolerance))


def test_a_batch_that_fails_on_its_way_is_raised_and_training_can_go_on() -> None:
    row = Row("mlp", "adamw", 0.05)
    model, optimizer = row.new()
    step = Step(model, optimizer, row.case.loss_fn, max_grad_norm=0.05, replay=True)
    (x, y), *_ = row.case.batches(1)
    for _ in range(STEPS):
        step(x, y)
    assert is_captured(step), replayed(step)
    weights = [(name, mx.array(np.array(value))) for name, value in flat(model.parameters()).items()]
    bad = mx.linalg.inv(mx.zeros((4, 4)), stream=mx.cpu).sum()

    def go_on() -> None:
        for batch in (x + bad, x, x, x):
            step(batch, y)
        step.synchronize()

    with pytest.raises(RuntimeError, match="Inverse"):
        go_on()
    assert len(snapshot(model, optimizer)) > len(weights)  # whoever reads what is left does not hang
    model.load_weights(weights)
    losses = [float(step(x, y).loss) for _ in range(6)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("loss", "options", "reason"),
    [
        (lambda m, x, y: cross_entropy(m, x, y), {"nonfinite": "raise"}, "raise"),
        (lambda m, x, y: cross_entropy(m, mx.add(x, 0.5, stream=OTHER), y), {}, "another stream"),
        pytest.param(lambda m, x, y: cross_entropy(m, mx.fft.irfft(mx.fft.rfft(x)), y), {}, "FFT", marks=NEEDS_CUDA),
    ],
    ids=["gradients", "stream", "fft"],
)
def test_what_cannot_be_replayed_goes_on_by_itself(
    loss: Callable[..., mx.array], options: dict[str, Any], reason: str
) -> None:
    row = Row("mlp", "adamw")
    pair = row.new()
    step = Step(*pair, loss, replay=True, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in row.case.batches(9):
            step(*batch)
    told = [str(each.message) for each in caught]
    assert [("this step is not replayed" in text, reason in text) for text in told] == [(True, True)], told
    assert [reason in text for text in replayed(step)] == [True], replayed(step)
