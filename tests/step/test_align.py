"""Products of odd dimensions and the cross entropy behind them, padded and fused on CUDA, beside plain MLX."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, profile
from mlx.utils import tree_flatten
from support.cuda import NEEDS_CUDA
from support.replays import STEPS

pytestmark = NEEDS_CUDA

VOCABULARY, WIDTH = 1027, 512
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}
LossFn = Callable[[nn.Module, mx.array], mx.array]


class Head(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, VOCABULARY]."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.head(nn.relu(self.hidden(self.tokens(x))))


def upcast(model: nn.Module, x: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(x).astype(mx.float32), x, reduction="mean")


def as_it_is(model: nn.Module, x: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(x), x).astype(mx.float32).mean()


def weighted(model: nn.Module, x: mx.array) -> mx.array:
    weights = (x % 3 != 0).astype(mx.float32)
    return nn.losses.cross_entropy(model(x).astype(mx.float32), x, weights=weights).sum() / weights.sum()


def masked(model: nn.Module, x: mx.array) -> mx.array:
    logits = mx.where(mx.arange(VOCABULARY) < VOCABULARY - 5, model(x).astype(mx.float32), -mx.inf)
    return nn.losses.cross_entropy(logits, mx.minimum(x, VOCABULARY - 6), reduction="mean")


def own_logsumexp(model: nn.Module, x: mx.array) -> mx.array:
    logits = model(x).astype(mx.float32)
    return (mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, x[..., None], axis=-1)[..., 0]).mean()


def train(
    loss_fn: LossFn, bias: bool, dtype: mx.Dtype, replay: bool | None
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train for some steps; ``replay`` None: as plain MLX does."""
    mx.random.seed(0)
    model = Head(bias)
    model.set_dtype(dtype)
    optimizer = optim.SGD(0.5)
    mx.eval(model.parameters())
    rng = np.random.default_rng(0)
    step = None if replay is None else Step(model, optimizer, loss_fn, replay=replay)
    losses = []
    for _ in range(6):
        x = mx.array(rng.integers(VOCABULARY, size=(8, 270)).astype(np.int32))
        if step is not None:
            losses.append(step(x).loss.item())
        else:
            loss, grads = nn.value_and_grad(model, loss_fn)(model, x)
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)
            losses.append(loss.item())
    return losses, {name: np.array(array.astype(mx.float32)) for name, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize("replay", [False, True], ids=["evaluated", "replayed"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("loss_fn", [upcast, as_it_is, weighted, masked, own_logsumexp])
def test_odd_vocabularies_train_as_plain_mlx_does(loss_fn: LossFn, bias: bool, dtype: mx.Dtype, replay: bool) -> None:
    losses, parameters = train(loss_fn, bias, dtype, None)
    ours, trained = train(loss_fn, bias, dtype, replay)
    np.testing.assert_allclose(ours, losses, rtol=TOLERANCE[dtype])
    for name, array in parameters.items():
        np.testing.assert_allclose(trained[name], array, atol=TOLERANCE[dtype], err_msg=name)


def test_logits_in_half_precision_have_no_copy_in_float32() -> None:
    mx.random.seed(0)
    model = Head(bias=False)
    x = mx.array(np.random.default_rng(0).integers(VOCABULARY, size=(64, 1024)).astype(np.int32))
    model.set_dtype(mx.bfloat16)

    def peak(take: Callable[[], Any]) -> int:
        for _ in range(3):
            mx.eval(take())
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(take())
        return mx.get_peak_memory()

    grads = mx.compile(lambda x: nn.value_and_grad(model, upcast)(model, x))  # less than a step
    plain = peak(lambda: grads(x))
    step = Step(model, optim.SGD(0.1), upcast, in_flight=1)
    assert peak(lambda: step(x).loss) < plain - 4 * x.size * VOCABULARY


def test_a_captured_gradient_lies_where_the_logits_did() -> None:
    model, classes, rows = nn.Linear(64, 4099, bias=False), 4099, 16384

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x), y, reduction="mean")

    step = Step(model, optim.SGD(0.1), loss_fn, replay=True)
    x, y = mx.random.normal((rows, 64)), mx.random.randint(0, classes, (rows,))
    for _ in range(STEPS):
        step(x, y)
    (trace,) = step.stats.traces
    found = re.fullmatch(r"captured .* (\d+) bytes", str(trace.replay))
    assert found, trace.replay
    assert int(found[1]) < 1.5 * 4 * rows * classes


def test_the_gradient_of_an_odd_head_is_one_product() -> None:
    step = Step(Head(bias=False), optim.SGD(0.5), upcast)
    x = mx.zeros((8, 270), dtype=mx.int32)
    step(x)
    with profile(step) as found:
        pass
    found.measure(x)
    products = [each for each in found.operations if each.name in ("Matmul", "AddMM")]
    assert len(products) == 6  # two layers: forward, gradients of inputs, gradients of weights
