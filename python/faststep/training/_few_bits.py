"""Products with quantized weights while nothing trains: on a CPU by way of float32, as in the native step.

MLX's kernels for a CPU unpack the weights again for every row of the inputs. With 256 rows they take some thirty times
as long as unpacking once and multiplying.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_FEW = 8  # rows below which MLX's products are as fast
_METHODS = {nn.QuantizedLinear: "__call__", nn.QuantizedEmbedding: "as_linear"}


@contextlib.contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Let the quantized layers of a model multiply by way of float32, where MLX computes on a CPU.

    `FASTSTEP_QUANTIZED=0` leaves them to MLX, as it does in a step.
    """
    layers: list[Any] = []
    if mx.default_device().type == mx.cpu and os.environ.get("FASTSTEP_QUANTIZED") != "0":
        layers = [each for _, each in model.named_modules() if type(each) in _METHODS]
    kinds: list[Any] = [type(each) for each in layers]
    try:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = _unpacking(kind)
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind


@functools.cache
def _unpacking(kind: Any) -> Any:
    """Return a subclass of a kind of layer, whose products unpack the weights."""
    name = _METHODS[kind]

    def product(self: Any, x: mx.array) -> mx.array:
        if x.size < _FEW * x.shape[-1]:
            return getattr(kind, name)(self, x)  # type: ignore[no-any-return]
        packed = (self.weight, self.scales, self.get("biases"), self.group_size, self.bits, self.mode)
        y = x.astype(mx.float32) @ mx.dequantize(*packed, dtype=mx.float32).T
        if "bias" in self:
            y = y + self.bias
        return y.astype(x.dtype)

    return type(kind.__name__, (kind,), {name: product, "__module__": kind.__module__})
