"""Batches of a loader as arguments: a dict by name where the loss has these names, else whole."""

from __future__ import annotations

from typing import Any

import faststep
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep._step import call_with

BATCH = {"x": mx.ones((4, 3)), "y": mx.zeros((4, 1))}


def by_names(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return nn.losses.mse_loss(model(x), y)


def whole(model: nn.Module, batch: dict[str, mx.array], scale: float = 1.0) -> mx.array:
    return scale * nn.losses.mse_loss(model(batch["x"]), batch["y"])


def anything(model: nn.Module, **batch: mx.array) -> mx.array:
    return nn.losses.mse_loss(model(batch["x"]), batch["y"])


def placed(model: nn.Module, *batch: dict[str, mx.array]) -> mx.array:
    return whole(model, batch[0])


@pytest.mark.parametrize("loss_fn", [by_names, whole, anything, placed], ids=lambda each: each.__name__)
def test_a_dict_goes_where_the_loss_wants_it(loss_fn: Any) -> None:
    model, optimizer = nn.Linear(3, 1), optim.SGD(0.1)
    expected = by_names(model, **BATCH).item()
    step = faststep.Step(model, optimizer, loss_fn)
    assert call_with(BATCH, loss_fn, model).item() == expected
    assert call_with(BATCH, step.gradients)[0].item() == expected
    assert call_with(BATCH, nn.value_and_grad(model, loss_fn), model)[0].item() == expected
    assert call_with(BATCH, step).loss.item() == expected
    assert faststep.check(model, optimizer, loss_fn, [BATCH], steps=2, seconds=0).same


def test_one_key_of_the_argument_s_name_is_passed_by_name() -> None:
    assert call_with({"x": 1}, lambda model, x: x, None) == 1
    assert call_with({"z": 1}, lambda model, x: x, None) == {"z": 1}


def test_a_dict_that_fits_neither_way_is_refused() -> None:
    with pytest.raises(TypeError) as caught:
        call_with({"x": 1, "mask": 2}, by_names, None)
    assert str(caught.value) == (
        "batch: a dict with the keys x, mask was to be passed by name to by_names, which takes x, y: mask is none of "
        "its arguments, and y is missing. Give it these keys, or let the loss take the whole dict as its one argument"
    )
