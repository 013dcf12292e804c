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

from support.models import MODELS, Batch, ModelCase, cross_entropy

Tree = Any  # an array or another value, or lists, tuples and dicts of trees
LossFn = Callable[..., Tree]
Taken = tuple[Tree, "mx.array | None"]  # what loss_fn returned, and the norm of the gradients where they are clipped
StepFn = Callable[..., Taken]
Pair = tuple[nn.Module, optim.Optimizer]


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
    """Compute a user's own schedule by reading the step on the host, which no compiled update allows."""
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
    """One row of the table: a model, an optimizer, what gradients are clipped to, and the batches of an update."""

    model: str
    optimizer: str
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    accumulate: int = 1

    def __str__(self) -> str:
        options = ["clip" if self.max_grad_norm else "", "value" if self.max_grad_value else ""]
        options.append(f"x{self.accumulate}" if self.accumulate > 1 else "")
        return "-".join([self.model, self.optimizer, *filter(None, options)])

    @property
    def options(self) -> dict[str, Tree]:
        """The options of a step, as the reference loops and the package's take them."""
        names = ("max_grad_norm", "max_grad_value", "accumulate")
        return {name: getattr(self, name) for name in names}

    @property
    def case(self) -> ModelCase:
        """The model's row."""
        return MODELS[self.model]

    @property
    def way(self) -> str:
        """The mode that such a step has to come to; gradients of a model's own are Python functions."""
        return "native" if self.optimizer in NATIVE and self.model != "decorated" else "called"

    def new(self) -> Pair:
        """Build the model, equal each time, and its optimizer."""
        mx.random.seed(7)
        model = self.case.make()
        mx.eval(model.parameters())
        return model, OPTIMIZERS[self.optimizer]()


def plain_step(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss_fn: LossFn,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    accumulate: int = 1,
) -> StepFn:
    """Return the loop of MLX's documentation, the reference of every comparison."""
    window: list[Tree] = []

    def step(*batch: Tree, **named: Tree) -> Taken:
        value, grads = nn.value_and_grad(model, loss_fn)(model, *batch, **named)
        window.append(grads)
        norm = None
        if len(window) == accumulate:
            clipped, norm = clip(average(window), max_grad_norm, max_grad_value)
            optimizer.update(model, tree_map(lambda new, old: new.astype(old.dtype), clipped, grads))
            window.clear()
        mx.eval(value, norm, window, model.state, optimizer.state, mx.random.state)
        return value, norm

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


def taking(step: Callable[..., Any]) -> StepFn:
    """Give a step of the package the shape of the reference's."""

    def take(*batch: Tree, **named: Tree) -> Taken:
        out = step(*batch, **named)
        return out.loss, out.grad_norm

    return take


def summed(model: nn.Module, x: mx.array, tag: str = "", y: mx.array | None = None) -> mx.array:
    """Return a loss in whose kernels no length is a constant, so that every length has the same."""
    return mx.square(model(x)).sum()


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
    grads, norm = clip(grads, max_grad_norm)
    optimizer.update(model, grads)
    return value, norm


def average(window: Sequence[Tree], weights: Sequence[float] | None = None) -> Tree:
    """Average trees of gradients, half precision in float32."""
    if len(window) == 1:
        return window[0]
    weights = weights or [1.0] * len(window)

    def mean(*grads: mx.array) -> mx.array:
        products = [weight * each.astype(mx.float32) for weight, each in zip(weights, grads, strict=True)]
        return sum(products[1:], products[0]) / sum(weights)

    return tree_map(mean, *window)


def clip(grads: Tree, max_grad_norm: float | None = None, max_grad_value: float | None = None) -> Taken:
    """Clip by norm, then by value; return the norm too, where it was needed."""
    norm = None
    if max_grad_norm is not None:
        grads, norm = optim.clip_grad_norm(grads, max_grad_norm)
    if max_grad_value is not None:
        grads = tree_map(lambda g: mx.clip(g, -max_grad_value, max_grad_value), grads)
    return grads, norm


