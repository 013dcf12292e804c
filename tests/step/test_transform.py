"""A function between gradients and update, `transform`: beside the plain loop that calls it there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step, fast_step
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten
from support.helpers import Row, Tree, assert_close, assert_same, plain_step, snapshot

Transform = Callable[[nn.Module, Tree], Tree]
STEPS = 8


def by_layer(model: nn.Module, gradients: Tree) -> Tree:
    """Clip the gradients of each layer."""
    return {name: optim.clip_grad_norm(layer, 0.05)[0] for name, layer in gradients.items()}


def masked(model: nn.Module, gradients: Tree) -> Tree:
    """Train no bias."""
    return tree_map_with_path(lambda path, gradient: gradient * ("bias" not in path), gradients)


def noisy(model: nn.Module, gradients: Tree) -> Tree:
    """Scale by chance; noise that is added may leave a last bit, which Adam makes as large as any gradient."""
    return tree_map(lambda gradient: gradient * (1 + 0.1 * mx.random.normal(gradient.shape)), gradients)


def centred(model: nn.Module, gradients: Tree) -> Tree:
    """Take the mean away from each row."""
    flat = [(path, g - g.mean(-1, keepdims=True) if g.ndim > 1 else g) for path, g in tree_flatten(gradients)]
    centred: Tree = tree_unflatten(flat)
    return centred


def relative(model: nn.Module, gradients: Tree) -> Tree:
    """Clip each gradient to a share of its parameter's norm (AGC)."""

    def clipped(gradient: mx.array, parameter: mx.array) -> mx.array:
        most = 0.01 * mx.maximum(mx.linalg.norm(parameter), 1e-3)
        return gradient * mx.minimum(1, most / (mx.linalg.norm(gradient) + 1e-6))

    return tree_map(clipped, gradients, model.trainable_parameters())


def partial(model: nn.Module, gradients: Tree) -> Tree:
    """Leave the biases out."""
    kept: Tree = tree_unflatten([(path, g) for path, g in tree_flatten(gradients) if "bias" not in path])
    return kept


class Decayed:
    """Halves the gradients with a number of Python, at every fourth update."""

    def __init__(self) -> None:
        self.updates, self.share = 0, 1.0

    def __call__(self, model: nn.Module, gradients: Tree) -> Tree:
        """Count, and scale."""
        self.updates += 1
        if self.updates % 4 == 0:
            self.share /= 2
        return tree_map(lambda gradient: gradient * self.share, gradients)


class Transformed:
    """The update of the plain loop."""

    def __init__(self, optimizer: optim.Optimizer, transform: Transform) -> None:
        self.optimizer, self.transform = optimizer, transform

    @property
    def state(self) -> Any:
        """That of the optimizer."""
        return self.optimizer.state

    def update(self, model: nn.Module, gradients: Tree) -> None:
        """Update by other gradients."""
        self.optimizer.update(model, self.transform(model, gradients))


class Clipping(optim.AdamW):
    """An optimizer of one's own that transforms the gradients itself."""

    def update(self, model: nn.Module, gradients: Tree) -> None:
        """Update by other gradients."""
        super().update(model, by_layer(model, gradients))


@pytest.mark.parametrize("optimizer", ["adamw", "multi", "user-adam"])
@pytest.mark.parametrize("transform", [by_layer, masked, noisy, centred, relative, partial, Decayed])
def test_the_optimizer_takes_what_it_returns(transform: Any, optimizer: str) -> None:
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    reference[1].init(reference[0].trainable_parameters())
    one, other = (transform(), transform()) if transform is Decayed else (transform, transform)
    plain = plain_step(reference[0], Transformed(reference[1], one), row.case.loss_fn, 0.5)  # type: ignore[arg-type]
    step = Step(*ours, row.case.loss_fn, max_grad_norm=0.5, transform=other)
    for number, batch in enumerate(row.case.batches(STEPS)):
        mx.random.seed(number)
        loss, norm = plain(*batch)
        mx.random.seed(number)
        out = step(*batch)
        assert_same([out.loss, out.grad_norm], [loss, norm], 2e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    assert step.stats.mode == ("called" if transform is Decayed else "native"), step.stats
    if transform is Decayed:
        assert "transform of the gradients" in str(step.stats.reason)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"accumulate": 2},
    "masters": {"compute_dtype": mx.bfloat16},
    "average": {"ema_decay": 0.9},
    "uncompiled": {"compile": False},
    "values": {"max_grad_value": 1e-3},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_it_goes_with_the_other_options(options: str) -> None:
    row = Row("mlp", "adamw")
    states = []
    for optimizer, transform in ((Clipping(1e-2), None), (optim.AdamW(1e-2), by_layer)):
        model = row.new()[0]
        step = Step(model, optimizer, row.case.loss_fn, transform=transform, **OPTIONS[options])
        batches = row.case.batches(STEPS)
        for number, batch in enumerate(batches):
            bad = [mx.full(array.shape, mx.nan) if array.dtype == mx.float32 else array for array in batch]
            step(*(bad if number == 5 else batch))
        states.append(snapshot(model, optimizer))
        assert step.stats.skipped == 1
    assert_close(states[1], states[0], 1e-6)


def test_steps_with_and_without_share_a_model() -> None:
    row = Row("mlp", "adamw")
    reference, ours = row.new(), row.new()
    loss_fn = row.case.loss_fn
    plain = plain_step(*reference, loss_fn), plain_step(reference[0], Transformed(reference[1], centred), loss_fn)  # type: ignore[arg-type]
    for number, batch in enumerate(row.case.batches(STEPS)):
        transforms = number % 3 == 1
        loss, _ = plain[transforms](*batch)
        assert_same(fast_step(*ours, loss_fn, *batch, transform=centred if transforms else None), loss, 2e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)


def test_what_it_must_be() -> None:
    row = Row("mlp", "adamw")
    model, optimizer = row.new()
    before = snapshot(model, optimizer)
    with pytest.raises(
        TypeError, match=r"transform: expected a function `transform\(model, gradients\)` or None, got int"
    ):
        Step(model, optimizer, row.case.loss_fn, transform=3)  # type: ignore[arg-type]
    returned = "transform: expected the dict of gradients that the optimizer takes, got NoneType"
    for transform, error, text in (
        (lambda model, gradients: None, TypeError, returned),
        (lambda model, gradients: 1 / 0, ZeroDivisionError, "division by zero"),
    ):
        with pytest.raises(error, match=text):
            Step(model, optimizer, row.case.loss_fn, transform=transform)(*row.case.batches(1)[0])  # type: ignore[arg-type]
        assert_close(snapshot(model, optimizer), before, 0)


def test_a_function_that_holds_its_step_goes_with_it() -> None:
    row = Row("mlp", "adamw")
    steps: list[Step] = []

    def transform(model: nn.Module, gradients: Tree, steps: list[Step] = steps) -> Tree:
        return gradients if steps else {}

    steps.append(Step(*row.new(), row.case.loss_fn, transform=transform))
    steps[0](*row.case.batches(1)[0])
    gone = weakref.ref(steps[0])
    del steps, transform
    gc.collect()
    assert gone() is None
