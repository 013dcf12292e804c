"""The model, cases and files of rust/faststep/examples/continuation.rs, in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from faststep import Step
from mlx.utils import tree_flatten, tree_unflatten

from support.helpers import random_key, seed_of, to_numpy

COUNT = 10
Run = Callable[[str, Path, Path, int, int], list[float]]


class Net(nn.Module):
    """The model of rust/faststep/examples/continuation.rs."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm(16)
        self.layers = [*(nn.Linear(16, 16) for _ in range(11)), nn.Linear(16, 4)]
        self.dropout = nn.Dropout(0.25)
        self.noisy = noisy

    def __call__(self, x: mx.array) -> mx.array:
        x = mx.tanh(self.first(x))
        if self.noisy:
            x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(mx.tanh(x))
        return x


def mean_squared_error(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return mx.square(model(x) - y).mean()


def adamw(rate: float | Callable[[mx.array], mx.array]) -> optim.Optimizer:
    return optim.AdamW(rate, bias_correction=True)


def warm_up() -> Callable[[mx.array], mx.array]:
    return optim.join_schedules([optim.linear_schedule(0, 1e-3, 4), optim.cosine_decay(1e-3, 20, 1e-4)], [4])


def several() -> optim.Optimizer:
    matrices = optim.Muon(optim.exponential_decay(0.02, 0.9))
    return optim.MultiOptimizer([matrices, adamw(optim.step_decay(1e-3, 0.5, 2))], [lambda _, array: array.ndim == 2])


CASES: dict[str, tuple[Callable[[], optim.Optimizer], dict[str, Any]]] = {
    "window": (lambda: adamw(1e-2), {}),
    "noisy": (lambda: optim.Lion(warm_up(), weight_decay=0.1), {"accumulate": 1}),
    "masters": (lambda: adamw(1e-3), {"compute_dtype": mx.bfloat16, "ema_decay": 0.9}),
    "scaled": (lambda: optim.SGD(1e-2, momentum=0.9), {"compute_dtype": mx.float16}),
    "several": (several, {}),
}


def start(case: str) -> Step:
    """Make the model, the optimizer and their step, equal each time."""
    mx.random.seed(7)
    optimizer, options = CASES[case]
    model = Net(case == "noisy")
    if case == "masters":
        model.set_dtype(mx.bfloat16)
    return Step(model, optimizer(), mean_squared_error, **({"max_grad_norm": 0.05, "accumulate": 3} | options))


def read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read the arrays and the metadata of a file."""
    contents: Any = mx.load(str(path), return_metadata=True)
    return contents[0], contents[1]


def save(folder: Path, step: Step) -> None:
    """Write what Rust's `Step::load` reads."""
    folder.mkdir()
    state = dict(tree_flatten(step.state))
    arrays = {name: value for name, value in state.items() if isinstance(value, mx.array)}
    numbers = {name: str(value) for name, value in state.items() if name not in arrays}
    step.model.save_weights(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "optimizer.safetensors"), dict(tree_flatten(step.optimizer.state)))
    mx.save_safetensors(str(folder / "step.safetensors"), arrays, numbers | {"random": str(seed_of(random_key()))})


def load(folder: Path, step: Step) -> None:
    """Read what Rust's `Step::save` writes."""
    arrays, texts = read(folder / "step.safetensors")
    numbers = {name: int(text) for name, text in texts.items()}
    mx.random.seed(numbers.pop("random"))
    step.model.load_weights(str(folder / "model.safetensors"))
    step.optimizer.state = tree_unflatten(list(read(folder / "optimizer.safetensors")[0].items()))
    step.load_state((tree_unflatten(list(arrays.items())) if arrays else {}) | numbers)


def everything(folder: Path) -> dict[str, np.ndarray]:
    """Return all arrays and numbers of a checkpoint."""
    values: dict[str, np.ndarray] = {}
    for path in folder.iterdir():
        arrays, texts = read(path)
        values |= {f"{path.stem}.{name}": to_numpy(array) for name, array in arrays.items()}
        values |= {f"{path.stem}.{name}": np.array(int(text)) for name, text in texts.items() if name != "format"}
    del values["model.norm.running_var"]  # of the batch's variance in mlx-rs, of the unbiased one in MLX's Python
    return values
