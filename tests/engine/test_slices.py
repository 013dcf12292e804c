"""Gradients of arrays that are read slice by slice: one operation, with the bits of MLX's sums."""

from __future__ import annotations

import json
from collections.abc import Callable

import faststep
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step
from support.helpers import assert_close, plain_step, snapshot
from support.places import Child

ON_CPU = mx.default_device() == mx.cpu

LENGTH = 12


class Net(nn.Module):
    """A sequence of hidden features, and a recurrent net over them."""

    def __init__(self, recurrent: Callable[[int, int], nn.Module] = nn.RNN) -> None:
        super().__init__()
        self.features, self.recurrent, self.head = nn.Linear(6, 8), recurrent(8, 8), nn.Linear(8, 3)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, length, 6] to [batch, length, 8]."""
        y: mx.array = mx.tanh(self.features(x))
        return y


def recurrent(model: Net, x: mx.array) -> mx.array:
    out = model.recurrent(model(x))
    return mx.square(model.head(out[0] if isinstance(out, tuple) else out)).mean()


def scan(model: Net, x: mx.array) -> mx.array:
    y = model(x)
    h, all_of_them = mx.zeros_like(y[:, 0]), []
    for t in range(LENGTH):
        h = y[:, t] * h + mx.sin(y[:, t])
        all_of_them.append(h.sum(-1))
    return mx.square(mx.stack(all_of_them, axis=1)).mean()


def whole_too(model: Net, x: mx.array) -> mx.array:
    y = model(x)
    return (y[:, 0] * y[:, 3]).mean() + mx.square(y[:, 5:]).mean() + mx.sin(y).mean() + mx.square(model.head(y)).mean()


def columns(model: Net, x: mx.array) -> mx.array:
    y, h = model(x), mx.zeros(x.shape[:2])
    for t in range(8):
        h = mx.tanh(0.5 * h + y[..., t] * (t + 1))
    return h.mean() + mx.square(y).mean() + mx.sin(y).mean()


def strided(model: Net, x: mx.array) -> mx.array:
    y = model(x)
    return (y[:, ::2] * y[:, 1::2]).sum() + (y[:, :5] ** 2).mean() + (y[:, -1] * y[:, 0]).mean() + y[::2, 1::3].sum()


def backwards(model: Net, x: mx.array) -> mx.array:
    y = model(x)
    return (y[:, ::-1][:, :3] * y[:, 3:6]).mean() + (y[0] * y[1]).mean() + (y[2] * model.head.weight[0].sum()).mean()


def overlapping(model: Net, x: mx.array) -> mx.array:
    y = model(x)
    return sum(((y[:, t : t + 3].sum(1) * y[:, t]).mean() for t in range(9)), mx.array(0.0))


def halves(model: Net, x: mx.array) -> mx.array:
    y = model(x)
    one, two = y[..., :4], y[..., 4:]
    return mx.square(mx.concatenate([one * 0.3 - two * 0.7, two * 0.3 + one * 0.7], axis=-1)).mean()


def negative_zeros(model: Net, x: mx.array) -> mx.array:
    y = model(x)
    return (-0.0 * y[:, 0]).sum() + (0.0 * y[:, 1]).sum() + y[:, 2].sum()


def none(model: Net, x: mx.array) -> mx.array:
    y = model(x)
    return y[:, :0].sum() + y[:, 3].sum() + mx.square(y[:, 5]).sum()


LOSSES = [scan, whole_too, columns, strided, backwards, overlapping, halves, negative_zeros, none]


def train_as_plain_mlx(layer: Callable[[int, int], nn.Module], loss_fn: Callable[..., mx.array], length: int) -> None:
    """Train in both ways, and compare each bit."""
    made = []
    for way in (plain_step, Step):
        mx.random.seed(0)
        model, optimizer = Net(layer), optim.Adam(1e-2)
        step = way(model, optimizer, loss_fn)
        for number in range(3):
            step(mx.random.normal((4, length, 6), key=mx.random.key(number)))
        made.append(snapshot(model))
    assert_close(made[1], made[0], 0)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda loss_fn: loss_fn.__name__)
def test_slices_train_as_in_plain_mlx(loss_fn: Callable[..., mx.array]) -> None:
    train_as_plain_mlx(nn.RNN, loss_fn, LENGTH)


@pytest.mark.parametrize("length", [LENGTH, 40])
@pytest.mark.parametrize("layer", ["RNN", "GRU", "LSTM"])
def test_recurrent_nets_train_as_in_plain_mlx(child: Child, layer: str, length: int) -> None:
    """With products summed in MLX's order: the gradient of a matrix is one product otherwise (test_joined_products)."""
    code = f"""
        from mlx import nn
        from engine.test_slices import recurrent, train_as_plain_mlx
        train_as_plain_mlx(nn.{layer}, recurrent, {length})
    """
    child(code, FASTSTEP_KERNELS="0")


def test_no_array_of_zeros_is_made_for_a_slice() -> None:
    step, x = Step(Net(), optim.SGD(1e-2), scan), mx.ones((4, LENGTH, 6))
    for _ in range(2):
        step(x)
    with faststep.profile(step) as recording:
        recording.measure(x)
    names = {operation.name for operation in recording.operations}
    assert not ON_CPU or names & {"SumOfSlices", "WithSlices"}
    assert "SliceUpdate" not in names


# Run in a child of its own: the peaks of a step over a long sequence, of the plain loop and of ours.
PEAKS = """
    import json
    import faststep, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = [nn.{layer}(128, 128) for _ in range(2)], nn.Linear(128, 4)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
                x = x[0] if isinstance(x, tuple) else x
            return self.head(x)

    def loss_fn(model, x):
        return mx.square(model(x)).mean()

    peaks = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer, x = Net(), optim.AdamW(1e-3), mx.random.normal((16, 150, 128))
        mx.eval(model.parameters(), x)
        step, gradients_of = faststep.Step(model, optimizer, loss_fn), nn.value_and_grad(model, loss_fn)
        for _ in range(3):
            mx.synchronize()
            mx.reset_peak_memory()
            if ours:
                step(x)
                mx.synchronize()
            else:
                loss, gradients = gradients_of(model, x)
                optimizer.update(model, gradients)
                mx.eval(loss, model.parameters(), optimizer.state)
        peaks.append(mx.get_peak_memory())
        del model, optimizer, step, gradients_of
    print(json.dumps(peaks))
"""


@pytest.mark.skipif(not ON_CPU, reason="a GPU's buffers are laid out otherwise")
@pytest.mark.parametrize("layer", ["RNN", "GRU", "LSTM"])
def test_a_long_sequence_peaks_below_the_plain_loop(layer: str, child: Child) -> None:
    plain, ours = json.loads(child(PEAKS.format(layer=layer)).stdout)
    assert ours <= plain, (ours, plain)
