"""A run that is stopped, saved and restored is the run that was not, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from faststep import Step
from faststep.checkpoints import Checkpoints
from support.checkpointing import OF_OPTIMIZERS, STEPS, everything, step_of, train

BATCHES, STOPS = 7, [0, 1, 4]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", STEPS)
def test_a_restored_run_goes_on_as_if_it_had_not_stopped(name: str, stop: int, tmp_path: Path) -> None:
    compare(STEPS[name], stop, tmp_path)


@pytest.mark.parametrize("optimizer", OF_OPTIMIZERS)
def test_every_optimizer_goes_on(optimizer: str, tmp_path: Path) -> None:
    compare(OF_OPTIMIZERS[optimizer], 4, tmp_path)


def compare(make: Callable[[], Step], stop: int, folder: Path) -> None:
    """Train without a stop, with a save, and from the save on."""
    uninterrupted = make()
    losses = train(uninterrupted, range(BATCHES))
    wanted = everything(uninterrupted)

    first = make()
    taken = train(first, range(stop))
    before = everything(first)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(first, number=stop)
        taken += train(first, range(stop, BATCHES))
    assert taken == losses, "saving changed the run"
    assert everything(first) == wanted

    second = make()
    mx.random.normal((3,))
    random.random()
    np.random.standard_normal()
    found = Checkpoints(folder).restore(second)
    assert found is not None
    assert found.number == stop
    assert everything(second) == before
    assert train(second, range(stop, BATCHES)) == losses[3 * stop :]
    assert everything(second) == wanted


@pytest.mark.parametrize("name", ["masters", "several", "frozen", "quantized", "average"])
def test_a_step_in_use_is_restored(name: str, tmp_path: Path) -> None:
    step = STEPS[name]()
    train(step, range(4))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, number=4)
        before = everything(step)
        losses = train(step, range(4, 8))
        after = everything(step)
        checkpoints.restore(step)
    assert everything(step) == before
    assert train(step, range(4, 8)) == losses
    assert everything(step) == after


def test_steps_before_and_after_the_save_do_not_change_what_is_written(tmp_path: Path) -> None:
    step = step_of(ema_decay=0.9, accumulate=2)
    checkpoints = Checkpoints(tmp_path, keep_last=None)
    wanted = {}
    for number in range(8):
        train(step, range(number, number + 1))
        wanted[number] = everything(step)
        checkpoints.save(step, number=number)
        step.model.shift += 1  # in place: the object that the model holds gets another value
        train(step, range(50, 53))
        step.model.layers[0].bias[2:4] = 7.0
    checkpoints.wait()
    for number in reversed(range(8)):
        fresh = step_of(ema_decay=0.9, accumulate=2)
        assert checkpoints.restore(fresh).number == number
        assert everything(fresh) == wanted[number]
        for file in (tmp_path / f"step-{number:08d}").iterdir():
            file.unlink()
        (tmp_path / f"step-{number:08d}").rmdir()


MOVING = {name: OF_OPTIMIZERS[name] for name in ("adamw", "muon", "sgd-momentum", "user-adam")} | {
    name: STEPS[name] for name in ("average", "masters", "several", "quantized")
}


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("name", MOVING)
def test_what_was_frozen_on_the_way_goes_on(name: str, used: bool, tmp_path: Path) -> None:
    first, second = MOVING[name](), MOVING[name]()
    train(first, range(2))
    first.model.layers[0].freeze()
    train(first, range(2, 4))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first, number=4)
        before = everything(first)
        first.model.layers[0].unfreeze()
        losses, after = train(first, range(4, 7)), everything(first)
        if used:
            train(second, range(5, 7))  # the optimizer has a state for everything that is trainable
        second.model.layers[0].freeze()
        checkpoints.restore(second)
    assert everything(second) == before
    second.model.layers[0].unfreeze()
    assert train(second, range(4, 7)) == losses
    assert everything(second) == after


def test_what_was_frozen_from_the_start_needs_no_state(tmp_path: Path) -> None:
    first, second = STEPS["average"](), STEPS["average"]()
    first.model.layers[0].freeze()
    train(first, range(4))
    train(second, range(2))
    second.model.layers[0].freeze()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first, number=4)
        before = everything(first)
        losses = train(first, range(4, 7))
        checkpoints.restore(second)
    assert everything(second) == before
    assert train(second, range(4, 7)) == losses
