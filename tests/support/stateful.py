"""Steps with every option that keeps something, and all arrays and numbers of their runs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from faststep import Step

from support.helpers import Row, flat, snapshot, to_numpy

Pair = tuple[nn.Module, optim.Optimizer]
ROW = Row("mlp", "adamw")
BATCHES = ROW.case.batches(12)
OPTIONS: dict[str, Any] = {"compute_dtype": mx.float16, "ema_decay": 0.9, "accumulate": 3, "max_grad_norm": 1.0}


def new(
    name: str = "mlp", optimizer: str = "adamw", dtype: mx.Dtype | None = mx.float16, **options: Any
) -> tuple[Pair, Step]:
    """Make a model in half precision, its optimizer and their step, equal each time."""
    row = Row(name, optimizer)
    pair = row.new()
    if dtype is not None:
        pair[0].set_dtype(dtype)
    return pair, Step(*pair, row.case.loss_fn, **(OPTIONS | options))


def take(step: Step, batches: list[Any]) -> None:
    for batch in batches:
        step(*batch)


def everything(pair: Pair, step: Step) -> dict[str, np.ndarray]:
    """Copy all arrays and numbers that a run has."""
    numbers = {f"step.{name}": np.array(value) for name, value in step.state.items() if isinstance(value, int)}
    arrays = {f"step.{name}": to_numpy(array) for name, array in flat(step.state).items()}
    return snapshot(*pair) | arrays | numbers
