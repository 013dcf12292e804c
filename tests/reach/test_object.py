"""What a loss reads, changes and keeps in objects, containers and arrays that are not the model's."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.beside import Variant, beside, cases
from support.helpers import assert_close, plain_step, snapshot
from support.programs.reach import Program

pytestmark = pytest.mark.filterwarnings("ignore:faststep:RuntimeWarning")


@pytest.mark.parametrize(("program", "variant"), cases("object"))
def test_a_program_is_its_plain_loop(program: Program, variant: Variant) -> None:
    beside(program, variant)


def used() -> int:
    mx.synchronize()
    gc.collect()
    return mx.get_active_memory()


def test_an_array_that_has_been_replaced_is_let_go_of_at_the_next_step() -> None:
    class Teacher:
        def __init__(self) -> None:
            self.table, self.net = mx.ones((512, 1024)), nn.Linear(4, 2)

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            return mx.square(model(x) - self.net(x)).mean() * self.table[0, 0]

    teacher, x = Teacher(), mx.ones((3, 4))
    step = Step(nn.Linear(4, 2), optim.SGD(0.1), teacher.loss, replay=False)  # which keeps copies of its own
    for _ in range(3):
        step(x)
    before = used()
    changes: list[Callable[[], object]] = [
        lambda: setattr(teacher, "table", mx.ones((512, 1024))),
        lambda: setattr(teacher, "table", mx.full((1024, 512), 2.0)),  # another form, another trace
        lambda: setattr(teacher, "table", mx.full((512, 1024), 3.0)),
        lambda: setattr(teacher, "net", nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 2))),  # leads elsewhere
        lambda: setattr(teacher, "net", nn.Linear(4, 2)),
    ]
    for change in [*changes, *changes]:
        change()
        mx.eval(teacher.table, teacher.net.parameters())
        for _ in range(2):
            step(x)
        small = len(teacher.net.children()) == 0
        assert used() - before < (1 << 16 if small else 1 << 17)
    teacher.table = mx.array([[1.0]])
    step(x)
    assert before - used() > 1 << 20


@pytest.mark.parametrize("compiled", [True, False])
def test_what_another_step_replaces_between_the_calls_is_not_held(compiled: bool) -> None:
    generator, critic = nn.Linear(256, 1024), nn.Linear(1024, 1)

    def loss_fn(critic: nn.Module, x: mx.array) -> mx.array:
        fake = critic(generator(x))
        if not compiled:
            fake.tolist()
        return mx.square(fake).mean()

    step, x = Step(critic, optim.SGD(0.1), loss_fn, replay=False), mx.ones((3, 256))
    plain = copy.deepcopy(critic)
    take_plain = plain_step(plain, optim.SGD(0.1), loss_fn)
    sizes = []
    for number in range(24):
        if number % 2 == 0 or number > 12:
            generator.weight = mx.full((1024, 256), (number + 1) / 1e5)
            mx.eval(generator.weight)
        expected, _ = take_plain(x)
        np.testing.assert_allclose(step(x).loss.item(), expected.item(), rtol=1e-5, atol=1e-9)
        if number > 4:
            sizes.append(used())  # what has been replaced is let go of by now
    assert max(sizes) - min(sizes) < generator.weight.nbytes / 2
    assert_close(snapshot(critic), snapshot(plain), 1e-5)


@pytest.mark.parametrize("in_place", [False, True])
def test_former_contents_of_a_large_numpy_array_are_not_kept(in_place: bool) -> None:
    holder = SimpleNamespace(table=np.ones((512, 512), np.float32))
    step = Step(nn.Linear(512, 1), optim.SGD(1e-3), lambda model, x: model(x @ mx.array(holder.table)).square().mean())
    seen = list[int]()
    for number in range(40):
        if in_place:
            holder.table[0, 0] = number
        else:
            holder.table = np.full((512, 512), number / 40, np.float32)
        mx.eval(step(mx.ones((2, 512))).loss)
        seen.append(mx.get_active_memory())
    assert seen[-1] - seen[4] < holder.table.nbytes
