"""The table: optimizers x models x dtypes, each row beside plain MLX from the same seeds."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from helpers import (
    HOST_SCHEDULES,
    NATIVE,
    OPTIMIZERS,
    LossFn,
    Row,
    StepFn,
    Taken,
    Tree,
    assert_close,
    compiled_step,
    copy_state,
    plain_step,
    rows,
    run,
    snapshot,
    to_numpy,
)
from models import MODELS

STEPS = 5
EVERY_OPTIMIZER = rows(["mlp"], list(OPTIMIZERS))
EVERY_MODEL = rows([name for name in MODELS if name != "mlp"], ["sgd-momentum", "adamw", "lion"])
TRACED_MODELS = rows(["conv", "tied", "nested", "lora", "bf16"], ["user-adam"])
CLIPPED = [*rows(list(MODELS), ["adamw"], 0.05), *rows(["mlp"], ["sgd-nesterov", "lion", "multi"], 0.05)]
TABLE = [*EVERY_OPTIMIZER, *EVERY_MODEL, *TRACED_MODELS, *CLIPPED]
COMPILABLE = [row for row in TABLE if not row.max_grad_norm and row.optimizer not in HOST_SCHEDULES]


def fast(model: nn.Module, optimizer: optim.Optimizer, loss_fn: LossFn, max_grad_norm: float | None) -> StepFn:
    """Make a step of the package in the shape of the reference's."""
    step = Step(model, optimizer, loss_fn, max_grad_norm=max_grad_norm)

    def take(*batch: Tree, **named: Tree) -> Taken:
        out = step(*batch, **named)
        return out.loss, out.grad_norm

    return take


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_each_step_from_the_references_state_is_the_references(row: Row) -> None:
    reference, ours = row.new(), row.new()
    take_plain = plain_step(*reference, row.case.loss_fn, row.max_grad_norm)
    step = Step(*ours, row.case.loss_fn, max_grad_norm=row.max_grad_norm)
    for seed, batch in enumerate(row.case.batches(3)):
        if seed:
            copy_state(reference, ours)
        mx.random.seed(seed)
        loss, norm = take_plain(*batch)
        wanted = snapshot(*reference)
        mx.random.seed(seed)
        out = step(*batch)
        np.testing.assert_allclose(out.loss, loss, rtol=row.case.tolerance)
        assert out.grad_norm is not None
        assert not out.skipped
        if norm is not None:
            np.testing.assert_allclose(to_numpy(out.grad_norm), to_numpy(norm), rtol=max(row.case.tolerance, 2e-6))
        assert_close(snapshot(*ours), wanted, row.case.tolerance)
    assert step.stats.way == row.way


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_run_stays_beside_the_reference(row: Row) -> None:
    losses, state = run(row, plain_step, STEPS)
    our_losses, our_state = run(row, fast, STEPS)
    np.testing.assert_allclose(our_losses, losses, atol=1e-3, rtol=0)
    assert_close(our_state, state, 1e-3 if row.case.tolerance <= 1e-6 else 5e-2)


@pytest.mark.parametrize("row", COMPILABLE, ids=str)
def test_without_clipping_every_bit_is_that_of_the_compiled_reference(row: Row) -> None:
    losses, state = run(row, compiled_step, STEPS)
    our_losses, our_state = run(row, fast, STEPS)
    assert our_losses == losses
    assert_close(our_state, state, 0)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "user-adam"])
def test_a_step_that_is_not_compiled_is_the_plain_loop(optimizer: str) -> None:
    row = Row("conv", optimizer)
    losses, state = run(row, plain_step, 3)
    model, opt = row.new()
    step = Step(model, opt, row.case.loss_fn, compile=False)
    mx.random.seed(11)
    assert [float(step(*batch).loss) for batch in row.case.batches(3)] == losses
    assert_close(snapshot(model, opt), state, 1e-6)
    assert step.stats.way == "plain"


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
    assert known - native == {optim.Optimizer, optim.MultiOptimizer, optim.Adafactor, optim.Muon}
