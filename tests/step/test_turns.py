"""One optimizer that several models use in turns: its state is the plain loop's after every call, whoever has it."""

from __future__ import annotations

import gc
import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_map
from support.helpers import NATIVE, OPTIMIZERS, Row, Tree, assert_close, flat, random_key, to_numpy
from support.plain_loop import PlainLoop, Rules

OPTIONS: list[tuple[dict[str, Any], int]] = [  # of each model's step, and its window
    ({"nonfinite": "allow"}, 1),
    ({"max_grad_norm": 0.5, "ema_decay": 0.5}, 2),
    ({}, 1),
]
KINDS = ["adam", "adamw-joined", "sgd", "sgd-momentum", "adafactor", "muon", "multi", "lion", "user", "user-adam"]


class Run:
    """Three models of one shape with one optimizer, by steps or by plain loops."""

    def __init__(self, optimizer: str, fast: bool) -> None:
        self.row, self.fast = Row("mlp", optimizer), fast
        self.batches = self.row.case.batches(20)
        self.optimizer = OPTIMIZERS[optimizer]()
        self.models: list[nn.Module] = []
        for number in range(len(OPTIONS)):
            model, _ = self.row.new()
            model.update(tree_map(lambda a, by=1 - number / 8: a * by, model.parameters()))
            mx.eval(model.parameters())
            self.models.append(model)
        self.loops = [PlainLoop((model, self.optimizer), random_key()) for model in self.models]
        self.steps: list[Any] = [self.new_step(number) for number in range(len(OPTIONS))]
        self.held: list[Tree] = []

    def new_step(self, number: int) -> Any:
        """Make the step of one of the models."""
        options, window = OPTIONS[number]
        step = Step(self.models[number], self.optimizer, self.row.case.loss_fn, accumulate=window, **options)
        return step if self.fast else None

    def loss_fn(self, *batch: Tree) -> tuple[mx.array]:
        """Return the loss as the plain loop takes it."""
        return (self.row.case.loss_fn(*batch),)

    def take(self, number: int, batch: int) -> None:
        """Take a batch by one of the models."""
        options, window = OPTIONS[number]
        if self.fast:
            self.steps[number](*self.batches[batch])
        else:
            self.loops[number].step(self.loss_fn, self.batches[batch], Rules(**options), window)

    def change(self, what: str, number: int) -> None:
        """Change something between two steps."""
        model, optimizer = self.models[number], self.optimizer
        if what == "read":
            mx.eval(optimizer.state)
        elif what == "hold":
            self.held = [optimizer.state, flat(optimizer.state)]
        elif what == "let go":
            self.held = []
        elif what == "moments":
            optimizer.state = tree_map(lambda a: a * 1, optimizer.state)
        elif what == "one moment":
            self.replace_one()
        elif what == "rate" and not isinstance(optimizer, optim.MultiOptimizer) and "joined" not in self.row.optimizer:
            optimizer.learning_rate = 0.003
        elif what == "freeze":
            model.freeze(keys="bias")
        elif what == "unfreeze":
            model.unfreeze()
        elif what == "weights":
            model.update(tree_map(lambda a: a * 0.5, model.parameters()))
        elif what == "anew" and OPTIONS[number][1] == 1:  # an open window goes with its step
            self.steps[number] = None
            gc.collect()
            self.steps[number] = self.new_step(number)

    def replace_one(self) -> None:
        """Put another array into one place of the optimizer's state."""
        at: Tree = self.optimizer.state
        names = [name for name, array in flat(at).items() if array.ndim]
        if names:
            *path, last = names[0].split(".")
            for part in path:
                at = at[int(part)] if isinstance(at, list) else at[part]
            at[last] = at[last] * 0.5

    def arrays(self) -> dict[str, np.ndarray]:
        """Copy the models, and the optimizer's state."""
        models = flat([model.parameters() for model in self.models])
        return {name: to_numpy(a) for name, a in (models | flat(self.optimizer.state)).items()}


CHANGES = ["read", "hold", "let go", "moments", "one moment", "rate", "freeze", "unfreeze", "weights", "anew"]


@pytest.mark.parametrize("optimizer", KINDS)
def test_turns_are_the_plain_loop_s(optimizer: str) -> None:
    ours, plain = Run(optimizer, fast=True), Run(optimizer, fast=False)
    for batch in range(15):
        for run in (ours, plain):
            run.take(batch % 3, batch)
    assert_close(ours.arrays(), plain.arrays(), 2e-6, on_gpu=1e-3)
    modes = {step.stats.mode for step in ours.steps}
    assert modes == {"native"} or (optimizer not in NATIVE and modes <= {"called", "native"})  # some are left out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("optimizer", KINDS)
def test_turns_with_changes_between_them(optimizer: str, seed: int) -> None:
    draw = random.Random(seed)
    ours, plain = Run(optimizer, fast=True), Run(optimizer, fast=False)
    for batch in range(20):
        number, change, of = draw.randrange(3), draw.choice([*CHANGES, *[""] * 6]), draw.randrange(3)
        compared = draw.random() < 0.3
        for run in (ours, plain):
            run.change(change, of)
            run.take(number, batch)
        if compared:
            assert_close(ours.arrays(), plain.arrays(), 2e-6, on_gpu=1e-3)
    assert_close(ours.arrays(), plain.arrays(), 2e-6, on_gpu=1e-3)
