"""The weighted loss from Python: the losses of the Rust example, from the same initial weights and batches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep import Step, recipes
from mlx.optimizers import AdamW
from support.places import RustExample
from support.weighted_lm import SIZES, TRAINING, batch_of, model_of, optimizer, read_log, run, sources, write

STEPS = 40
TEXTS = {
    "docs/guide.md": "The step takes gradients, clips them, updates the model and evaluates what has changed. " * 4,
    "step.py": "def step(model, optimizer, loss_fn, batch):\n    return fast_step(model, optimizer, loss_fn, batch)\n"
    * 4,
    "tests/test_step.py": "def test_step():\n    assert step(1) == 1\n" * 4,
}

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo on this machine")


def test_python_takes_the_steps_that_rust_takes(rust_example: RustExample, tmp_path: Path) -> None:
    text = write(tmp_path / "text", TEXTS)
    command = [*SIZES, *TRAINING, "--steps", str(STEPS), "--text", text, "--log", tmp_path / "log"]
    command += ["--checkpoints", tmp_path / "run", "--save-every", "1", "--keep", str(STEPS)]
    run(rust_example("weighted_lm"), *command)
    log = read_log(tmp_path / "log")

    # the rate of the first step is 0: its checkpoint has the initial weights
    weights: Any = mx.load(str(tmp_path / "run/step-000001/model.safetensors"))
    step = Step(model_of(weights), optimizer(STEPS), recipes.weighted_lm(), max_grad_norm=1.0)
    texts = sources(text)
    assert sorted(float(authority) for _, authority, _ in texts) == [0.25, 0.5, 1.0]
    outs = [step(**batch_of(texts, number)) for number in range(STEPS)]
    assert [float(out.loss) for out in outs] == pytest.approx([each["loss"] for each in log], rel=1e-4)
    norms = [float(out.grad_norm) for out in outs if out.grad_norm is not None]
    assert norms == pytest.approx([each["grad_norm"] for each in log], rel=1e-3)
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]


def test_the_loss_is_the_weighted_mean() -> None:
    model = recipes.GPT(1, 16, 2, context=16)
    ids = mx.random.randint(0, 256, (3, 16))
    authorities, entropies = mx.array([1.0, 0.5, 0.25]), mx.array([4.0, 4.5, 0.0])
    each = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean(axis=1)
    weights = authorities / mx.power(2, entropies)
    loss, total = recipes.weighted_lm(weighted=True)(model, ids, authorities, entropies)
    assert loss.item() == pytest.approx(((weights * each).sum() / weights.sum()).item(), rel=1e-6)
    assert total.item() == pytest.approx(weights.sum().item(), rel=1e-6)
    chunked = recipes.weighted_lm(in_chunks=True)(model, ids, authorities, entropies)
    assert chunked.item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("bad", [[1.0, 0.0, 1.0], [1.0, float("nan"), 1.0], [-1.0, 1.0, 1.0]], ids=str)
def test_weights_out_of_range_make_a_bad_batch(bad: list[float]) -> None:
    model = recipes.GPT(1, 16, 2, context=16)
    loss_fn = recipes.weighted_lm()
    batch = {"input_ids": mx.zeros((3, 16), mx.int32), "auth_weights": mx.array(bad), "prov_entropies": mx.ones(3)}
    step = Step(model, AdamW(1e-3), loss_fn, max_grad_norm=1.0)
    out = step(**batch)
    assert bool(out.skipped)
    assert out.loss.item() == -np.inf
    assert "auth_weights above 0" in loss_fn.explain(-np.inf, **batch)
