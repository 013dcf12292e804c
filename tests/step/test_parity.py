"""The table: optimizers x models x clipping x accumulation, each row beside plain MLX from the same seeds."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import (
    HOST_SCHEDULES,
    NATIVE,
    OPTIMIZERS,
    Row,
    assert_close,
    compiled_step,
    plain_step,
    run,
    taking,
    to_numpy,
)
from support.models import MODELS
from support.table import NORM, TABLE

COMPILABLE = [
    *(Row("mlp", optimizer) for optimizer in OPTIMIZERS if optimizer not in HOST_SCHEDULES),
    *(Row(model, optimizer) for model in MODELS if model != "mlp" for optimizer in ["sgd-momentum", "adamw", "lion"]),
    *(Row(model, "user-adam") for model in ["conv", "tied", "nested", "graph", "lora", "bf16"]),
]


@pytest.mark.usefixtures("own_quantized_products")
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_run_is_that_of_plain_mlx(row: Row) -> None:
    reference, ours = row.new(), row.new()
    updates = 3 if row.accumulate == 1 else 2
    wanted = run(row, reference, plain_step(*reference, row.case.loss_fn, **row.options), updates)
    step = Step(*ours, row.case.loss_fn, **row.options)
    assert_close(run(row, ours, taking(step), updates), wanted, row.case.tolerance)
    assert (step.stats.mode, step.stats.updates, step.stats.skipped) == (row.way, updates, 0)


@pytest.mark.usefixtures("own_quantized_products")
@pytest.mark.parametrize("row", COMPILABLE, ids=str)
def test_without_clipping_every_bit_is_that_of_the_compiled_reference(row: Row) -> None:
    reference, ours = row.new(), row.new()
    wanted = run(row, reference, compiled_step(*reference, row.case.loss_fn), 5)
    assert_close(run(row, ours, taking(Step(*ours, row.case.loss_fn)), 5), wanted, 0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "user-adam"])
def test_a_step_that_is_not_compiled_is_the_plain_loop(optimizer: str, accumulate: int) -> None:
    row = Row("conv", optimizer, NORM, accumulate=accumulate)
    reference, ours = row.new(), row.new()
    wanted = run(row, reference, plain_step(*reference, row.case.loss_fn, **row.options), 3)
    step = Step(*ours, row.case.loss_fn, **row.options, compile=False)
    assert_close(run(row, ours, taking(step), 3), wanted, 1e-6)
    assert step.stats.mode == "plain"


class Weights(nn.Module):
    """Parameters whose gradients are the arrays of the batch."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.parts = [mx.zeros(shape) for shape in shapes]

    def __call__(self, factors: list[mx.array]) -> mx.array:
        """Return the loss."""
        return mx.stack([(part * factor).sum() for part, factor in zip(self.parts, factors, strict=True)]).sum()


@pytest.mark.parametrize(
    "shapes",
    [[(1500, 1000)], [(300, 100)] * 50, [(1500, 1000), (7,), (300, 100)]],
    ids=["one-array", "many-arrays", "large-and-small"],
)
def test_the_norm_of_many_elements_is_exact(shapes: list[tuple[int, ...]]) -> None:
    rng = np.random.default_rng(0)
    factors = [rng.random(shape, dtype=np.float32) for shape in shapes]
    norm = np.sqrt(sum(np.square(factor.astype(np.float64)).sum() for factor in factors))
    model = Weights(shapes)
    step = Step(model, optim.SGD(1.0), lambda model, factors: model(factors), max_grad_norm=1.0)
    out = step([mx.array(factor) for factor in factors])
    assert out.grad_norm is not None
    np.testing.assert_allclose(to_numpy(out.grad_norm), norm, rtol=2e-6)
    np.testing.assert_allclose(model.parts[0], -factors[0] / norm, rtol=5e-6)


def test_the_table_has_every_optimizer_of_mlx() -> None:
    has = {type(make()) for make in OPTIMIZERS.values()}
    listed = [getattr(optim, name) for name in dir(optim)]
    known = {each for each in listed if isinstance(each, type) and issubclass(each, optim.Optimizer)}
    assert known - has == {optim.Optimizer}
    native = {type(make()) for make in NATIVE.values()}
    assert known - native == {optim.Optimizer}


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(16, 64, 64), (100, 200, 300), (50, 256, 96)])
def test_every_bit_of_a_layer_s_gradient_is_mlx_s(rows: int, inputs: int, outputs: int) -> None:
    x = mx.random.normal((rows, inputs), key=mx.random.key(0))
    model = nn.Linear(inputs, outputs)
    before = mx.array(model.weight)

    def loss(model: nn.Linear, x: mx.array) -> mx.array:
        return mx.square(model(x)).mean()

    _, gradients = nn.value_and_grad(model, loss)(model, x)
    step = Step(model, optim.SGD(1.0), loss)
    step(x)
    assert mx.array_equal(model.weight, before - gradients["weight"])
