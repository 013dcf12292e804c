"""QLoRA in the Rust example: adapters over its own model in 4 bits take the steps that plain MLX takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import recipes
from mlx.utils import tree_unflatten
from support.places import RustExample
from support.weighted_lm import SIZES, TRAINING, batch_of, model_of, optimizer, read_log, renamed, run, sources, write

STEPS, RANK, SCALE = 40, 4, 8.0
BASE = {"a.py": "def step(model, optimizer, loss_fn, batch):\n    return fast_step(model, optimizer)\n" * 8}
OTHER = {
    "docs/guide.md": "The adapters learn what the frozen weights do not know: prose. " * 4,
    "tests/test_words.py": "def test_words():\n    assert words\n" * 4,
}
LORA = f"--bits 4 --group-size 32 --rank {RANK} --lora-scale {SCALE} --steps {STEPS}".split()
Program = Callable[..., Any]

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo on this machine")


class Adapted(nn.Module):
    """A quantized layer and two matrices beside it, in plain MLX."""

    def __init__(self, linear: nn.QuantizedLinear, a: mx.array, b: mx.array) -> None:
        super().__init__()
        self.linear = linear.freeze()
        self.lora_a, self.lora_b = a, b

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + SCALE * ((x @ self.lora_a) @ self.lora_b)


def read(file: Path) -> dict[str, mx.array]:
    """Read arrays."""
    arrays: Any = mx.load(str(file))
    return arrays


def adapted(base: Path, adapters: Path) -> nn.Module:
    """Make the model of a checkpoint in 4 bits, with the adapters of a file, in plain MLX."""
    model = model_of(read(base / "model.safetensors"))
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, each: isinstance(each, nn.Linear))
    model.freeze()
    arrays = {renamed(name): each for name, each in read(adapters).items()}
    layers = {path: each for path, each in model.named_modules() if isinstance(each, nn.QuantizedLinear)}
    assert {f"{path}.{name}" for path in layers for name in ("lora_a", "lora_b")} == arrays.keys()
    pairs = [
        (path, Adapted(each, *(arrays[f"{path}.{name}"] for name in ("lora_a", "lora_b"))))
        for path, each in layers.items()
    ]
    model.update_modules(tree_unflatten(pairs))
    return model


def plain(model: nn.Module, text: Path) -> tuple[list[float], list[float]]:
    """Train by the plain loop; return losses and norms."""
    loss_fn, update, texts = recipes.weighted_lm(), optimizer(STEPS), sources(text)
    losses, norms = [], []
    for number in range(STEPS):
        loss, grads = nn.value_and_grad(model, loss_fn)(model, **batch_of(texts, number))
        grads, norm = optim.clip_grad_norm(grads, 1.0)
        update.update(model, grads)
        mx.eval(model.state, update.state)
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


@pytest.fixture(scope="module")
def program(rust_example: RustExample) -> Program:
    return partial(run, rust_example("weighted_lm"))


@pytest.fixture(scope="module")
def folder(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a base, then adapters over it on another text, each step with a checkpoint."""
    folder = tmp_path_factory.mktemp("adapters")
    text, other = write(folder / "text", BASE), write(folder / "other", OTHER)
    program(*SIZES, *TRAINING, "--steps", "40", "--text", text, "--checkpoints", folder / "base")
    command = ["--base", folder / "base/step-000040", *LORA, *TRAINING, "--text", other, "--log", folder / "log"]
    program(*command, "--checkpoints", folder / "run", "--save-every", "1", "--keep", str(STEPS))
    return folder


def test_losses_are_those_of_plain_mlx(folder: Path) -> None:
    log = read_log(folder / "log")
    # the rate of the first step is 0: its checkpoint has the initial adapters
    model = adapted(folder / "base/step-000040", folder / "run/step-000001/adapters.safetensors")
    losses, norms = plain(model, folder / "other")
    assert [each["loss"] for each in log] == pytest.approx(losses, rel=1e-4)
    assert [each["grad_norm"] for each in log] == pytest.approx(norms, rel=1e-3)
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]


