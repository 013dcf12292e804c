"""What CUDA computes by kernels of the package's own in place of MLX's. Needs an NVIDIA GPU; TF32 has to be off."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, profile
from mlx.utils import tree_flatten

IS_CUDA = mx.default_device() == mx.gpu and mx.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(not IS_CUDA, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(os.environ.get("MLX_ENABLE_TF32") != "0", reason="products in TF32 differ by more than kernels"),
    pytest.mark.timeout(300),  # a first kernel of each kind costs seconds of CUDA's compiler
]
STEPS = 2
VOCABULARY = 72


class Model(nn.Module):
    """Embedding, encoder and output layer."""

    def __init__(self, width: int, heads: int, layers: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(seq, width)
        self.blocks = nn.TransformerEncoder(layers, width, num_heads=heads)
        self.head = nn.Linear(width, VOCABULARY)

    def __call__(self, tokens: mx.array, mask: str | mx.array | None) -> mx.array:
        """Map tokens, [batch, seq], to logits."""
        x = self.tokens(tokens) + self.positions(mx.arange(tokens.shape[1]))
        return self.head(self.blocks(x, mask))


@dataclass(frozen=True)
class Case:
    """A model, its batch, and which operations of MLX are no longer there: name, dtype and shape."""

    width: int
    heads: int
    batch: int
    seq: int
    gone: tuple[str, ...]
    mask: str | None = "causal"
    dtype: mx.Dtype = mx.float32
    layers: int = 2


NORMED = "LayerNormVJP "
ROW_SUMS = r"Sum float32 \((\d+,){3}1\)"  # of the softmax's gradient
SOFTMAX = (r"Softmax float32 \((\d+,){3}", ROW_SUMS)
PRODUCTS = r"Matmul float32 \((\d+,){3}"
COLUMNS = r"Sum \w+ \((1,)+\d\d+\)"  # over what is no longer there: the gradients of biases
CASES = {
    "long": Case(64, 4, 4, 64, (*SOFTMAX, NORMED, COLUMNS)),
    "longer": Case(384, 6, 2, 256, (*SOFTMAX, NORMED, COLUMNS)),
    "odd": Case(96, 2, 3, 45, (*SOFTMAX, NORMED, COLUMNS)),
    "wide": Case(768, 12, 2, 40, (*SOFTMAX, NORMED, COLUMNS)),
    "wider than a warp keeps": Case(1056, 4, 2, 40, (*SOFTMAX, COLUMNS)),
    "few positions": Case(64, 4, 2, 16, (*SOFTMAX, NORMED, PRODUCTS)),
    "one head": Case(32, 1, 2, 12, (*SOFTMAX, NORMED, PRODUCTS)),
    "no mask": Case(64, 4, 4, 40, (ROW_SUMS, NORMED, COLUMNS), mask=None),
    "bfloat16": Case(64, 2, 2, 128, (NORMED, COLUMNS), dtype=mx.bfloat16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_is_that_of_plain_mlx(case: Case) -> None:
    def new() -> nn.Module:
        mx.random.seed(3)
        model = Model(case.width, case.heads, case.layers, case.seq)
        model.set_dtype(case.dtype)
        mx.eval(model.parameters())
        return model

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x, case.mask).astype(mx.float32), y, reduction="mean")

    rng = np.random.default_rng(5)
    tokens = mx.array(rng.integers(VOCABULARY, size=(STEPS, case.batch, case.seq + 1), dtype=np.int32))
    ours, plain = new(), new()
    first = dict(tree_flatten(new().parameters()))
    # SGD, whose parameters move by the gradients: Adam divides the error of a small one by its size
    step, optimizer = Step(ours, optim.SGD(0.1, momentum=0.9), loss_fn, max_grad_norm=1.0), optim.SGD(0.1, momentum=0.9)
    losses = []
    for i in range(STEPS):
        x, y = tokens[i, :, :-1], tokens[i, :, 1:]
        loss, grads = nn.value_and_grad(plain, loss_fn)(plain, x, y)
        grads, norm = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(plain, grads)
        mx.eval(plain.parameters(), optimizer.state)
        out = step(x, y)
        assert out.grad_norm is not None
        losses.append([out.loss.item(), loss.item(), out.grad_norm.item(), norm.item()])
    half = case.dtype != mx.float32
    got = np.array(losses)
    np.testing.assert_allclose(got[:, 0::2], got[:, 1::2], rtol=1e-2 if half else 1e-4)
    wanted = dict(tree_flatten(plain.parameters()))
    for name, value in dict(tree_flatten(ours.parameters())).items():
        a, b, before = (np.array(each[name].astype(mx.float32)) for each in ({name: value}, wanted, first))
        # a ReLU that a rounding error switches off changes some gradients by one position's share
        near = 2**-8 if half else 5e-3 * np.abs(b - before).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=near, err_msg=name)
    with profile(step) as found:
        pass
    found.measure(x, y)
    shown = [f"{each.name} {each.output}" for each in found.operations]
    assert any(each.startswith("CustomKernel") for each in shown)
    left = [each for each in shown for pattern in case.gone if re.match(pattern, each)]
    assert not left
