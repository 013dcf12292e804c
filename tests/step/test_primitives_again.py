"""Operations of a captured step beside those that MLX evaluates, of every kind that a CPU has: each bit is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import to_numpy
from support.replays import NEEDS_CPU, STEPS, is_captured, replayed

pytestmark = NEEDS_CPU

Operations = Callable[..., list[mx.array]]
Draw = Callable[[np.random.RandomState], np.ndarray]


def normal(*shape: int) -> Draw:
    """Draw float32 around 0."""
    return lambda rng: rng.randn(*shape).astype(np.float32)


def positive(*shape: int) -> Draw:
    """Draw float32 above 0.1."""
    return lambda rng: np.abs(rng.randn(*shape)).astype(np.float32) + 0.1


def below(most: int, *shape: int) -> Draw:
    """Draw int32."""
    return lambda rng: rng.randint(0, most, shape).astype(np.int32)


def definite(size: int) -> Draw:
    """Draw a symmetric matrix that is positive definite."""

    def draw(rng: np.random.RandomState) -> np.ndarray:
        root = rng.randn(size, size).astype(np.float32)
        return (root @ root.T + size * np.eye(size, dtype=np.float32)).astype(np.float32)

    return draw


def key(rng: np.random.RandomState) -> np.ndarray:
    """Draw a random key."""
    return rng.randint(0, 2**31, 2).astype(np.uint32)


def normed(x: mx.array, w: mx.array, b: mx.array) -> list[mx.array]:
    """Compute norms and their gradients."""
    layer = mx.grad(lambda x, w, b: (mx.fast.layer_norm(x, w, b, 1e-5) ** 2).sum(), (0, 1, 2))
    rms = mx.grad(lambda x, w: (mx.fast.rms_norm(x, w, 1e-5) ** 2).sum(), (0, 1))
    return [mx.fast.layer_norm(x, w, b, 1e-5), mx.fast.rms_norm(x, w, 1e-5), *layer(x, w, b), *rms(x, w)]


def quantized(x: mx.array, w: mx.array) -> list[mx.array]:
    """Quantize, multiply, take back."""
    packed = mx.quantize(w, 64, 4)
    return [mx.quantized_matmul(x, *packed, True, 64, 4), mx.dequantize(*packed, 64, 4)]


def convolved(x: mx.array, w: mx.array, v: mx.array, u: mx.array) -> list[mx.array]:
    """Convolve by the ways that write element by element."""
    return [
        mx.conv2d(x, w, groups=2),
        mx.conv_transpose2d(x, v, stride=2),
        mx.conv_transpose1d(x[:, 0], u, stride=2),
        mx.conv_transpose3d(x[:, None], v[:, None], stride=2),
    ]


CASES: dict[str, tuple[list[Draw], Operations]] = {
    "unary": ([positive(8, 33)], lambda a: [mx.exp(a), mx.erf(a), mx.rsqrt(a), mx.sin(a.T), -a[:, ::2]]),
    "binary": ([normal(8, 33), normal(33), normal(8, 1)], lambda a, b, c: [a + b, a * c, a / 2, a**2, a.T - c.T]),
    "integers": (
        [below(90, 40), lambda rng: rng.randint(1, 9, 40).astype(np.int32)],
        lambda a, b: [*mx.divmod(a, b), a % b, a < b, a & b, mx.left_shift(a, 1)],
    ),
    "select": ([normal(8, 33), normal(8, 33)], lambda a, b: [mx.where(a > 0, a, b), mx.clip(a, -1, 1)]),
    "reduce": (
        [normal(8, 3, 33)],
        lambda a: [a.sum(), a.sum(0), a.max(-1), a.mean((0, 2)), (a > -9).all(), a.prod(0), a.argmax(-1), a.argmin(0)],
    ),
    "copies": ([normal(8, 3, 33)], lambda a: [a.astype(mx.bfloat16), a.transpose(2, 0, 1).reshape(-1), mx.pad(a, 2)]),
    "products": (
        [normal(4, 8, 16), normal(4, 16, 12), normal(16, 12), normal(12)],
        lambda a, b, c, d: [a @ b, a @ c, b.swapaxes(1, 2) @ a.swapaxes(1, 2), mx.addmm(d, a[0], c), a[0].T @ a[1]],
    ),
    "half": (
        [normal(8, 16), normal(16, 12)],
        lambda a, b: [a.astype(mx.bfloat16) @ b.astype(mx.bfloat16), a.astype(mx.float16) @ b.astype(mx.float16)],
    ),
    "softmax": (
        [normal(8, 33)],
        lambda a: [mx.softmax(a, -1), mx.softmax(a.T, -1), mx.logsumexp(a, -1), mx.softmax(a.astype(mx.bfloat16), -1)],
    ),
    "norms": ([normal(8, 32), normal(32), normal(32)], normed),
    "attention": (
        [normal(1, 2, 8, 16), normal(1, 2, 8, 16)],
        lambda q, k: [
            mx.fast.scaled_dot_product_attention(q, k, k, scale=0.3, mask="causal"),
            mx.fast.rope(q, 16, traditional=False, base=1e4, scale=1.0, offset=0),
        ],
    ),
    "gather": (
        [normal(20, 8), below(20, 5), below(8, 5), below(20, 5, 8)],
        lambda a, i, j, k: [a[i], a[i, j], mx.take_along_axis(a, k, 0), mx.put_along_axis(a, k, mx.array(1.5), 0)],
    ),
    "scatter": ([normal(20, 8), below(20, 5), normal(5, 8)], lambda a, i, u: [a.at[i].add(u), a.at[i].maximum(u)]),
    "slices": (
        [normal(20, 8), normal(5, 4), below(4, 2)],
        lambda a, u, s: [a.at[2:7, 0:4].add(u), mx.slice(a, s, (0, 1), (5, 4)), mx.slice_update(a, u, s, (0, 1))],
    ),
    "joins": ([normal(6, 8), normal(3, 8)], lambda a, b: [mx.concatenate([a, b]), mx.roll(a, 3, 1), mx.repeat(a, 2)]),
    "made": ([normal(16)], lambda a: [mx.arange(16) + a, mx.eye(16) * a, mx.tri(16) * a, mx.full((16,), a[0])]),
    "random": (
        [key],
        lambda k: [mx.random.randint(0, 1 << 30, (33,), key=k), mx.random.normal((5, 7), key=k), *mx.random.split(k)],
    ),
    "sorted": (
        [normal(8, 33)],
        lambda a: [mx.sort(a, -1), mx.argsort(a, 0), mx.partition(a, 4, -1)[:, 4], mx.sort(mx.topk(a, 5), -1)],
    ),
    "scans": ([normal(8, 33)], lambda a: [mx.cumsum(a, 0), mx.cummax(a, 1), mx.logcumsumexp(a, 1)]),
    "convolutions": (
        [normal(2, 9, 9, 3), normal(4, 3, 3, 3), normal(2, 9, 3), normal(4, 3, 3)],
        lambda x, w, y, v: [mx.conv2d(x, w, padding=1), mx.conv1d(y, v), mx.conv3d(x[:, None], w[:, None])],
    ),
    "slow convolutions": ([normal(2, 9, 9, 4), normal(4, 3, 3, 2), normal(4, 3, 3, 4), normal(4, 3, 4)], convolved),
    "quantized": ([normal(4, 128), normal(64, 128)], quantized),
    "fft": (
        [normal(4, 32)],
        lambda a: [mx.abs(mx.fft.rfft(a)), mx.fft.irfft(mx.fft.rfft(a)), mx.hadamard_transform(a)],
    ),
    "factors": (
        [definite(6)],
        lambda a: [
            mx.linalg.cholesky(mx.stack([a, 2 * a]), stream=mx.cpu),
            mx.linalg.inv(a, stream=mx.cpu),
            *mx.linalg.lu(mx.stack([a, 2 * a]), stream=mx.cpu),
            *mx.linalg.qr(a, stream=mx.cpu),
            *mx.linalg.eigh(mx.stack([a, 2 * a]), stream=mx.cpu),
            mx.linalg.svd(a, stream=mx.cpu)[1],
        ],
    ),
}


class Weight(nn.Module):
    """One number, so that there is something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.ones(1)


@pytest.mark.parametrize("name", CASES)
def test_what_is_called_again_gives_the_same(name: str) -> None:
    draws, operations = CASES[name]

    def loss(model: Weight, *inputs: mx.array) -> tuple[mx.array, ...]:
        return (model.weight.square().sum(), *operations(*inputs))

    ends: list[list[Any]] = []
    for replay in (False, True):
        rng = np.random.RandomState(0)
        step = Step(Weight(), optim.SGD(0.1), loss, replay=replay)
        outs = [step(*(mx.array(draw(rng)) for draw in draws)) for _ in range(STEPS)]
        ends.append([to_numpy(array) for out in outs for array in (out.loss, *out.aux)])
    assert is_captured(step), replayed(step)
    for got, wanted in zip(ends[1], ends[0], strict=True):
        np.testing.assert_array_equal(got, wanted)
