"""Losses made at random, beside their plain loops: the same losses, and the same left behind, at every step.

`FASTSTEP_FUZZ=100000` tries 2,000 of them; 60 otherwise.
"""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step, fast_step
from support.made_losses import MadeLoss

pytestmark = pytest.mark.filterwarnings("ignore:faststep. .* traces have been made")
SEEDS = max(60, int(os.environ.get("FASTSTEP_FUZZ", "2000")) // 50)
STEPS = 45
MAX_LOSS = 1e6  # beyond it the two differ by what they round


def left(program: MadeLoss, fast: bool) -> list[Any]:
    """Run a program; returns of each step its loss, what is there behind it, and which objects are the same."""
    mx.random.seed(0)
    model, loss_fn, between, shown, objects = program.made()
    optimizer = getattr(optim, program.optimizer)(1e-2)
    step, gradients = Step(model, optimizer, loss_fn, **program.options), nn.value_and_grad(model, loss_fn)
    found = list[Any]()
    for number in range(STEPS):
        between(number)
        before, loss = objects(), 0.0
        x = mx.random.normal((program.sizes[number % len(program.sizes)], 4), key=mx.random.key(number))
        try:
            if fast and program.way == "Step":
                loss = step(x).loss.item()
            elif fast:
                loss_now = (lambda *given: loss_fn(*given)) if "lambda" in program.way else loss_fn
                loss = fast_step(model, optimizer, loss_now, x, **program.options).item()
            else:
                value, grads = gradients(model, x)
                if "max_grad_norm" in program.options:
                    grads, _ = optim.clip_grad_norm(grads, program.options["max_grad_norm"])
                optimizer.update(model, grads)
                mx.eval(model.parameters(), optimizer.state)
                loss = value.item()
        except ArithmeticError:
            pass
        found.append([loss, shown(), [old is now for old, now in zip(before, objects(), strict=True)]])
    return found


@pytest.mark.filterwarnings("ignore:faststep. (all gradients have been zero|the loss of the first)")  # as drawn
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_made_loss_is_trained_as_in_its_plain_loop(seed: int) -> None:
    program = MadeLoss(seed)
    plain, ours = left(program, fast=False), left(program, fast=True)
    for number, (wanted, got) in enumerate(zip(plain, ours, strict=True)):
        if not abs(wanted[0]) < MAX_LOSS:
            break
        assert close(got, wanted), f"step {number} of\n{program.source}\n{got}\n{wanted}"


def close(got: Any, wanted: Any) -> bool:
    """Return whether two structures are equal, floats but for what is rounded."""
    if isinstance(wanted, dict):
        return list(got) == list(wanted) and all(close(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(close, got, wanted))
    if isinstance(wanted, float):
        return isinstance(got, float) and got == pytest.approx(wanted, rel=5e-4, abs=1e-6)
    return type(got) is type(wanted) and bool(got == wanted)