def test_adapters_train_and_nothing_else(folder: Path) -> None:
    first, last = (read(folder / f"run/step-{steps:06}/model.safetensors") for steps in (1, STEPS))
    frozen = 0
    for name, array in first.items():
        is_adapter = name.endswith((".lora_a", ".lora_b"))
        assert mx.array_equal(array, last[name]).item() != is_adapter, name
        frozen += not is_adapter
    assert frozen == 3 + 2 * (2 + 4 * 3)  # embeddings and norms in floating point, four layers of a block in 4 bits
    weight = read(folder / "base/step-000040/model.safetensors")["blocks.1.up.weight"]
    for name, array in zip(("inner.weight", "scales", "biases"), mx.quantize(weight, 32, 4), strict=True):
        assert mx.array_equal(last[f"blocks.1.up.linear.{name}"], array), name
    adapters = read(folder / f"run/step-{STEPS:06}/adapters.safetensors")
    assert adapters["blocks.0.attention.qkv.lora_a"].shape == (32, RANK)
    assert adapters["blocks.0.attention.qkv.lora_b"].shape == (RANK, 96)
    assert all(mx.array_equal(array, last[name]) for name, array in adapters.items())


def test_a_run_goes_on_in_the_same_bits(program: Program, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run/step-000020", tmp_path / "run/step-000020")
    command = ["--base", folder / "base/step-000040", *LORA, *TRAINING, "--text", folder / "other"]
    program(*command, "--checkpoints", tmp_path / "run", "--resume")
    for name in ("model", "optimizer", "adapters"):
        there, here = (read(each / f"run/step-{STEPS:06}/{name}.safetensors") for each in (folder, tmp_path))
        assert there.keys() == here.keys()
        assert all(mx.array_equal(there[key], here[key]) for key in there)


def test_adapters_of_a_file_are_where_a_run_begins(program: Program, folder: Path) -> None:
    base, file = folder / "base/step-000040", folder / f"run/step-{STEPS:06}/adapters.safetensors"
    command = ["--base", base, "--adapters", file, *LORA, *TRAINING, "--text", folder / "other", "--gradients-only"]
    done = program(*command)
    loss = recipes.weighted_lm()(adapted(base, file), **batch_of(sources(folder / "other"), 0))
    assert f"after 0 steps: loss {loss.item():.4f}"[:-1] in done.stdout
    assert "bytes " not in done.stdout.partition("after 0 steps")[2]  # of the frozen embedding there is no gradient


REFUSED = {
    "no checkpoint": (["--base", "base"], "base/run.json: No such file"),
    "adapters as a base": (
        ["--base", "run/step-000040"],
        "model.safetensors: is of another model: expected blocks.0.attention.out.weight [32, 32]",
    ),
    "adapters of another rank": (
        ["--base", "base/step-000040", "--adapters", "run/step-000040/adapters.safetensors", "--rank", "3"],
        "adapters.safetensors: is of another model: expected blocks.0.attention.out.lora_a [32, 3]",
    ),
    "groups": (
        ["--base", "base/step-000040", "--group-size", "64"],
        "--group-size: expected a divisor of 32, the width of the base, got 64",
    ),
    "bits": (["--base", "base/step-000040", "--bits", "7"], "invalid value '7' for '--bits <BITS>'"),
    "sizes": (["--base", "base/step-000040", "--width", "64"], "cannot be used with"),
    "no base": (["--adapters", "adapters.safetensors"], "--base <DIR>"),
    "another run": (
        ["--base", "base/step-000040", "--rank", "3", "--checkpoints", "run", "--resume"],
        "run.json: is of another run: --rank was 4 there, and is 3 now",
    ),
    "a run without adapters": (
        ["--base", "base/step-000040", "--checkpoints", "base", "--resume", "--seed", "5"],
        "run.json: is of another run: --",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(
    case: str, program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    arguments, message = REFUSED[case]
    done = program(*LORA, *TRAINING, "--text", "other", *arguments, code=2)
    assert message in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1
