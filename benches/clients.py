"""Measure whole programs of the kinds that people train: each in its own original way, and with ``fast_step``.

What they are is in ``tests/support/programs``, which the tests run too. All of them, or those asked for::

    python benches/clients.py
    python benches/clients.py --cases sac dpo --rounds 40
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from cases import Run
from machine import ROOT
from mlx.utils import tree_flatten
from rich.progress import Progress
from samples import Sample, answer, arguments, bars, use_device
from timing import block_size, in_turns, run_block
from ways import COMPILED, FAST, PLAIN, WAYS, StepFn

sys.path.append(str(ROOT / "tests"))  # the programs lie where the tests find them
from support.programs import PROGRAMS, Program

COMPARED = 24  # rounds over which the numbers are compared
TOLERANCE = 1e-2  # rounding grows from step to step, where BatchNorm or Adam divide by little


def new(program: Program, way: str) -> Any:
    """Build a program that takes its steps in this way."""
    beside: list[nn.Module] = []

    def make(model: Any, optimizer: Any, loss_fn: Any, *, max_grad_norm: float | None = None) -> StepFn:
        @functools.cache
        def step() -> StepFn:  # made when it is first called: all models are there then
            return WAYS[way](Run(model, optimizer, loss_fn, max_grad_norm, [m for m in beside if m is not model]))

        return lambda *batch: step()(*batch)

    built = program.new(make)
    beside += built.models
    return built


def rounds(program: Program, way: str) -> StepFn:
    """Return what takes the next round of a new program."""
    built, numbers = new(program, way), itertools.count()
    return lambda: built.round(next(numbers))


def numbers(program: Program, way: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the losses of the first rounds, and the parameters in which they end."""
    built = new(program, way)
    losses = np.array([[float(loss) for loss in built.round(number)] for number in range(COMPARED)])
    leaves = tree_flatten([model.parameters() for model in built.models])
    return losses, [np.array(array) for _, array in leaves]  # type: ignore[str-unpack]


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference, as a share of the largest number."""
    return float(np.abs(ours - theirs).max() / max(float(np.abs(theirs).max()), 1e-30))


def differences(program: Program) -> dict[str, float]:
    """Compare losses and parameters with those of the plain loop.

    Raises:
        SystemExit: They differ by more than rounding explains, so that not the same would be measured.
    """
    ours, theirs = numbers(program, FAST), numbers(program, PLAIN)
    parameters = [difference(a, b) for a, b in zip(ours[1], theirs[1], strict=True)]
    result = {"losses": difference(ours[0], theirs[0]), "parameters": max(parameters)}
    if not max(result.values()) <= TOLERANCE:
        sys.exit(f"{program.title}: not measured, the numbers differ from the plain loop's: {result}")
    return result


def times(program: Program, count: int, after_round: Callable[[], None]) -> dict[str, list[float]]:
    """Time the original way and ours in turns; return milliseconds a round of the program."""
    own = COMPILED if program.compiled else PLAIN
    steps = {way: rounds(program, way) for way in (own, FAST)}
    for step in steps.values():
        run_block(step, [()], COMPARED)
    size = block_size(min(run_block(steps[own], [()], 2) for _ in range(4)))
    blocks = {way: functools.partial(run_block, step, [()], size) for way, step in steps.items()}
    return in_turns(blocks, count, after_round)


def peak(program: Program, way: str) -> int:
    """Return the peak of MLX's memory over rounds of a program, in bytes (run alone)."""
    step = rounds(program, way)
    run_block(step, [()], 8)
    mx.reset_peak_memory()
    run_block(step, [()], 8)
    return mx.get_peak_memory()


def measure(name: str, count: int, progress: Progress) -> dict[str, Any]:
    """Measure one program."""
    program = PROGRAMS[name]
    bar = progress.add_task(name, total=count)
    result: dict[str, Any] = {"title": program.title, "differences": differences(program)}
    result["ms"] = times(program, count, functools.partial(progress.advance, bar))
    ways = [COMPILED] * program.compilable + [FAST]
    return result | {"memory": {way: answer(name, way) for way in ways}}


def main() -> None:
    """Measure every program, or do the part of a process of its own."""
    parser = arguments("Measure whole programs in their own original way and with fast_step.", list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=20, help="turns that every way takes (default: %(default)s)")
    args = parser.parse_args()
    use_device(args.device)
    if args.alone:
        name, way = args.alone
        print(json.dumps(peak(PROGRAMS[name], way)))
        return
    sample = Sample("clients", args)
    measured = sample.content["results"].get("programs", {})
    with bars() as progress:
        for name in args.cases or PROGRAMS:
            measured[name] = measure(name, args.rounds, progress)
            sample.add("programs", measured)
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
