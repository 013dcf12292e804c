"""The plain-MLX side of the tests: models, optimizers and reference loops. Nothing of the package is imported here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from models import MODELS, ModelCase

Tree = Any  # an array or another value, or lists, tuples and dicts of trees
Batch = tuple[Tree, ...]
LossFn = Callable[..., Tree]
Taken = tuple[Tree, "mx.array | None"]  # what loss_fn returned, and the norm of the gradients where they are clipped
StepFn = Callable[..., Taken]
MakeStep = Callable[[nn.Module, optim.Optimizer, LossFn, "float | None"], StepFn]


class SignedDescent(optim.Optimizer):
    """A user's own optimizer, with state and a host-side option."""

    def __init__(self, learning_rate: float, decay: float = 0.9) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        self.decay = decay

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Start with no average."""
        state["average"] = mx.zeros_like(parameter)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """Follow the sign of the averaged gradient."""
        state["average"] = self.decay * state["average"] + (1 - self.decay) * gradient
        return parameter - self.learning_rate.astype(gradient.dtype) * mx.sign(state["average"])


class HalvedAdam(optim.Adam):
    """A user's change of one of MLX's: it must not be mistaken for Adam."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """Go half the way."""
        return 0.5 * (parameter + super().apply_single(gradient, parameter, state))


def joined() -> Callable[[Any], mx.array]:
    """Return warm-up and cosine decay, as users join them."""
    return optim.join_schedules([optim.linear_schedule(0.0, 1e-2, 2), optim.cosine_decay(1e-2, 6)], [2])


def halving(step: mx.array) -> mx.array:
    """Compute a user's own schedule with array operations."""
    return 1e-2 * 0.5 ** (step // 2)


def branching(step: mx.array) -> mx.array:
    """Compute a user's own schedule by reading the step on the host, which no trace allows."""
    return mx.array(1e-2 if step < 2 else 1e-3)


def is_matrix(path: str, weight: mx.array) -> bool:
    """Choose the weights that Muon takes."""
    return weight.ndim == 2 and "head" not in path


NATIVE: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.SGD(1e-2),
    "sgd-momentum": lambda: optim.SGD(1e-2, momentum=0.9),
    "sgd-nesterov": lambda: optim.SGD(1e-2, momentum=0.9, nesterov=True),
    "sgd-weight-decay": lambda: optim.SGD(1e-2, momentum=0.9, weight_decay=0.1),
    "sgd-dampening": lambda: optim.SGD(1e-2, momentum=0.9, dampening=0.5),
    "sgd-cosine": lambda: optim.SGD(optim.cosine_decay(1e-1, 5)),
    "adam": lambda: optim.Adam(1e-2),
    "adam-bias-correction": lambda: optim.Adam(1e-2, betas=[0.8, 0.9], eps=1e-6, bias_correction=True),
    "adamw": lambda: optim.AdamW(1e-2, weight_decay=0.1),
    "adamw-bias-correction": lambda: optim.AdamW(1e-2, bias_correction=True),
    "adamw-joined": lambda: optim.AdamW(joined(), weight_decay=0.1),
    "adamw-halving": lambda: optim.AdamW(halving),
    "adam-branching": lambda: optim.Adam(branching),
    "lion": lambda: optim.Lion(1e-3, weight_decay=0.1),
    "rmsprop": lambda: optim.RMSprop(1e-3),
    "adagrad": lambda: optim.Adagrad(1e-2),
    "adadelta": lambda: optim.AdaDelta(1.0),
    "adamax": lambda: optim.Adamax(1e-2),
    "lion-cosine": lambda: optim.Lion(optim.cosine_decay(1e-2, 5), betas=[0.8, 0.9]),
    "adafactor": lambda: optim.Adafactor(),
    "adafactor-fixed": lambda: optim.Adafactor(1e-3, relative_step=False, scale_parameter=False, beta_1=0.9),
    "muon": lambda: optim.Muon(1e-2, weight_decay=0.1),
    "multi": lambda: optim.MultiOptimizer([optim.Muon(1e-2), optim.AdamW(joined())], [is_matrix]),
    "adafactor-warmup": lambda: optim.Adafactor(halving, warmup_init=True, weight_decay=0.1),
    "muon-momentum": lambda: optim.Muon(joined(), weight_decay=0.0, nesterov=False, ns_steps=3),
    "multi-flat": lambda: optim.MultiOptimizer([optim.SGD(1e-2, momentum=0.9), optim.Lion(joined())], [is_matrix]),
}

TRACED: dict[str, Callable[[], optim.Optimizer]] = {
    "user": lambda: SignedDescent(1e-3),
    "user-adam": lambda: HalvedAdam(1e-2),
    "user-branching": lambda: HalvedAdam(branching),
}

OPTIMIZERS = NATIVE | TRACED
HOST_SCHEDULES = ("adam-branching", "user-branching")  # mx.compile cannot take them


