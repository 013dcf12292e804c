"""`faststep.mlx_lm.train` beside mlx-lm's own: equal where its step is right, and how far it is off where it is not."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

from faststep.mlx_lm import train
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner import trainer as theirs
from mlx_lm.tuner.utils import linear_to_lora_layers
from support.language_models import new_model

LENGTHS = (5, 30, 9, 60, 12, 44, 7, 25)


class Reports(theirs.TrainingCallback):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.train: list[dict[str, float]] = []
        self.val: list[dict[str, float]] = []

    def on_train_loss_report(self, train_info: dict[str, float]) -> None:
        self.train.append(train_info)

    def on_val_loss_report(self, val_info: dict[str, float]) -> None:
        self.val.append(val_info)


def data(seed: int = 0) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(1, 256, length).tolist(), 0) for length in LENGTHS]


def run(
    way: Any, folder: Path, *, lora: bool = True, validation: bool = False, **options: Any
) -> tuple[nn.Module, Reports]:
    model, reports = new_model("llama"), Reports()
    if lora:
        model.freeze()
        mx.random.seed(1)
        linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {"batch_size": 2, "iters": 8, "steps_per_report": 1, "steps_per_save": 4, "max_seq_length": 64}
    args = theirs.TrainingArgs(**{**defaults, "adapter_file": str(folder / "adapters.safetensors"), **options})
    np.random.seed(5)
    way(model, optim.Adam(1e-2), data(), data(1) if validation else None, args=args, training_callback=reports)
    return model, reports


def losses(reports: Reports) -> list[float]:
    return [each["train_loss"] for each in reports.train]


@pytest.mark.parametrize("options", [{}, {"lora": False}, {"grad_checkpoint": True}, {"validation": True}])
def test_losses_and_files_are_those_of_mlx_lm(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = new_model("llama").layers[0].__class__.__call__
    try:
        expected, theirs_ = run(theirs.train, tmp_path / "theirs", **options)
    finally:
        type(new_model("llama").layers[0]).__call__ = saved  # which grad_checkpoint replaces for good
    _, ours = run(train, tmp_path / "ours", **options)
    assert losses(ours) == pytest.approx(losses(theirs_), rel=1e-4)
    assert [each["val_loss"] for each in ours.val] == pytest.approx(
        [each["val_loss"] for each in theirs_.val], rel=1e-4
    )
    assert [each["trained_tokens"] for each in ours.train] == [each["trained_tokens"] for each in theirs_.train]
    assert ours.train[0].keys() == theirs_.train[0].keys()
    written = [sorted(each.name for each in (tmp_path / name).iterdir()) for name in ("theirs", "ours")]
    assert written[0] == written[1]
    assert len(written[0]) == 3
    weights = dict(tree_flatten(expected.trainable_parameters()))
    for name, array in dict(mx.load(str(tmp_path / "ours" / "adapters.safetensors"))).items():
        assert mx.allclose(array, weights[name], rtol=1e-2, atol=1e-4), name


def by_hand(accumulate: int, iters: int) -> nn.Module:
    """Train by plain MLX: every window by the gradients of the sum of all its tokens' losses, over their number."""
    model = new_model("llama")
    model.freeze()
    mx.random.seed(1)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
    optimizer = optim.Adam(1e-2)
    np.random.seed(5)
    batches = [batch for batch, _ in zip(theirs.iterate_batches(data(), 2, 64, loop=True), range(iters), strict=False)]
    step = nn.value_and_grad(model, theirs.default_loss)
    for start in range(0, iters, accumulate):
        taken = [step(model, *batch) for batch in batches[start : start + accumulate]]
        tokens = sum(count.item() for (_, count), _ in taken)
        scaled = [tree_map(functools.partial(mx.multiply, count / tokens), grads) for (_, count), grads in taken]
        optimizer.update(model, functools.reduce(lambda x, y: tree_map(mx.add, x, y), scaled))
        mx.eval(model.parameters(), optimizer.state)
    return model


def distance(model: nn.Module, other: nn.Module) -> float:
    """Return how far the weights of two models are apart, as a share of how far they have come from the start."""
    wanted = dict(tree_flatten(other.trainable_parameters()))
    start = dict(tree_flatten(by_hand(1, 0).trainable_parameters()))
    pairs = [
        (array - wanted[name], wanted[name] - start[name]) for name, array in tree_flatten(model.trainable_parameters())
    ]
    apart, way = (math.sqrt(sum(each[i].square().sum().item() for each in pairs)) for i in (0, 1))
    return apart / way


@pytest.mark.parametrize(("accumulate", "iters"), [(4, 8), (3, 8)])
def test_windows_are_averaged_by_tokens_and_the_last_one_counts(tmp_path: Path, accumulate: int, iters: int) -> None:
    options = {"grad_accumulation_steps": accumulate, "iters": iters}
    wanted = by_hand(accumulate, iters)
    ours, theirs_ = (run(way, tmp_path, **options)[0] for way in (train, theirs.train))
    assert distance(ours, wanted) < 1e-3
    assert distance(theirs_, wanted) > 0.05  # batches of few tokens count as much as those of many


def test_what_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="grad_accumulation_steps: expected 1 or more, got 0"):
        run(train, tmp_path, grad_accumulation_steps=0)
