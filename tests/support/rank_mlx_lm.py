"""mlx-lm's trainer and ours in each rank of a ring, on the same batches: `python rank_mlx_lm.py FOLDER`."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from faststep.mlx_lm import train
from mlx.utils import tree_flatten
from mlx_lm.tuner import trainer as theirs
from mlx_lm.tuner.utils import linear_to_lora_layers

from support.language_models import new_model

UNEVEN = (5, 30, 9, 60, 12, 44, 7, 25)


def folder() -> Path:
    """Return where the adapters go."""
    return Path(sys.argv[1])


class Losses(theirs.TrainingCallback):
    """The losses that are reported."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_loss_report(self, train_info: dict[str, float]) -> None:
        self.all.append(train_info["train_loss"])


def data(lengths: tuple[int, ...]) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(1, 256, length).tolist(), 0) for length in lengths]


def begun() -> nn.Module:
    model = new_model("llama")
    model.freeze()
    mx.random.seed(1)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
    return model


def run(way: Any, name: str, lengths: tuple[int, ...]) -> tuple[nn.Module, list[float]]:
    model, reports = begun(), Losses()
    file = folder() / name / "adapters.safetensors"
    file.parent.mkdir(exist_ok=True)
    args = theirs.TrainingArgs(
        batch_size=2, iters=8, steps_per_report=1, steps_per_save=9, max_seq_length=64, adapter_file=str(file)
    )
    np.random.seed(5)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        way(model, optim.SGD(0.02), data(lengths), None, args=args, training_callback=reports)
    assert mx.distributed.init().rank() == 0 or "Train loss" not in said.getvalue()
    return model, reports.all


def joined() -> nn.Module:
    """Train by plain MLX on the batches of both ranks."""
    model = begun()
    optimizer, step = optim.SGD(0.02), nn.value_and_grad(model, theirs.default_loss)
    np.random.seed(5)
    for batch, _ in zip(theirs.iterate_batches(data(UNEVEN), 2, 64, loop=True), range(8), strict=False):
        _, gradients = step(model, *batch)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
    return model


def apart(model: nn.Module, other: nn.Module) -> float:
    """Return how far the weights of two models are apart, as a share of how far they have come from the start."""
    trees: Any = [dict(tree_flatten(each.trainable_parameters())) for each in (model, other, begun())]
    got, wanted, start = trees
    gaps = [
        (mx.square(got[name] - wanted[name]).sum().item(), mx.square(wanted[name] - start[name]).sum().item())
        for name in wanted
    ]
    return math.sqrt(sum(gap for gap, _ in gaps) / sum(way for _, way in gaps))


def main() -> None:
    mx.distributed.init(strict=True)
    even = (30,) * 8
    (wanted, losses), (ours, our_losses) = run(theirs.train, "theirs", even), run(train, "ours", even)
    np.testing.assert_allclose(our_losses, losses, rtol=1e-4)
    assert apart(ours, wanted) < 1e-4
    files = sorted(each.name for each in (folder() / "ours").iterdir())
    assert files == ["adapters.safetensors"]
    whole = joined()
    ways = {
        name: apart(run(way, name, UNEVEN)[0], whole) for name, way in {"theirs": theirs.train, "ours": train}.items()
    }
    assert ways["ours"] < 1e-4, ways
    assert ways["theirs"] > 0.05, ways  # a rank of few tokens counts as much as one of many
    print(f"apart from one process: {ways}")


if __name__ == "__main__":
    main()