@dataclass(frozen=True)
class Row:
    """One row of the table: a model, an optimizer, and the norm that gradients are clipped to."""

    model: str
    optimizer: str
    max_grad_norm: float | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.optimizer}" + ("-clip" if self.max_grad_norm else "")

    @property
    def case(self) -> ModelCase:
        """The model's row."""
        return MODELS[self.model]

    @property
    def way(self) -> str:
        """The way that such a step has to go."""
        return "native" if self.optimizer in NATIVE else "traced"

    def new(self) -> tuple[nn.Module, optim.Optimizer]:
        """Build the model, equal each time, and its optimizer."""
        mx.random.seed(7)
        model = self.case.make()
        mx.eval(model.parameters())
        return model, OPTIMIZERS[self.optimizer]()


def plain_step(
    model: nn.Module, optimizer: optim.Optimizer, loss_fn: LossFn, max_grad_norm: float | None = None
) -> StepFn:
    """Return the loop of MLX's documentation, the reference of every comparison."""

    def step(*batch: Tree, **named: Tree) -> Taken:
        taken = update(model, optimizer, loss_fn, max_grad_norm, batch, named)
        mx.eval(taken, model.state, optimizer.state, mx.random.state)
        return taken

    return step


def compiled_step(
    model: nn.Module, optimizer: optim.Optimizer, loss_fn: LossFn, max_grad_norm: float | None = None
) -> StepFn:
    """Return the same in ``mx.compile``, its state captured."""
    optimizer.init(model.trainable_parameters())
    states = [each.state for each in getattr(optimizer, "optimizers", [optimizer])]
    state = [model.state, states, mx.random.state]
    traced = mx.compile(
        functools.partial(update, model, optimizer, loss_fn, max_grad_norm), inputs=state, outputs=state
    )

    def step(*batch: Tree, **named: Tree) -> Taken:
        taken: Taken = traced(batch, named)
        mx.eval(taken, state)
        return taken

    return step


def update(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss_fn: LossFn,
    max_grad_norm: float | None,
    batch: Batch,
    named: dict[str, Tree],
) -> Taken:
    """Build one step, lazily."""
    value, grads = nn.value_and_grad(model, loss_fn)(model, *batch, **named)
    norm = None
    if max_grad_norm is not None:
        grads, norm = optim.clip_grad_norm(grads, max_grad_norm)
    optimizer.update(model, grads)
    return value, norm


def snapshot(model: nn.Module, optimizer: optim.Optimizer | None = None) -> dict[str, np.ndarray]:
    """Copy all that a step may change: arrays of the model, optimizer state, random state."""
    trees = {"model": model.parameters(), "optimizer": optimizer.state if optimizer else {}, "random": random_key()}
    return {name: to_numpy(array) for name, array in flat(trees).items()}


def flat(tree: Tree) -> dict[str, mx.array]:
    """Name the arrays of a tree by their paths; they are the tree's own."""
    return {path: leaf for path, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)}  # type: ignore[str-unpack]


def random_key() -> mx.array:
    """Return the key that this thread's next random numbers come from."""
    state: Tree = mx.random.state
    key: mx.array = state[0]
    return key


def to_numpy(array: mx.array) -> np.ndarray:
    """Copy to numpy; bfloat16, which numpy lacks, as float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def copy_state(source: tuple[nn.Module, optim.Optimizer], target: tuple[nn.Module, optim.Optimizer]) -> None:
    """Bring a model and its optimizer to another pair's state, through the ways that users have."""
    target[0].update(copy_tree(source[0].parameters()))
    target[1].state = copy_tree(source[1].state)


def copy_tree(tree: Tree) -> Tree:
    """Copy a tree, arrays and containers."""
    copied = tree_map(lambda a: mx.array(a) if isinstance(a, mx.array) else a, tree)
    mx.eval(copied)
    return copied


def save_and_load(tree: Tree, file: str) -> Tree:
    """Write a tree to a safetensors file and read it again."""
    mx.save_safetensors(file, flat(tree))
    loaded: Tree = mx.load(file)
    return tree_unflatten(list(loaded.items()))


def run(row: Row, make: MakeStep, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Take steps from the row's start; return the losses and the state they end in."""
    model, optimizer = row.new()
    step = make(model, optimizer, row.case.loss_fn, row.max_grad_norm)
    mx.random.seed(11)
    losses = [float(step(*batch)[0]) for batch in row.case.batches(steps)]
    return losses, snapshot(model, optimizer)


def assert_close(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    """Compare two snapshots: names, dtypes and shapes exactly, values within the tolerance (0: every bit)."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        if tolerance and value.dtype.kind == "f":
            np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)


def rows(names: Sequence[str], optimizers: Sequence[str], max_grad_norm: float | None = None) -> list[Row]:
    """Make a row of each model with each optimizer."""
    return [Row(model, optimizer, max_grad_norm) for model in names for optimizer in optimizers]
