"""Programs of the kinds that people train, each beside its own plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from support.helpers import LossFn, Tree, assert_close, flat, plain_step, to_numpy
from support.programs import PROGRAMS
from support.programs.parts import Make

WIDTH, ROUNDS = 16, 7
# Of a loss, where it is more than one: a number that changes is found out by a second trace and an input of the third,
# and what changes the form of the graph (a string, a smoothing of 0, an array that is lazy) makes one more.
TRACES = {
    "gan": 2,
    "sac": 2,
    "dqn": 3,
    "ppo": 3,
    "teacher": 3,
    "distillation": 3,
    "curriculum": 4,
    "dpo": 4,
    "annealed": 5,
}


def plain(model: nn.Module, optimizer: optim.Optimizer, loss_fn: LossFn, **options: Any) -> Callable[..., Tree]:
    take = plain_step(model, optimizer, loss_fn, **options)
    return lambda *batch: take(*batch)[0]


def ours(model: nn.Module, optimizer: optim.Optimizer, loss_fn: LossFn, **options: Any) -> Callable[..., Tree]:
    return lambda *batch: fast_step(model, optimizer, loss_fn, *batch, **options)


def run(name: str, make: Make) -> dict[str, np.ndarray]:
    """Take some rounds; return each loss and all parameters."""
    program = PROGRAMS[name].new(make, WIDTH)
    losses = [[float(loss) for loss in program.round(number)] for number in range(ROUNDS)]
    state = {path: to_numpy(array) for path, array in flat([each.parameters() for each in program.models]).items()}
    return state | {"losses": np.array(losses)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_to_the_numbers_of_its_plain_loop(name: str) -> None:
    wanted = run(name, plain)
    assert not np.array_equal(wanted["losses"][0], wanted["losses"][-1])
    assert_close(run(name, ours), wanted, 2e-5)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "diffusion"])
def test_a_program_is_compiled_and_is_not_traced_anew(name: str) -> None:
    steps: list[Step] = []

    def make(*args: Any, **options: Any) -> Callable[..., Tree]:
        step = Step(*args, **options)
        steps.append(step)

        def take(*batch: Tree) -> Tree:
            out = step(*batch)
            return (out.loss, *out.aux) if out.aux else out.loss

        return take

    run(name, make)
    used = [step.stats for step in steps if step.stats.steps]
    assert "plain" not in [stats.mode for stats in used]
    assert max(stats.traced for stats in used) <= TRACES.get(name, 1)
