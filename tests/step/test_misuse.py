"""Calls that cannot be meant so: what the error says, and that nothing has changed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step, fast_step

MODEL, OPTIMIZER = nn.Linear(3, 1), optim.SGD(0.1)
X, Y = mx.ones((4, 3)), mx.zeros((4, 1))


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return nn.losses.mse_loss(model(x), y)


def taking_all(model: nn.Module, x: mx.array, y: mx.array, **named: Any) -> mx.array:
    return nn.losses.mse_loss(model(x), y)


def without_model(x: mx.array, y: mx.array) -> mx.array:
    return nn.losses.mse_loss(MODEL(x), y)


def test_a_batch_that_is_not_unpacked() -> None:
    step = Step(MODEL, OPTIMIZER, loss_fn)
    with pytest.raises(TypeError, match=r"The batch is one tuple: call step\(\*batch\)"):
        step((X, Y))
    with pytest.raises(TypeError, match=r"The batch is one dict: call step\(\*\*batch\)"):
        step({"x": X, "y": Y})
    with pytest.raises(TypeError, match=r"one dict with the keys a, b; the loss function takes x, y after the model"):
        step({"a": X, "b": Y})
    with pytest.raises(TypeError, match=r"missing a required argument: 'y'\. The batch is one tuple"):
        step.gradients((X, Y))
    assert step.stats.steps == 0
    assert step(X, Y).loss.item() == loss_fn(MODEL, X, Y).item() or step.stats.steps == 1


def test_a_loss_that_is_none() -> None:
    with pytest.raises(TypeError, match="has to take the model first"):
        fast_step(MODEL, OPTIMIZER, without_model, X, Y)
    for call in (Step, fast_step):
        with pytest.raises(TypeError, match="expected a function of the model and a batch, got array"):
            call(MODEL, OPTIMIZER, loss_fn(MODEL, X, Y))
    with pytest.raises(ValueError, match="expected a floating loss, got one of int32: an integer has no gradient"):
        fast_step(MODEL, OPTIMIZER, lambda model, x, y: (model(x) > y).sum(), X, Y)


@pytest.mark.parametrize("loss", [loss_fn, taking_all], ids=lambda each: each.__name__)
def test_an_option_that_is_misspelt(loss: Any) -> None:
    with pytest.raises(TypeError, match="max_grad_nrm: no such option; did you mean max_grad_norm"):
        fast_step(nn.Linear(3, 1), optim.SGD(0.1), loss, X, Y, max_grad_nrm=1.0)
    with pytest.raises(TypeError, match=r"max_grad_nrm: no such option of Step\(...\); did you mean max_grad_norm\?"):
        Step(nn.Linear(3, 1), optim.SGD(0.1), loss, max_grad_nrm=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rate: no such option of .*expected one of accumulate, cache_limit, "):
        Step(nn.Linear(3, 1), optim.SGD(0.1), loss, rate=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"accumulate: it is an option of Step\(...\), not an argument of its calls"):
        Step(nn.Linear(3, 1), optim.SGD(0.1), loss)(X, Y, accumulate=2)
    model, optimizer = nn.Linear(3, 1), optim.SGD(0.1)
    fast_step(model, optimizer, loss, X, Y)
    with pytest.raises(TypeError, match="acumulate: no such option; did you mean accumulate"):
        fast_step(model, optimizer, loss, X, Y, acumulate=2)


def test_a_loss_may_have_an_argument_of_an_option_s_name() -> None:
    def loss(model: nn.Module, x: mx.array, weighted: mx.array, scale: float = 1.0, **named: mx.array) -> mx.array:
        return scale * (model(x) * weighted).mean() + named["weights"].sum()

    step = Step(nn.Linear(3, 1), optim.SGD(0.1), loss)
    assert step(X, weighted=Y, weights=Y).loss.item() == 0


def test_an_error_inside_of_the_loss_is_the_user_s() -> None:
    def broken(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return sum(x, y, model)  # type: ignore[call-overload, no-any-return]

    with pytest.raises(TypeError, match="sum"):
        fast_step(MODEL, OPTIMIZER, broken, X, Y)


def test_an_output_shows_what_it_has() -> None:
    shown = repr(Step(nn.Linear(3, 1), OPTIMIZER, loss_fn, accumulate=2)(X, Y))
    assert shown.startswith("StepOutput(loss=array(")
    assert "updated=False" in shown
    assert "_update" not in shown