def learn(
    pair: Pair,
    window: Sequence[Batch],
    weights: Sequence[float] | None = None,
    loss_fn: LossFn = cross_entropy,
    max_grad_norm: float | None = None,
) -> None:
    """Update once by the average over a window of any size, the reference where its size is the question."""
    model, optimizer = pair
    grads = []
    for batch in window:
        grads.append(nn.value_and_grad(model, loss_fn)(model, *batch)[1])
        mx.eval(grads, model.state, mx.random.state)
    optimizer.update(model, clip(average(grads, weights), max_grad_norm)[0])
    mx.eval(model.state, optimizer.state)


def spoilt(batch: Batch) -> Batch:
    """Return the batch with a row that is no number."""
    first = mx.array(np.array(batch[0]))
    first[0] = float("nan")
    return (first, *batch[1:])


def snapshot(
    model: nn.Module, optimizer: optim.Optimizer | None = None, kept: dict[str, Tree] | None = None
) -> dict[str, np.ndarray]:
    """Copy all that a step may change: arrays of the model, optimizer state, random state, and what the step keeps."""
    trees = {"model": model.parameters(), "optimizer": optimizer.state if optimizer else {}, "random": random_key()}
    trees["kept"] = tree_map(mx.array, kept or {})
    return {name: to_numpy(array) for name, array in flat(trees).items()}


def flat(tree: Tree) -> dict[str, mx.array]:
    """Name the arrays of a tree by their paths; they are the tree's own."""
    return {path: leaf for path, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)}  # type: ignore[str-unpack]


def random_key() -> mx.array:
    """Return the key that this thread's next random numbers come from."""
    state: Tree = mx.random.state
    key: mx.array = state[0]
    return key


def seed_of(key: mx.array) -> int:
    """Return the number with which `mx.random.seed` gives this key."""
    words: Tree = key.tolist()
    return int(words[0]) << 32 | int(words[1])


def to_numpy(array: mx.array) -> np.ndarray:
    """Copy to numpy; bfloat16, which numpy lacks, as float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


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


def run(row: Row, pair: Pair, step: StepFn, updates: int) -> dict[str, np.ndarray]:
    """Take so many updates; return the state in which they end, each loss, and each norm where it is clipped to."""
    mx.random.seed(11)
    taken = [step(*batch) for batch in row.case.batches(updates * row.accumulate)]
    state = snapshot(*pair)
    state["losses"] = np.array([float(loss) for loss, _ in taken])
    if row.max_grad_norm:
        state["norms"] = np.array([float(norm) for _, norm in taken if norm is not None])
    return state


def is_half(value: np.ndarray) -> bool:
    """Tell whether all these numbers, float32 by now, are some of bfloat16."""
    return value.dtype == np.float32 and not (value.view(np.uint32) & 0xFFFF).any()


def assert_same(got: Any, wanted: Any, tolerance: float = 0, *, on_gpu: float = 1e-5) -> None:
    """Compare losses, numbers or lists of them, within the tolerance (0: every bit) and that of a GPU there."""
    near = max(tolerance, on_gpu) if mx.default_device().type == mx.gpu else tolerance
    got, wanted = np.array(got), np.array(wanted)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=near, atol=near if tolerance == 0 else 0, equal_nan=False)


def assert_close(
    got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float, *, on_gpu: float = 2e-6
) -> None:
    """Compare two snapshots: names, dtypes and shapes exactly, values within the tolerance (0: every bit).

    A GPU's compiler rounds a product and a sum once or twice, as it likes, kernel by kernel, and some gradients are
    summed in no order. An optimizer that divides a gradient by its own size makes whole updates of that where a
    gradient is nothing else: one element in 30 may be an update or two away. In bfloat16 neighbours are near; what is
    computed from gradients in half precision is as far as `on_gpu` says.
    """
    assert got.keys() == wanted.keys()
    gpu = mx.default_device().type == mx.gpu
    for name, value in wanted.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        floating = value.dtype.kind == "f"
        if gpu and floating:
            near = max(tolerance, 2**-7 if is_half(value) else on_gpu)
            far = ~np.isclose(got[name], value, rtol=near, atol=near, equal_nan=True)
            assert far.sum() <= max(1, value.size // 30), name
            np.testing.assert_allclose(got[name], value, rtol=0.05, atol=0.05, err_msg=name)
        elif tolerance and floating:
            np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)
