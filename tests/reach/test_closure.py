"""What a loss reads, changes and keeps in cells, globals, functions and caches: beside the plain loop."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.beside import Variant, beside, cases
from support.helpers import assert_close, snapshot
from support.programs.reach import Program

pytestmark = pytest.mark.filterwarnings("ignore:faststep:RuntimeWarning")


@pytest.mark.parametrize(("program", "variant"), cases("closure"))
def test_a_program_is_its_plain_loop(program: Program, variant: Variant) -> None:
    beside(program, variant)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_error_of_the_loss_leaves_arrays_as_they_were(at: int, compiled: bool) -> None:
    teacher = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, x: mx.array, fails: bool) -> mx.array:
        loss = mx.square(model(teacher(x))).mean()
        if fails:
            raise KeyError("mine")
        return loss

    model, optimizer = nn.Sequential(nn.BatchNorm(4), nn.Linear(4, 2)), optim.Adam(0.1)
    step, reached = Step(model, optimizer, loss_fn, compile=compiled), mx.array(teacher.weight)
    x = mx.random.normal((8, 4))
    for number in range(5):
        before = snapshot(model, optimizer)
        if number == at:
            with pytest.raises(KeyError, match="mine"):
                step(x, True)
            after = snapshot(model, optimizer)
            assert_close({name: after[name] for name in before}, before, 0)
        else:
            step(x, False)
            assert not np.array_equal(snapshot(model)["model.layers.1.weight"], before["model.layers.1.weight"])
        np.testing.assert_array_equal(teacher.weight, reached)
