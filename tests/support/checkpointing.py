"""Shared parts of the tests of checkpoints: steps of many kinds, and all that a run consists of, bit by bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from faststep import Step
from mlx.utils import tree_flatten

from support.helpers import OPTIMIZERS, joined, random_key

WIDTH = 32


class Net(nn.Module):
    """Weights, buffers that no optimizer knows, random numbers, modules without parameters, lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm(WIDTH)
        self.layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25), nn.Linear(WIDTH, WIDTH, bias=False)]
        self.heads = {"a": nn.Linear(WIDTH, 2), "b": nn.Linear(WIDTH, 2)}
        self.shift = mx.array(0.5)

    def __call__(self, x: mx.array) -> mx.array:
        x = mx.tanh(self.norm(self.first(x.astype(self.shift.dtype))))
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x) + self.heads["b"](x) * self.shift


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return mx.square(model(x) - y).mean()


def batch(number: int) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((8, WIDTH), key=mx.random.key(number))
    return x, mx.sin(x[:, :2])


def step_of(
    optimizer: Callable[[], optim.Optimizer] = lambda: optim.AdamW(1e-2),
    dtype: mx.Dtype = mx.float32,
    change: Callable[[nn.Module], object] = lambda model: None,
    seed: int = 7,
    **options: Any,
) -> Step:
    """Make a step, equal each time."""
    mx.random.seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = Net()
    model.set_dtype(dtype)
    change(model)
    mx.eval(model.parameters())
    return Step(model, optimizer(), loss_fn, **options)


def freeze(model: nn.Module) -> None:
    model.first.freeze()
    model.heads["a"].freeze(keys="bias")


def quantize(model: nn.Module) -> None:
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: path == "first")
    model.first.freeze()


def several() -> optim.Optimizer:
    matrices = optim.Muon(joined())
    return optim.MultiOptimizer([matrices, optim.AdamW(optim.step_decay(1e-3, 0.5, 2))], [lambda _, a: a.ndim == 2])


STEPS: dict[str, Callable[[], Step]] = {
    "plain": step_of,
    "clipped": lambda: step_of(max_grad_norm=0.05),
    "window": lambda: step_of(accumulate=3),
    "average": lambda: step_of(ema_decay=0.9, accumulate=2),
    "bfloat16": lambda: step_of(dtype=mx.bfloat16),
    "masters": lambda: step_of(dtype=mx.bfloat16, compute_dtype=mx.bfloat16, ema_decay=0.9, accumulate=3),
    "scaled": lambda: step_of(dtype=mx.float16, compute_dtype=mx.float16, max_grad_norm=1.0),
    "several": lambda: step_of(several, accumulate=2),
    "frozen": lambda: step_of(change=freeze, ema_decay=0.9),
    "quantized": lambda: step_of(change=quantize),
    "not compiled": lambda: step_of(compile=False),
}
OF_OPTIMIZERS = {name: functools.partial(step_of, make) for name, make in OPTIMIZERS.items()}


def arrays_of(tree: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of each array of a tree, by path, and its other values."""
    found = {}
    for path, leaf in tree_flatten(tree):
        leaf = leaf if isinstance(leaf, mx.array) else mx.array(leaf)
        found[path] = (str(leaf.dtype), leaf.shape, memoryview(leaf).tobytes())  # type: ignore[arg-type]
    return found


def structure_of(tree: Any) -> Any:
    """Return the containers of a tree, empty ones too."""
    if isinstance(tree, dict):
        return {key: structure_of(part) for key, part in tree.items()}
    return type(tree)(map(structure_of, tree)) if isinstance(tree, list | tuple) else "leaf"


def everything(step: Step) -> dict[str, Any]:
    """Return all that a run consists of."""
    trees = {"model": step.model.parameters(), "optimizer": step.optimizer.state, "step": step.state}
    return {
        **{name: arrays_of(tree) for name, tree in trees.items()},
        "structure": structure_of(step.optimizer.state),
        "mlx": memoryview(random_key()).tobytes(),  # type: ignore[arg-type]
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    }


def train(step: Step, numbers: Iterator[int] | range) -> list[float]:
    """Take these batches; draw from every generator beside."""
    losses = []
    for number in numbers:
        losses.append(step(*batch(number)).loss.item())
        losses += [random.gauss(0, 1), float(np.random.standard_normal())]
    return losses
