"""Configs, and what is made of them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faststep.config import Built, ConfigError, build, load
from mlx.utils import tree_flatten

GOOD = """\
model: {use: mlp, sizes: [8, 4]}
loss: {use: mse}
data:
  train: {use: arrays, file: data.npz}
  batch_size: 4
optimizer:
  use: AdamW
  learning_rate: 1e-3
train:
  steps: 10
"""
GPT = """\
model: {use: gpt, layers: 2, width: 64, heads: 4, context: 16}
loss: {use: next_token}
data:
  train: {use: bytes, context: 16}
  batch_size: 4
optimizer: {use: AdamW, learning_rate: 1e-2}
train: {steps: 3}
"""
MLP = """\
model: {use: mlp, sizes: [8, 16, 3], dropout: 0.1}
loss: {use: cross_entropy}
data:
  train: {use: arrays, file: rows.npz, names: [x, label]}
  batch_size: 4
optimizer: {use: AdamW, learning_rate: 1e-2}
train: {steps: 3}
"""


def config(folder: Path, text: str, *overrides: str, **files: str) -> Any:
    """Load a config from a folder that has the data, and files of the user's."""
    for name, code in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code), encoding="utf-8")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 8)).astype(np.float32)
    np.savez(folder / "rows.npz", x=x, y=x[:, :3] * 2, label=rng.integers(3, size=40))
    (folder / "c.yaml").write_text(text, encoding="utf-8")
    return load(folder / "c.yaml", overrides)


def make(folder: Path, text: str, *overrides: str, **files: str) -> Built:
    """Build such a config."""
    return build(config(folder, text, *overrides, **files))


def refusal(folder: Path, text: str, *overrides: str, **files: str) -> str:
    """Return what is said of a config that cannot be built."""
    with pytest.raises(ConfigError) as caught:
        make(folder, text, *overrides, **files)
    return str(caught.value)


def train(built: Built, steps: int = 3) -> list[float]:
    """Take some steps and return their losses."""
    taken = []
    for batch, _ in zip(built.loader, range(steps), strict=False):
        out = built.step(**batch) if isinstance(batch, dict) else built.step(*batch)
        taken.append(float(out.loss))
    return taken


def trainable(built: Built) -> set[str]:
    """Return the paths of what trains."""
    return set(dict(tree_flatten(built.step.model.trainable_parameters())))
