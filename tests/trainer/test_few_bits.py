"""Validation of a model in few bits: MLX's numbers, by products that are fast on a CPU, and layers as they were."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.data import Loader
from faststep.training import predict, validate


class Model(nn.Module):
    """An embedding in few bits, with a layer between it and itself."""

    def __init__(self, bias: bool = True, **how: Any) -> None:
        super().__init__()
        self.embedding, self.middle, self.norm = nn.Embedding(96, 64), nn.Linear(64, 64, bias=bias), nn.RMSNorm(64)
        nn.quantize(self, **how)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embedding.as_linear(self.norm(self.middle(self.embedding(tokens))))


def loss_fn(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]).astype(mx.float32), tokens[:, 1:], reduction="mean")


def tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 96, (rows, 17)).astype(np.int32)


@pytest.mark.parametrize(
    "how", [{"bits": 4}, {"bits": 3, "group_size": 32}, {"mode": "mxfp4", "group_size": 32, "bits": 4}]
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_are_those_of_mlx(how: dict[str, Any], dtype: mx.Dtype, bias: bool) -> None:
    model = Model(bias, **how)
    model.set_dtype(dtype)
    step = Step(model, optim.SGD(0.1), loss_fn)
    data = tokens(12)
    expected = np.mean([loss_fn(model, mx.array(data[i : i + 4])).item() for i in (0, 4, 8)])
    found = validate(step, Loader((data,), batch_size=4))
    assert found.loss == pytest.approx(expected, rel=1e-4 if dtype == mx.float32 else 5e-3)
    assert predict(step, Loader((data[:1, :4],), batch_size=1)).shape == (1, 4, 96)
    assert [type(each) for each in (model.embedding, model.middle)] == [nn.QuantizedEmbedding, nn.QuantizedLinear]


def test_layers_are_as_they_were_after_an_error() -> None:
    model = Model(bits=4)
    with pytest.raises(ZeroDivisionError):
        validate(Step(model, optim.SGD(0.1), lambda model, x: 1 / 0), Loader((tokens(2),), batch_size=2))
    assert type(model.middle) is nn.QuantizedLinear
