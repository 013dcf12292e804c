"""What a loss reads, changes and keeps in cells, globals, functions and caches: beside the plain loop."""

from __future__ import annotations

import itertools
import random
import types
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.beside import Variant, beside, cases, squares
from support.helpers import assert_close, plain_step, snapshot
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


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("how", ["value", "random", "iterator", "generator", "store", "reshape", "dict", "flag"])
def test_numpy_arrays_that_the_plain_loop_refuses_are_mlxs_at_every_step(how: str, compiled: bool) -> None:
    seen: list[list[Any]] = []
    for ours in (False, True):
        mx.random.seed(0)
        random.seed(0)
        turns = itertools.cycle([1, 2, 3])
        kept = types.SimpleNamespace(
            n=0, log=[], last=None, aux={}, turns=iter(range(9)), generator=(each for each in turns)
        )

        def loss_fn(model: nn.Module, x: Any, kept: Any = kept) -> mx.array:
            kept.n += 1
            loss = squares(model, x)  # which refuses NumPy's
            if how == "value":
                kept.log.append(loss.item())
            elif how in ("store", "reshape"):
                kept.last = mx.stop_gradient(loss if how == "store" else model(x))
            elif how == "dict":
                kept.aux.update(loss=loss)
            elif how == "flag":
                return loss * (2 if x.max() > 1 else 1)
            factors = {
                "random": random.random,
                "iterator": lambda: next(kept.turns),
                "generator": lambda: next(kept.generator),
            }
            return loss * factors[how]() if how in factors else loss

        model, optimizer = nn.Linear(4, 2), optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn, compile=compiled)
        seen.append([])
        for number in range(6):
            x = np.random.RandomState(number).randn(3 + (number == 4), 4).astype(np.float32)
            loss = step(x).loss if ours else plain(mx.array(x))[0]
            refused = 1 if ours else 0  # the call that MLX has refused, once
            seen[-1].append((round(loss.item(), 5), kept.n - refused))
    assert seen[1] == seen[0]
