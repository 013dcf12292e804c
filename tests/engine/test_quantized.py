"""Quantized weights in a step on a CPU: MLX's numbers, closer to the exact ones in half precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step

ON_GPU = mx.default_device().type == mx.gpu
pytestmark = pytest.mark.skipif(ON_GPU, reason="on a GPU MLX's own kernels multiply")

FORMATS = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
LEAST, INNER = 48, 256


class Scaled(nn.Module):
    """Inputs times a parameter, times quantized weights."""

    def __init__(
        self, weights: mx.array, dtype: mx.Dtype, multiply: Callable[..., mx.array], transpose: bool = True, **how: Any
    ) -> None:
        super().__init__()
        self.weight, *scales = mx.quantize(weights, **how)
        if how["mode"] == "affine":
            self.scales, self.biases = (array.astype(dtype) for array in scales)
        else:
            (self.scales,) = scales
        self._multiply = partial(multiply, transpose=transpose, **how)
        self._unpack = partial(mx.dequantize, dtype=mx.float32, **how)
        self.freeze()
        inner = weights.shape[-1 if transpose else -2]
        self.scale = mx.ones((inner,), dtype=dtype)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [..., inner] to [..., columns]."""
        return self._multiply(x * self.scale, self.weight, *self._scales())

    def exact(self) -> np.ndarray:
        """Return the weights."""
        wide = [array if array.dtype == mx.uint8 else array.astype(mx.float32) for array in self._scales()]
        return np.array(self._unpack(self.weight, *wide)).astype(np.float64)

    def _scales(self) -> list[mx.array]:
        return [self.scales, self.biases] if "biases" in self else [self.scales]


def loss_fn(model: nn.Module, x: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
    """Return a weighted sum, and the product."""
    product = model(x)
    return (product.astype(mx.float32) * weight).sum(), product


def both(model: Scaled, x: mx.array, weight: mx.array) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return product and gradient, MLX's and the step's."""
    (_, product), gradients = nn.value_and_grad(model, loss_fn)(model, x, weight)
    expected = product, gradients["scale"]
    mx.eval(expected)
    (_, product), gradients = Step(model, optim.SGD(0.0), loss_fn).gradients(x, weight)
    found = product, gradients["scale"]
    return [tuple(np.array(array.astype(mx.float32)) for array in arrays) for arrays in (expected, found)]  # type: ignore[misc]


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest one, relative to the largest number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Draw an array, equal each time."""
    return mx.random.normal(shape, key=mx.random.key(len(shape) + shape[-1])).astype(dtype)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_products_and_gradients_are_those_of_mlx(
    dtype: mx.Dtype, mode: str, bits: int, group_size: int, transpose: bool
) -> None:
    columns = LEAST if transpose else 2 * 128
    weights = normal(columns, INNER) if transpose else normal(INNER, columns)
    how = {"mode": mode, "bits": bits, "group_size": group_size}
    model = Scaled(weights, dtype, mx.quantized_matmul, transpose, **how)
    x = normal(3, 7, INNER, dtype=dtype)
    expected, found = both(model, x, normal(3, 7, columns))
    exact = model.exact()
    exact = np.array(x.astype(mx.float32)).astype(np.float64) @ (exact.T if transpose else exact)
    if dtype == mx.float32:
        assert difference(found[0], expected[0]) < 1e-5
        assert difference(found[1], expected[1]) < 1e-5
    else:  # rounded once, not at each sum
        ulp = 2**-11 if dtype == mx.float16 else 2**-8
        assert difference(found[0], exact) < ulp < difference(expected[0], exact)


@pytest.mark.parametrize("width", [200 * 64, 64], ids=["pieces", "one"])
def test_large_matrices_are_unpacked_piece_by_piece(width: int) -> None:
    model = Scaled(normal(width, 512), mx.float32, mx.quantized_matmul, mode="affine", bits=4, group_size=64)
    x = normal(33, 512)
    expected, found = both(model, x, normal(33, width))
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) < 1e-5
    mx.clear_cache()
    step = Step(model, optim.SGD(0.0), loss_fn)
    step.gradients(x, normal(33, width))
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(step.gradients(x, normal(33, width)))
    assert mx.get_peak_memory() - before < 20 * 2**20 + 4 * 33 * width * 4


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
def test_experts_are_those_of_mlx(dtype: mx.Dtype, ordered: bool) -> None:
    experts = mx.random.randint(0, 5, (24, 2), key=mx.random.key(1)).astype(mx.uint32)
    if ordered:
        experts = mx.sort(experts.flatten()).reshape(48, 1)

    def multiply(x: mx.array, *packed: mx.array, **how: Any) -> mx.array:
        return mx.gather_qmm(x, *packed, rhs_indices=experts, sorted_indices=ordered, **how)

    model = Scaled(normal(5, 96, 128), dtype, multiply, mode="affine", bits=4, group_size=32)
    x = normal(48 if ordered else 24, 1, 1, 128, dtype=dtype)
    expected, found = both(model, x, normal(*experts.shape, 1, 96))
    assert np.abs(expected[0]).max() > 1
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) < (1e-5 if dtype == mx.float32 else 5e-2)


def test_a_batch_of_matrices_is_that_of_mlx() -> None:
    model = Scaled(normal(3, 64, 128), mx.float32, mx.quantized_matmul, mode="affine", bits=8, group_size=64)
    expected, found = both(model, normal(3, 10, 128), normal(3, 10, 64))
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) < 1e-5


def test_outside_a_step_and_where_it_is_told_to_mlx_multiplies_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled(normal(64, 128), mx.float32, mx.quantized_matmul, mode="affine", bits=4, group_size=64)
    x, weight = normal(9, 128), normal(9, 64)
    (_, before), _ = nn.value_and_grad(model, loss_fn)(model, x, weight)
    mx.eval(before)
    (_, traced), _ = Step(model, optim.SGD(0.0), loss_fn).gradients(x, weight)
    (_, plain), _ = Step(model, optim.SGD(0.0), loss_fn, compile=False).gradients(x, weight)
    monkeypatch.setenv("FASTSTEP_QUANTIZED", "0")
    (_, own), _ = Step(model, optim.SGD(0.0), loss_fn).gradients(x, weight)
    assert not mx.array_equal(before, traced)
    for product in (plain, own, model(x)):
        assert mx.array_equal(before, product)
