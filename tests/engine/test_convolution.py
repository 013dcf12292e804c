"""Convolutions in a step on a CPU: the bits of MLX's, and gradients that are as close to float64 as MLX's."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.places import Child
from support.replays import NEEDS_CPU

pytestmark = NEEDS_CPU


class Shape(NamedTuple):
    """The second of two convolutions."""

    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    size: tuple[int, int] = (9, 7)
    channels: tuple[int, int] = (3, 5)
    images: int = 2


SHAPES = {
    "3 x 3": Shape(),
    "one pixel": Shape(kernel=(1, 1), padding=(0, 0)),
    "one of every second pixel": Shape(kernel=(1, 1), stride=(2, 2), padding=(0, 0)),
    "without padding": Shape(padding=(0, 0)),
    "more padding than kernel": Shape(kernel=(2, 2), padding=(2, 3)),
    "every second pixel": Shape(stride=(2, 2)),
    "more apart than wide": Shape(kernel=(2, 2), stride=(3, 4), size=(11, 14)),
    "not square": Shape(kernel=(2, 5), stride=(1, 3), padding=(0, 2), size=(6, 16)),
    "as large as the image": Shape(kernel=(9, 7), padding=(0, 0)),
    "many patches": Shape(size=(40, 33), images=4),
    "few patches": Shape(kernel=(1, 1), padding=(0, 0), size=(4, 4), channels=(256, 512), images=1),
    "of ResNet-20": Shape(size=(32, 32), channels=(16, 16), images=32),
    "many channels": Shape(size=(8, 8), channels=(160, 48), images=8),
}


class Two(nn.Module):
    """Two convolutions, of which the second gives the first its gradient."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inputs, outputs = shape.channels
        self.first = nn.Conv2d(inputs, inputs, 3, padding=1, bias=False)
        self.second = nn.Conv2d(inputs, outputs, shape.kernel, stride=shape.stride, padding=shape.padding, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [images, height, width, channels] to what the second one makes of it."""
        return self.second(mx.abs(self.first(x)))


def loss_fn(model: Two, x: mx.array) -> tuple[mx.array, mx.array]:
    """Return a loss, a float32 scalar, and what it is made of."""
    y = model(x)
    return (y * y).sum(), y


def new_model(shape: Shape) -> Two:
    """Make a model without biases, equal each time."""
    mx.random.seed(0)
    return Two(shape)


def images(shape: Shape) -> mx.array:
    """Draw images, equal each time."""
    rng = np.random.default_rng(0)
    return mx.array(rng.standard_normal((shape.images, *shape.size, shape.channels[0])).astype(np.float32))


def by_step(model: Two, x: mx.array) -> tuple[mx.array, list[mx.array]]:
    """Return what a step computes, and the gradients of both weights: SGD's first momentum."""
    optimizer = optim.SGD(1e-3, momentum=0.9)
    out = Step(model, optimizer, loss_fn)(x)
    return out.aux[0], [optimizer.state[name]["weight"]["v"] for name in ("first", "second")]


def by_mlx(model: Two, x: mx.array) -> tuple[mx.array, list[mx.array]]:
    """Return the same of plain MLX."""
    (_, y), gradients = nn.value_and_grad(model, loss_fn)(model, x)
    return y, [gradients[name]["weight"] for name in ("first", "second")]


class Exact(NamedTuple):
    """A convolution in float64."""

    weight: np.ndarray
    shape: Shape

    def patches(self, x: np.ndarray) -> np.ndarray:
        """Return a view, [images, rows, columns, channels, kernel height, kernel width], of padded images."""
        (down, right) = self.shape.stride
        return np.lib.stride_tricks.sliding_window_view(x, self.shape.kernel, (1, 2))[:, ::down, ::right]

    def padded(self, x: np.ndarray) -> np.ndarray:
        """Put zeros around images."""
        top, left = self.shape.padding
        return np.pad(x, [(0, 0), (top, top), (left, left), (0, 0)])

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Map images to those of other channels."""
        return np.einsum("nrcihw,ohwi->nrco", self.patches(self.padded(x)), self.weight, optimize=True)

    def backward(self, x: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradients of images and weights."""
        padded = self.padded(x)
        weight = np.einsum("nrco,nrcihw->ohwi", gradient, self.patches(padded), optimize=True)
        back = np.zeros_like(padded)
        (down, right), (rows, columns) = self.shape.stride, gradient.shape[1:3]
        for row, column in np.ndindex(*self.shape.kernel):
            place = back[:, row : row + rows * down : down, column : column + columns * right : right]
            place += gradient @ self.weight[:, row, column]
        (top, left), (height, width) = self.shape.padding, x.shape[1:3]
        return back[:, top : top + height, left : left + width], weight


def exactly(model: Two, shape: Shape, x: mx.array) -> list[np.ndarray]:
    """Return the gradients of both weights in float64."""
    first = Exact(np.array(model.first.weight, np.float64), Shape())
    second = Exact(np.array(model.second.weight, np.float64), shape)
    images = np.array(x, np.float64)
    y = first.forward(images)
    back, of_second = second.backward(np.abs(y), 2 * second.forward(np.abs(y)))
    _, of_first = first.backward(images, back * np.sign(y))
    return [of_first, of_second]


def farthest(gradients: list[mx.array], exact: list[np.ndarray]) -> list[float]:
    """Return how far each gradient is from float64, as a share of its largest number."""
    pairs = zip(gradients, exact, strict=True)
    return [float(np.abs(np.array(got, np.float64) - wanted).max() / np.abs(wanted).max()) for got, wanted in pairs]


@pytest.mark.parametrize("name", SHAPES)
def test_results_have_mlx_s_bits_and_gradients_are_as_close_to_float64(name: str) -> None:
    shape = SHAPES[name]
    x = images(shape)
    wanted, theirs = by_mlx(new_model(shape), x)
    got, ours = by_step(new_model(shape), x)
    assert np.array(got).tobytes() == np.array(wanted).tobytes()
    exact = exactly(new_model(shape), shape, x)
    for our, their in zip(farthest(ours, exact), farthest(theirs, exact), strict=True):
        assert our < max(2 * their, 1e-6)


SAME = """
import mlx.core as mx
from engine.test_convolution import SHAPES, by_mlx, by_step, images, new_model
for shape in SHAPES.values():
    (y, gradients), (wanted, theirs) = (way(new_model(shape), images(shape)) for way in (by_step, by_mlx))
    assert all(mx.array_equal(*pair) for pair in zip([y, *gradients], [wanted, *theirs]))
"""


def test_without_own_kernels_gradients_have_mlx_s_bits(child: Child) -> None:
    child(SAME, FASTSTEP_KERNELS="0")
