"""Measure a step whose loss, or model, reads a number that changes at every step: a temperature that is annealed.

``python benches/varying.py`` takes a minute.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from cases import CASES, Case, Run, loss_fn
from models import Batch
from samples import Sample, arguments, bars, on_gpu, use_device
from timing import block_size, in_turns, run_block
from ways import COMPILED, FAST, PLAIN, WAYS, StepFn

ROUNDS = 12
TINY = "linear"
MEASURED = (TINY, "mlp", "gpt24", "gpt4")
ON_MODEL = "fast_step: another number on the model"
NUMBER, ARRAY, SAME = "fast_step: another number", "fast_step: another mx.array", "fast_step: always the same"
ARGUMENT = f"{COMPILED}: an argument"


class Tiny(nn.Linear):
    """One layer."""

    @staticmethod
    def draw(rng: np.random.Generator, batch: int, input_dims: int, output_dims: int) -> Batch:
        """Draw float32 [batch, input_dims] and classes, int32 [batch]."""
        x = rng.standard_normal((batch, input_dims), dtype=np.float32)
        return x, rng.integers(output_dims, size=batch, dtype=np.int32)


LINEAR = Case("Linear, 4 to 3, batch 8", Tiny, {"input_dims": 4, "output_dims": 3}, batch=8)


def case_of(name: str) -> Case:
    """Return a case by its name."""
    return LINEAR if name == TINY else CASES[name]


def annealed() -> Iterator[float]:
    """Give out temperatures, each another one."""
    return (1.0 + 1.0 / count for count in itertools.count(1))


def reached(case: Case, way: str, value: Callable[[float], Any] | None) -> StepFn:
    """Make a step whose loss reads the temperature as an attribute, set before each step; None: never."""
    agent, temperatures = SimpleNamespace(temperature=1.5), annealed()

    def loss(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return loss_fn(model, x, y) / agent.temperature

    step = WAYS[way](new_run(case, loss))

    def anneal(*batch: mx.array) -> mx.array:
        if value is not None:
            agent.temperature = value(next(temperatures))
        return step(*batch)

    return anneal


def on_model(case: Case) -> StepFn:
    """Make a step whose loss reads the temperature as an attribute of the model, set before each step."""
    temperatures = annealed()

    def loss(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return loss_fn(model, x, y) / model.temperature

    run = new_run(case, loss)
    step = WAYS[FAST](run)

    def anneal(*batch: mx.array) -> mx.array:
        run.model.temperature = next(temperatures)
        return step(*batch)

    return anneal


def passed(case: Case) -> StepFn:
    """Make a compiled step whose loss is given the temperature as an array."""
    temperatures = annealed()

    def loss(model: nn.Module, x: mx.array, y: mx.array, temperature: mx.array) -> mx.array:
        return loss_fn(model, x, y) / temperature

    step = WAYS[COMPILED](new_run(case, loss))
    return lambda *batch: step(*batch, mx.array(next(temperatures)))


def new_run(case: Case, loss: Callable[..., mx.array]) -> Run:
    """Build the model; the smallest one has plain gradient descent."""
    if case is LINEAR:
        return case.new_run(loss, None, lambda: optim.SGD(1e-3))
    return case.new_run(loss)


def measure(case: Case, rounds: int, after_round: Callable[[], None]) -> dict[str, Any]:
    """Time the ways on one case; return milliseconds by way and round."""
    batches = case.batches()
    steps = {
        PLAIN: reached(case, PLAIN, float),
        ARGUMENT: passed(case),
        NUMBER: reached(case, FAST, float),
        ON_MODEL: on_model(case),
        ARRAY: reached(case, FAST, mx.array),
        SAME: reached(case, FAST, None),
    }
    for step in steps.values():
        run_block(step, batches, 8)
    count = block_size(min(run_block(steps[PLAIN], batches, 2) for _ in range(4)))
    blocks = {way: functools.partial(run_block, step, batches, count) for way, step in steps.items()}
    return {"title": case.title, "ms": in_turns(blocks, rounds, after_round)}


def main() -> None:
    """Measure the cases asked for."""
    parser = arguments("Measure a step whose loss reads a number that changes.", list(MEASURED))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns that every way takes (default: %(default)s)")
    args = parser.parse_args()
    use_device(args.device)
    if on_gpu():
        print("varying: nothing to measure on a GPU")
        return
    sample = Sample("varying", args)
    with bars() as progress:
        for name in args.cases or MEASURED:
            bar = progress.add_task(name, total=args.rounds)
            after_round = functools.partial(progress.advance, bar)
            sample.add(name, measure(case_of(name), args.rounds, after_round))
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
