"""Searches before a training: a learning rate, on a loss whose best rate is known; a batch size, by plans."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.data import Loader
from faststep.training import find_rate
from support.commands import faststep
from support.configs import MLP, config


def new_step(optimizer: optim.Optimizer, **options: object) -> Step:
    mx.random.seed(0)
    return Step(nn.Linear(8, 1), optimizer, lambda model, x, y: nn.losses.mse_loss(model(x), y), **options)


def loader() -> Loader:
    x = np.random.default_rng(0).standard_normal((64, 8), dtype=np.float32)
    return Loader((x, x.sum(axis=1, keepdims=True)), batch_size=16, shuffle=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_rate_is_where_the_loss_falls(accumulate: int) -> None:
    """Gradient descent on a quadratic of curvature 2/8 to 4 diverges from a rate of about 1 on."""
    found = find_rate(new_step(optim.SGD(1.0), accumulate=accumulate), loader(), low=1e-4, high=100.0, steps=60)
    assert found.diverged
    assert found.best is not None
    assert 0.1 < found.best < 10
    assert found.suggestion == found.best / 10
    assert len(found.rates) == len(found.losses) < 60
    assert found.rates[0] == 1e-4
    nothing = find_rate(new_step(optim.SGD(1.0)), loader(), low=1e-12, high=1e-11, steps=4)
    assert (nothing.diverged, len(nothing.rates)) == (False, 4)
    steady = find_rate(new_step(optim.SGD(1.0)), [(mx.ones((4, 8)), mx.ones((4, 1)))], low=1e-30, high=1e-29, steps=4)
    assert (steady.best, steady.suggestion) == (None, None)


def test_rates_of_several_optimizers_keep_their_ratio() -> None:
    several = optim.MultiOptimizer([optim.SGD(1e-2), optim.SGD(1e-3)], [lambda name, _: name == "weight"])
    find_rate(new_step(several), loader(), low=1e-4, high=1e-2, steps=3)
    first, second = (each.learning_rate.item() for each in several.optimizers)
    assert (first, second) == pytest.approx((1e-2, 1e-3))


def test_what_cannot_be_searched() -> None:
    step = new_step(optim.SGD(optim.cosine_decay(1e-2, 10)))
    with pytest.raises(ValueError, match="expected constant learning rates above 0, got a schedule"):
        find_rate(step, loader())
    with pytest.raises(ValueError, match=r"expected 0 < low < high and 3 steps or more, got 1.0, 1.0 and 100"):
        find_rate(new_step(optim.SGD(1.0)), loader(), low=1.0)


def test_the_command(tmp_path: Path) -> None:
    """A schedule of the config's is set aside, and nothing is written."""
    text = MLP.replace("rate: 1e-2", "rate: {use: cosine_decay, init: 1e-2, decay_steps: 10}")
    config(tmp_path, text.replace("cross_entropy", "mse").replace("label", "y"))
    done = faststep("find-rate", tmp_path / "c.yaml", "--low", 1e-4, "--high", 10, "--steps", 40)
    assert "suggested: " in done.stdout
    assert done.stdout.splitlines()[1].split()[0] == "1.00e-04"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c.yaml", "rows.npz"]
    done = faststep("find-rate", tmp_path / "c.yaml", "--low", 1e-12, "--high", 1e-11, "--steps", 5, status=2)
    assert "no rate at which the loss falls" in done.stderr


def test_the_largest_batch_that_fits(tmp_path: Path) -> None:
    """Plans grow with the batch; the first one that is over the limit ends the search, or the last sample does."""
    config(tmp_path, MLP)
    plans = faststep("find-batch", tmp_path / "c.yaml").stdout.splitlines()
    assert [line.split(":")[0].split()[-1] for line in plans[:-2]] == ["1", "2", "4", "8", "16", "32", "64"]
    assert plans[-2] == "there are 40 samples"
    assert plans[-1].startswith("suggested: data.batch_size: 40; step.accumulate")
    done = faststep("find-batch", tmp_path / "c.yaml", "--memory", 1e-6, status=2)
    assert "a batch of one sample does not fit" in done.stderr
