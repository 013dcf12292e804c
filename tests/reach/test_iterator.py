"""What a loss takes from iterators, generators, files and queues: once a call, as in the plain loop."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step
from support.beside import Variant, beside, cases, squares
from support.helpers import assert_close, snapshot
from support.programs.reach import Program

pytestmark = pytest.mark.filterwarnings("ignore:faststep:RuntimeWarning")


@pytest.mark.parametrize(("program", "variant"), cases("iterator"))
def test_a_program_is_its_plain_loop(program: Program, variant: Variant) -> None:
    beside(program, variant)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_iterator_that_ends_is_an_error_of_that_call(compiled: bool) -> None:
    numbers = iter([1.0, 2.0, 3.0])
    model, optimizer = nn.Linear(4, 2), optim.SGD(0.1)
    step = Step(model, optimizer, lambda model, x: squares(model, x) * next(numbers), compile=compiled)
    for _ in range(3):
        step(mx.ones((3, 4)))
    before = snapshot(model, optimizer)
    for _ in range(2):
        with pytest.raises(StopIteration):
            step(mx.ones((3, 4)))
        assert_close(snapshot(model, optimizer), before, 0)
