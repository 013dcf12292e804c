"""`check`: the native step beside plain MLX, on models of all kinds, with everything put back."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import faststep
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep.data import Loader
from mlx.utils import tree_flatten
from support.commands import faststep as command
from support.commands import set_, write_config
from support.helpers import OPTIMIZERS


class Net(nn.Module):
    """Dropout, buffers, and a bias whose gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 32), nn.BatchNorm(32), nn.Dropout(0.1)
        self.layers = [nn.Linear(32, 32), nn.Linear(32, 4)]

    def __call__(self, x: mx.array) -> mx.array:
        x = self.drop(nn.relu(self.norm(self.first(x))))
        return self.layers[1](nn.relu(self.layers[0](x)))


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


def weighted(model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
    return loss_fn(model, x, y), mx.array(x.shape[0])


def batches(count: int = 4) -> list[tuple[mx.array, mx.array]]:
    made = [(mx.random.normal((16, 8)), mx.random.randint(0, 4, (16,))) for _ in range(count)]
    mx.eval(made)
    return made


@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "adamw-joined", "lion", "muon", "adafactor", "multi", "user"])
def test_optimizers_agree(name: str) -> None:
    found = faststep.check(Net(), OPTIMIZERS[name](), loss_fn, batches(), steps=6, seconds=0, max_grad_norm=1.0)
    assert found.same, str(found)
    assert {each.kind for each in found.differences} == {"loss", "gradient", "parameter", "optimizer"}


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3, "weighted": True},
        {"max_grad_value": 1e-3},
        {"compute_dtype": mx.bfloat16},
        {"compute_dtype": mx.float16, "max_grad_norm": 0.5},
        {"compile": False},
        {"nonfinite": "allow"},
    ],
    ids=str,
)
def test_options_agree(options: dict[str, Any]) -> None:
    loss = weighted if options.get("weighted") else loss_fn
    found = faststep.check(Net(), optim.AdamW(1e-2), loss, batches(), steps=6, seconds=0, **options)
    assert found.same, str(found)


def test_a_norm_over_many_parameters_is_rounding() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 4096), nn.Linear(4096, 4)

        def __call__(self, x: mx.array) -> mx.array:
            return self.second(nn.relu(self.first(x)))

    found = faststep.check(Wide(), optim.Adam(1e-3), loss_fn, batches(), steps=2, seconds=0, max_grad_norm=1e-2)
    assert found.same, str(found)


def test_a_bad_batch_is_left_out_by_both() -> None:
    taken = batches()
    taken[1] = (mx.full((16, 8), float("nan")), taken[1][1])
    found = faststep.check(Net(), optim.Adam(1e-3), loss_fn, taken, steps=4, seconds=0)
    assert found.same, str(found)
    assert found.notes == ("1 of 4 losses are not finite, in plain MLX too",)


def test_everything_is_put_back() -> None:
    model, optimizer = Net(), optim.Adam(optim.linear_schedule(0.0, 1e-3, 10))
    loader = Loader((np.ones((64, 8), np.float32), np.zeros(64, np.int32)), batch_size=8, shuffle=True, seed=1)
    next(iter(loader))
    model.layers[0].freeze()
    before = dict(tree_flatten(model.parameters()))
    trainable = [path for path, _ in tree_flatten(model.trainable_parameters())]
    holders = [model.layers, optimizer.state]
    draws = mx.random.state[0].tolist(), random.getstate(), np.random.get_state()[1].tolist()
    found = faststep.check(model, optimizer, loss_fn, loader, steps=5, seconds=0.2)
    assert found.native is not None
    assert found.plain is not None
    assert min(found.native.peak_bytes, found.plain.peak_bytes) > 0
    after = dict(tree_flatten(model.parameters()))
    assert all(after[path] is before[path] for path in before)
    assert [path for path, _ in tree_flatten(model.trainable_parameters())] == trainable
    assert model.layers is holders[0]
    assert optimizer.state is holders[1]
    assert sorted(optimizer.state) == ["learning_rate", "step"]
    assert optimizer.state["step"].item() == 0
    assert draws == (mx.random.state[0].tolist(), random.getstate(), np.random.get_state()[1].tolist())
    assert (loader.epoch, loader.position) == (0, 1)


def test_a_training_goes_on_as_if_nothing_had_been_checked() -> None:
    ends = []
    for checks in (False, True):
        mx.random.seed(3)
        model, optimizer, taken = Net(), optim.Adam(1e-2), batches()
        for number, (x, y) in enumerate(taken):
            if checks and number == 2:
                faststep.check(model, optimizer, loss_fn, taken, steps=3, seconds=0)
            faststep.fast_step(model, optimizer, loss_fn, x, y)
        ends.append(dict(tree_flatten([model.parameters(), optimizer.state])))
    assert all(mx.array_equal(ends[0][path], ends[1][path]) for path in ends[0])


def test_numbers_that_differ_are_found() -> None:
    def loss(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        by_step = sys._getframe(1).f_globals["__name__"].startswith("faststep")
        return loss_fn(model, x, y) * (2.0 if by_step else 1.0)

    found = faststep.check(Net(), optim.SGD(0.1), loss, batches(), steps=4, seconds=0)
    assert not found.same
    assert "the numbers differ" in found.verdict


def test_the_modules_have_their_shapes() -> None:
    model = Net()
    model.layers[0].freeze()
    found = faststep.check(model, optim.SGD(0.1), loss_fn, batches(), steps=2, seconds=0)
    modules = {each.path: each for each in found.modules}
    assert [each.path for each in found.modules][:2] == ["first", "norm"]
    assert (modules["layers.0"].output, modules["layers.0"].parameters, modules["layers.0"].frozen) == (
        (16, 32),
        1056,
        1056,
    )
    assert (modules["layers.1"].kind, modules["layers.1"].frozen) == ("Linear", 0)
    assert str(found).startswith("module ")
    assert "[16, 32]" in str(found)


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least one batch"):
        faststep.check(Net(), optim.SGD(0.1), loss_fn, [])


def test_the_command_on_a_config(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    said = command("check", config, "--seconds", "0.3", cwd=tmp_path).stdout
    assert "the same numbers" in said
    assert "of plain MLX's time" in said
    values = json.loads(
        command("check", config, "--seconds", "0", "--json", "--steps", "4", *set_(step__accumulate=2)).stdout
    )
    assert (values["same"], values["steps"], values["mode"]) == (True, 4, "native")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "data.npz", "mine.py"]
    assert "unknown key" in command("check", config, "--set", "optimizer.learning_rat=1", status=2).stderr
