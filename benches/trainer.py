"""Measure the trainer's overhead over a loop of `fast_step` written by hand, which reads its losses at intervals.

Both take turns in one process, on models, loaders and optimizers of their own that are equal. Timed are the steps
between the 20th and the last one of each turn: the start and the checkpoint at the end are left out::

    python benches/trainer.py
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from cases import Case
from faststep import Step
from faststep.data import Loader
from faststep.loggers import Progress
from faststep.training import Callback, Trainer
from models import GPT, MLP
from samples import Sample, arguments, bars, use_device
from timing import in_turns

CASES = {
    "tiny": Case("MLP, 2 layers x 32, batch 8", MLP, {"layers": 2, "width": 32}, batch=8),
    "gpt2": Case(
        "GPT, 2 layers x 128, 4 heads, batch 2, sequence 64",
        GPT,
        {"layers": 2, "width": 128, "heads": 4, "seq": 64, "vocab": 256},
        batch=2,
    ),
}
ROUNDS = 12
WARM = 20  # steps at the beginning of a turn
SECONDS = 1.5  # of a turn
READ = 20  # steps between two readings of the losses, the trainer's default
HAND, TRAINER = "loop by hand", "Trainer"


class Marks(Callback):
    """Takes the time behind two of the steps."""

    def __init__(self, first: int, last: int) -> None:
        self.at = dict.fromkeys((first, last), 0.0)

    def on_step(self, trainer: Trainer, number: int) -> None:
        """Take the time, at the last one when all is done."""
        if number in self.at:
            if number == max(self.at):
                trainer.step.synchronize()
            self.at[number] = time.perf_counter()

    @property
    def ms(self) -> float:
        """Milliseconds of a step between them."""
        (first, began), (last, ended) = sorted(self.at.items())
        return 1e3 * (ended - began) / (last - first)


def parts(case: Case, items: int) -> tuple[Step, Loader]:
    """Build a step, and a loader over random examples."""
    run = case.new_run()
    x, y = case.model.draw(np.random.default_rng(0), **{**case.shape, "batch": items})
    loader = Loader((x, y), batch_size=case.batch, shuffle=True, drop_last=True)
    return Step(run.model, run.optimizer, run.loss_fn, max_grad_norm=run.max_grad_norm), loader


def by_hand(step: Step, loader: Loader, steps: int) -> float:
    """Train so many steps; return the milliseconds of one."""
    losses, read, number, began = [], [], 0, 0.0
    while number < steps:
        for batch in loader:
            losses.append(step(*batch).loss)
            number += 1
            if number % READ == 0:
                read += [loss.item() for loss in losses]
                losses = []
            if number == WARM:
                began = time.perf_counter()
            if number == steps:
                break
    step.synchronize()
    return 1e3 * (time.perf_counter() - began) / (steps - WARM)


def by_trainer(step: Step, loader: Loader, steps: int) -> float:
    """The same by the trainer, with its log and its lines of progress."""
    marks = Marks(WARM, steps)
    with tempfile.TemporaryDirectory() as run, Path("/dev/null").open("w") as nowhere:
        loggers = [Progress(nowhere)]
        Trainer(step, loader, run=run, steps=steps, callbacks=[marks], loggers=loggers, checkpoint_every=0).train()
    return marks.ms


def measure(case: Case, after_round: Any) -> dict[str, Any]:
    """Time both; return milliseconds by way and round."""
    ways = {HAND: by_hand, TRAINER: by_trainer}
    made = {name: parts(case, items=64 * case.batch) for name in ways}
    slowest = max(way(*made[name], steps=4 * WARM) for name, way in ways.items())
    steps = max(4 * WARM, WARM + round(1e3 * SECONDS / slowest))
    turns = {name: functools.partial(way, *made[name], steps=steps) for name, way in ways.items()}
    return {"title": case.title, "steps of a turn": steps, "ms": in_turns(turns, ROUNDS, after_round)}


def main() -> None:
    """Measure the cases asked for."""
    args = arguments("Measure the trainer beside a loop by hand.", list(CASES)).parse_args()
    use_device(args.device)
    sample = Sample("trainer", args)
    with bars() as progress:
        for name in args.cases or CASES:
            bar = progress.add_task(f"trainer, {name}", total=ROUNDS)
            sample.add(name, measure(CASES[name], functools.partial(progress.advance, bar)))
            mx.clear_cache()
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
