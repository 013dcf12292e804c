"""The weighted loss from Python: the losses of the Rust example, from the same initial weights and batches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep import Step, recipes
from mlx.optimizers import AdamW, cosine_decay, join_schedules, linear_schedule
from support.places import RustExample

STEPS, WARM_UP, SEQ, BATCH, SEED, RATE = 40, 8, 32, 6, 5, 3e-3
TEXTS = {
    "docs/guide.md": "The step takes gradients, clips them, updates the model and evaluates what has changed. ",
    "step.py": "def step(model, optimizer, loss_fn, batch):\n    return fast_step(model, optimizer, loss_fn, batch)\n",
    "tests/test_step.py": "def test_step():\n    assert step(1) == 1\n",
}

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo on this machine")


def mix(bits: int) -> int:
    """Return the next word of SplitMix64."""
    bits = (bits + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def sources(folder: Path) -> list[tuple[np.ndarray, Any, Any]]:
    """Return bytes, authority and entropy of each text in the order of the names, by the recipe's own rule."""
    found = []
    for name in sorted(TEXTS, key=lambda name: (folder / name).parts):
        windows = recipes.Sources(folder, context=SEQ, split="all")
        text = np.frombuffer((folder / name).read_bytes(), dtype=np.uint8)
        (item,) = [each for each in windows if np.array_equal(each["input_ids"], text[:SEQ])][:1]
        found.append((text.astype(np.int32), item["auth_weights"], item["prov_entropies"]))
    return found


def batch_of(texts: list[tuple[np.ndarray, Any, Any]], number: int) -> dict[str, mx.array]:
    """Draw the batch of a number as the Rust example does."""
    ends = np.cumsum([len(text) - SEQ + 1 for text, _, _ in texts])
    rows = []
    for row in range(BATCH):
        position = mix(mix(SEED) ^ (number << 32 | row)) % int(ends[-1])
        source = int(np.searchsorted(ends, position, side="right"))
        start = position - (int(ends[source - 1]) if source else 0)
        text, authority, entropy = texts[source]
        rows.append((text[start : start + SEQ], authority, entropy))
    names = ("input_ids", "auth_weights", "prov_entropies")
    return {name: mx.array(np.stack(column)) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def renamed(name: str) -> str:
    return name.replace("bytes.", "embedding.").replace("attention.qkv", "qkv").replace("attention.out", "out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weighted")
    for name, text in TEXTS.items():
        (folder / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "text" / name).write_text(text * 4)
    return folder


def test_python_takes_the_steps_that_rust_takes(rust_example: RustExample, folder: Path) -> None:
    sizes = f"--layers 2 --width 32 --heads 2 --seq {SEQ} --batch {BATCH} --seed {SEED} --warm-up {WARM_UP}"
    command = f"{sizes} --steps {STEPS} --learning-rate {RATE} --every 10 --save-every 1 --keep {STEPS}".split()
    command += ["--text", str(folder / "text"), "--log", str(folder / "log"), "--checkpoints", str(folder / "run")]
    libraries = str(Path(mx.__file__).parent / "lib")
    environment = os.environ | {"LD_LIBRARY_PATH": libraries, "DYLD_LIBRARY_PATH": libraries}
    done = subprocess.run(
        [rust_example("weighted_lm"), *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (folder / "log").read_text().splitlines()]

    # the rate of the first step is 0: its checkpoint has the initial weights
    weights: Any = mx.load(str(folder / "run/step-000001/model.safetensors"))
    model = recipes.GPT(2, 32, 2, context=SEQ, activation="gelu")
    model.load_weights([(renamed(name), each) for name, each in weights.items()])
    decay = cosine_decay(RATE, STEPS - WARM_UP, RATE / 20)
    schedule = join_schedules([linear_schedule(0.0, RATE, WARM_UP), decay], [WARM_UP])
    optimizer = AdamW(schedule, betas=[0.9, 0.99], weight_decay=0.1, bias_correction=True)
    step = Step(model, optimizer, recipes.weighted_lm(), max_grad_norm=1.0)
    texts = sources(folder / "text")
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
