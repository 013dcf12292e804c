"""A loop in mixed precision, written out in plain MLX, and its comparison with a step."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from faststep import Step
from mlx.utils import tree_map

from support.helpers import LossFn, Row, Tree, assert_close, copy_tree, flat, snapshot, to_numpy

Pair = tuple[nn.Module, optim.Optimizer]
Batch = tuple[mx.array, ...]
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
SCALE = 65536.0  # of a float16 loss at first


class MixedLoop:
    """The loop that such a step replaces: a float32 copy is updated by float32 gradients of a loss in another dtype."""

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, loss_fn: LossFn, dtype: mx.Dtype, norm: float | None = None
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.dtype, self.norm = model, optimizer, loss_fn, dtype, norm
        self.scale = SCALE if dtype == mx.float16 else 1.0
        masters = tree_map(lambda p: p.astype(mx.float32), model.trainable_parameters())
        optimizer.init(masters)
        self.kept = {"masters": masters}
        self.state = [model.state, optimizer.state, self.kept, mx.random.state]
        self.compiled = mx.compile(self.build, inputs=self.state, outputs=self.state)

    def __call__(self, *window: Batch) -> mx.array:
        """Update by the mean gradient of the batches, and return the last one's loss."""
        loss: mx.array = self.compiled(window)
        mx.eval(loss, self.state)
        return loss

    @property
    def masters(self) -> Tree:
        """The float32 copy."""
        return self.kept["masters"]

    def build(self, window: tuple[Batch, ...]) -> mx.array:
        shown = self.model.trainable_parameters()
        losses, gradients = zip(*[self.gradients(shown, batch) for batch in window], strict=True)
        mean = tree_map(lambda *gs: sum(gs[1:], gs[0]) / len(window), *gradients)
        if self.norm is not None:
            mean, _ = optim.clip_grad_norm(mean, self.norm)
        self.kept["masters"] = self.optimizer.apply_gradients(mean, self.masters)
        self.model.update(tree_map(lambda new, old: new.astype(old.dtype), self.masters, shown))
        last: mx.array = losses[-1]
        return last

    def gradients(self, shown: Tree, batch: Batch) -> tuple[mx.array, Tree]:
        self.model.update(tree_map(lambda p: p.astype(self.dtype), shown))
        batch = tuple(a.astype(self.dtype) if a.dtype == mx.float32 else a for a in batch)
        (_, loss), gradients = nn.value_and_grad(self.model, self.scaled)(*batch)
        return loss, tree_map(lambda g: g.astype(mx.float32) / self.scale, gradients)

    def scaled(self, *batch: mx.array) -> tuple[mx.array, mx.array]:
        loss = self.loss_fn(self.model, *batch)
        return loss.astype(mx.float32) * self.scale, loss


def pairs(name: str, optimizer: str, dtype: str) -> tuple[Pair, Pair, list[Batch]]:
    """Build two equal models of that dtype, BatchNorm's buffers aside, with their optimizers, and batches for both."""
    row = Row(name, optimizer)
    both = row.new(), row.new()
    for model, _ in both:
        kept = [(module, copy_tree(dict(module))) for module in model.modules() if isinstance(module, nn.BatchNorm)]
        if dtype != "float32":
            model.set_dtype(DTYPES[dtype])
        for module, arrays in kept:
            module.update({key: arrays[key] for key in ("running_mean", "running_var")})
    return both[0], both[1], row.case.batches(12)


def masters(step: Step) -> dict[str, np.ndarray]:
    """Copy the masters that a step keeps."""
    kept = flat(step.state.get("masters", {}))
    assert {array.dtype for array in kept.values()} <= {mx.float32}
    return {name: np.array(array) for name, array in kept.items()}


def compare(step: Step, ours: Pair, loop: MixedLoop, tolerance: float = 0) -> None:
    """Compare all that a step has changed with the loop's; 0: every bit."""
    kept, wanted = masters(step), {name: np.array(array) for name, array in flat(loop.masters).items()}
    shown = flat(ours[0].trainable_parameters())
    assert kept.keys() == {name for name, array in shown.items() if array.dtype != mx.float32}
    on_gpu = 2e-6 if loop.dtype == mx.float32 else 1e-3
    assert_close(kept, {name: wanted[name] for name in kept}, tolerance, on_gpu=on_gpu)
    got, theirs = snapshot(*ours), snapshot(loop.model, loop.optimizer)
    for name in kept if tolerance else ():  # masters that differ by a bit may round to neighbours
        rounded = to_numpy(mx.array(kept[name]).astype(shown[name].dtype))
        np.testing.assert_array_equal(got[f"model.{name}"], rounded)
        theirs[f"model.{name}"] = got[f"model.{name}"]
    assert_close(got, theirs, tolerance, on_gpu=on_gpu)
