"""Measure how a step's cost grows: with the number of tensors, and with the number of parameters.

The gradients cost nothing (they are the parameters themselves), so that what is measured is all that a step does beside
forward and backward: clipping, AdamW, evaluation, and the handling of many arrays::

    python benches/scaling.py                   # both
    python benches/scaling.py --cases tensors
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from cases import Run, adamw
from rich.progress import Progress
from samples import Sample, arguments, bars, on_gpu, use_device
from timing import block_size, in_turns, run_block
from ways import BOUND, COMPILED, FAST, WAYS, StepFn

MEASURED = (COMPILED, FAST, BOUND)
ROUNDS = 8
COLUMNS = 10
BYTES = 64  # of memory for each parameter: that many float32 are in use when two ways have their turns, at most


class Tensors(nn.Module):
    """So many tensors of one size, float32 [rows, 10]."""

    def __init__(self, tensors: int, parameters: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        rows = parameters // tensors // COLUMNS
        self.parts = [mx.random.normal((rows, COLUMNS)) for _ in range(tensors)]


@mx.custom_function
def energy(parts: list[mx.array], x: mx.array) -> mx.array:
    """Stand for half the sum of all squares, whose gradients are the parts; what it returns is the mean of x."""
    return x.mean()


@energy.vjp
def energy_vjp(
    primals: tuple[list[mx.array], mx.array], cotangent: mx.array, output: mx.array
) -> tuple[list[mx.array], mx.array]:
    """Return the parts as their own gradients."""
    parts, x = primals
    return parts, mx.zeros_like(x)


def loss_fn(model: Tensors, x: mx.array) -> mx.array:
    """Return a loss whose gradients are there already."""
    return cast(mx.array, energy(model.parts, x))


def points(case: str) -> list[tuple[int, int]]:
    """Return the (tensors, parameters) that are measured, as far as they fit into the memory."""
    if case == "tensors":
        return [(10**i, 10**6) for i in range(1, 5)]
    sizes = [10**i for i in range(5, 10 if on_gpu() else 9)]
    return [(100, parameters) for parameters in sizes if BYTES * parameters < memory()]


def memory() -> int:
    """Return the bytes of memory of the device."""
    if on_gpu():
        info = mx.device_info()
        return int(info.get("total_memory", info.get("memory_size", 0)))  # CUDA's name, and Metal's
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure(tensors: int, parameters: int, after_round: Callable[[], None]) -> dict[str, Any]:
    """Time every way; return the seconds of the first step, and milliseconds by way and round."""
    batches: list[tuple[mx.array, ...]] = [(mx.ones(4),)]
    models = {name: new_model(tensors, parameters) for name in MEASURED}
    steps = {name: WAYS[name](Run(model, adamw(), loss_fn)) for name, model in models.items()}
    first = {name: seconds(step, *batches[0]) for name, step in steps.items()}
    slowest = max(run_block(steps[name], batches, 2) for name in (COMPILED, FAST))
    count = block_size(slowest, least=2)
    blocks = {name: functools.partial(run_block, step, batches, count) for name, step in steps.items()}
    times = in_turns(blocks, ROUNDS, after_round)
    gap = mx.abs(models[FAST].parts[-1] - models[COMPILED].parts[-1]).max().item()
    return {
        "tensors": tensors,
        "parameters": parameters,
        "first step, s": first,
        "ms": times,
        "steps in a block": count,
        "largest difference": gap,
    }


def new_model(tensors: int, parameters: int) -> Tensors:
    """Build the model, equal each time."""
    mx.random.seed(0)
    model = Tensors(tensors, parameters)
    mx.eval(model.state)
    return model


def seconds(step: StepFn, *batch: mx.array) -> float:
    """Take one step and return what it takes."""
    start = time.perf_counter()
    mx.eval(step(*batch))
    mx.synchronize()
    return time.perf_counter() - start


def measure_all(case: str, progress: Progress) -> dict[str, Any]:
    """Measure all points of one case."""
    todo = points(case)
    bar = progress.add_task(f"Scaling with the number of {case}", total=len(todo) * ROUNDS)
    advance = functools.partial(progress.advance, bar)
    measured = []
    for tensors, parameters in todo:
        measured.append(measure(tensors, parameters, advance))
        mx.clear_cache()
    return {"points": measured}


def main() -> None:
    """Measure the cases asked for."""
    cases = ["tensors", "parameters"]
    args = arguments("Measure how a step's cost grows.", cases).parse_args()
    use_device(args.device)
    sample = Sample("scaling", args)
    with bars() as progress:
        for case in args.cases or cases:
            sample.add(case, measure_all(case, progress))
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
