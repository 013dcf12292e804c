"""The loop of plain MLX that a step replaces, with the options on which its numbers depend."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from faststep._step import Options, call_with

Tree = Any
_SCALE = 65536.0  # of a float16 loss at first, as the step's
EPS = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


class PlainLoop:
    """Loss, gradients, clipping, update and joint evaluation, by the functions of MLX alone.

    Args:
        model: The model.
        optimizer: The optimizer.
        loss_fn: The loss function.
        options: The step's options.
        accumulate: Batches of an update.
        factor: What gradients are multiplied by, for the rounding noise; but for 1, their norm is summed in another
            order too, and what is computed in half precision begins with weights a rounding error apart.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        loss_fn: Any,
        options: Options,
        accumulate: int = 1,
        factor: float = 1.0,
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.options = model, optimizer, loss_fn, options
        self._accumulate, self._factor = accumulate, factor
        dtype = options.compute_dtype
        self._scale = _SCALE if dtype is not None and dtype == mx.float16 else 1.0
        trainable = model.trainable_parameters()
        self._masters: Tree = None
        if dtype is not None:
            self._masters = tree_map(lambda each: each.astype(mx.float32), trainable)
        optimizer.init(trainable if self._masters is None else self._masters)
        self._window: list[tuple[Tree, Any]] = []
        self._calls = 0

    def __call__(self, batch: Any) -> mx.array:
        """Take a batch, and return its loss; everything is evaluated."""
        before = self.model.parameters()
        value, gradients = self.gradients(batch)
        loss, weight = value, 1.0
        if isinstance(value, tuple):
            loss, weight = value[0], value[1] if self.options.weighted else 1.0
        if self._is_good(loss, gradients):
            self._window.append((gradients, weight))
        else:
            self.model.update(before)
            self._scale = max(1.0, self._scale / 2)
        self._calls += 1
        if self._calls == self._accumulate:
            self._update()
        mx.eval(loss, self._window, self._masters, self.model.state, self.optimizer.state, mx.random.state)
        return mx.array(loss)

    def gradients(self, batch: Any) -> tuple[Any, Tree]:
        """Return what the loss function returns, and the gradients before clipping."""
        dtype = self.options.compute_dtype
        if dtype is None:
            value, gradients = call_with(batch, nn.value_and_grad(self.model, self.loss_fn), self.model)
            return value, tree_map(lambda each: each * self._factor, gradients)
        shown, scale = self.model.trainable_parameters(), self._scale
        computed = tree_map(functools.partial(_cast, dtype=dtype), shown)
        if self._factor != 1.0:
            computed = tree_map(functools.partial(nudged, dtype=dtype), computed)
        self.model.update(computed)
        batch = tree_map(lambda each: _cast(each, dtype) if getattr(each, "dtype", None) == mx.float32 else each, batch)

        def scaled(model: nn.Module, *arguments: Any, **named: Any) -> Any:
            value = self.loss_fn(model, *arguments, **named)
            first = value[0] if isinstance(value, tuple) else value
            return first.astype(mx.float32) * scale, value

        try:
            (_, value), gradients = call_with(batch, nn.value_and_grad(self.model, scaled), self.model)
        finally:
            self.model.update(shown)
        return value, tree_map(lambda each: each.astype(mx.float32) * (self._factor / scale), gradients)

    def _is_good(self, loss: mx.array, gradients: Tree) -> bool:
        if self.options.nonfinite == "allow":
            return True
        finite = mx.isfinite(loss) & mx.isfinite(_norm(gradients))
        if self.options.max_loss is not None:
            finite = finite & (loss <= self.options.max_loss)
        return bool(finite)

    def _update(self) -> None:
        window, self._window, self._calls = self._window, [], 0
        if not window:
            return
        gradients, options = _average(window), self.options
        if options.max_grad_norm is not None:
            clip = optim.clip_grad_norm if self._factor == 1.0 else _clip
            gradients, _ = clip(gradients, options.max_grad_norm)
        if options.max_grad_value is not None:
            most = options.max_grad_value
            gradients = tree_map(lambda each: mx.clip(each, -most, most), gradients)
        if self._masters is None:
            self.optimizer.update(self.model, gradients)
            return
        self._masters = self.optimizer.apply_gradients(gradients, self._masters)
        shown = self.model.trainable_parameters()
        self.model.update(tree_map(lambda master, old: master.astype(old.dtype), self._masters, shown))


def _clip(gradients: Tree, most: float) -> tuple[Tree, mx.array]:
    """Clip as `optim.clip_grad_norm` does, with the squares summed in another order.

    On a CPU one long sum in float32 is off by some 1e-5: MLX's norm of a small GPT by 2e-5.
    """
    named: dict[str, mx.array] = dict(tree_flatten(gradients))
    norm = mx.sqrt(sum((each.square().sum(axis=-1).sum() for each in named.values()), mx.array(0.0)))
    scale = mx.minimum(most / (norm + 1e-6), 1.0)
    return tree_map(lambda each: each * scale, gradients), norm


def nudged(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return an array of this dtype moved by a rounding error, up and down by turns; others as they are."""
    if array.dtype != dtype or array.dtype not in EPS:
        return array
    signs = 1 - 2 * (mx.arange(array.size) % 2).reshape(array.shape)
    return (array * (1 + signs * EPS[array.dtype])).astype(array.dtype)


def _cast(value: Any, dtype: mx.Dtype) -> Any:
    floating = isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
    return value.astype(dtype) if floating else value


def _norm(tree: Tree) -> mx.array:
    named: dict[str, mx.array] = dict(tree_flatten(tree))
    return mx.sqrt(sum((each.astype(mx.float32).square().sum() for each in named.values()), mx.array(0.0)))


def _average(window: list[tuple[Tree, Any]]) -> Tree:
    """Average gradients by their weights, in float32."""
    if len(window) == 1:
        return window[0][0]
    whole = sum(weight for _, weight in window)

    def mean(*parts: mx.array) -> mx.array:
        products = [each.astype(mx.float32) * weight for each, (_, weight) in zip(parts, window, strict=True)]
        total: mx.array = sum(products[1:], products[0]) / whole
        return total.astype(parts[0].dtype)

    averaged: Tree = tree_map(mean, *(gradients for gradients, _ in window))
    return averaged
