"""Watch long runs: memory, traces and the time of a step, each way alone in a process of its own (Linux).

``shapes``: 2,000 batches of different shapes, so that every step is traced. ``again``: 40 shapes that come back, each
captured where steps are replayed. ``steps``: 20,000 steps of one shape.
``faded``: rows of an embedding that no token reads behind the 100th step, whose moments fade away::

    python benches/runs.py                  # all
    python benches/runs.py --cases shapes
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from cases import Case, loss_fn
from machine import resident
from models import GPT, MLP
from samples import Sample, alone, arguments, bars, use_device
from ways import COMPILED, FAST, FLUSHED, WAYS

POINTS = 100
WATCHED = (COMPILED, FAST)
LIMIT = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 3  # bytes of memory at which a run is stopped


@dataclasses.dataclass(frozen=True)
class LongRun:
    """One case over many steps, each with a new batch.

    Attributes:
        case: The model; its title says what is run.
        steps: The number of steps.
        shapes: The sizes of the batches, in this order and then again; what they leave out is the case's.
        ways: What is watched.
    """

    case: Case
    steps: int
    shapes: tuple[dict[str, int], ...] = ({},)
    ways: tuple[str, ...] = WATCHED

    def batches(self) -> Iterator[tuple[mx.array, mx.array]]:
        """Draw the batches, equal each time."""
        rng = np.random.default_rng(0)
        for i in range(self.steps):
            sizes = {"batch": self.case.batch, **self.case.shape, **self.shapes[i % len(self.shapes)]}
            x, y = self.case.model.draw(rng, **sizes)
            yield mx.array(x), mx.array(y)


def every_shape(batches: int, lengths: int) -> tuple[dict[str, int], ...]:
    """Return each size of batch with each length of sequence once, in a random order."""
    order = np.random.default_rng(0).permutation(batches * lengths)
    return tuple({"batch": int(i) // lengths + 1, "seq": int(i) % lengths + 1} for i in order)


RUNS = {
    "shapes": LongRun(
        Case(
            "2,000 different shapes: GPT, 2 layers x 32, batches of 1 to 8, sequences of 1 to 250",
            GPT,
            {"layers": 2, "width": 32, "heads": 2, "seq": 250, "vocab": 64},
            batch=8,
        ),
        steps=2000,
        shapes=every_shape(batches=8, lengths=250),
    ),
    "again": LongRun(
        Case(
            "2,000 steps of 40 shapes: GPT, 2 layers x 32, batches of 1 to 8, sequences of 1 to 5",
            GPT,
            {"layers": 2, "width": 32, "heads": 2, "seq": 5, "vocab": 64},
            batch=8,
        ),
        steps=2000,
        shapes=every_shape(batches=8, lengths=5),
    ),
    "steps": LongRun(
        Case("20,000 steps: MLP, 2 layers x 32, batch 8", MLP, {"layers": 2, "width": 32}, batch=8), steps=20_000
    ),
    "faded": LongRun(
        Case(
            "Faded moments: GPT, 1 layer x 64, batch 2, sequence 16, 4,000 tokens for 100 steps and 100 from then on",
            GPT,
            {"layers": 1, "width": 64, "heads": 2, "seq": 16, "vocab": 4000},
            batch=2,
        ),
        steps=2000,
        shapes=({},) * 100 + ({"vocab": 100},) * 1900,
        ways=(*WATCHED, FLUSHED),
    ),
}


def watch(run: LongRun, way: str) -> Iterator[dict[str, float]]:
    """Take the steps of a run; yield what there is to see, so many times (run alone)."""
    calls: list[None] = []  # no number: another number in a closure is another loss to fast_step

    def counted(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        calls.append(None)  # while tracing only
        return loss_fn(model, x, y)

    step = WAYS[FAST if way == FLUSHED else way](run.case.new_run(counted))
    every = run.steps // POINTS
    start = time.perf_counter()
    for i, batch in enumerate(run.batches(), 1):
        loss = step(*batch)
        if i % every == 0:
            mx.eval(loss)
            mx.synchronize()
            ms = 1e3 * (time.perf_counter() - start) / every
            yield {"step": i, "ms": ms, "traces": len(calls), **memory()}
            start = time.perf_counter()


def memory() -> dict[str, float]:
    """Return the bytes in use: the process's resident memory, and what MLX has handed out and what it keeps."""
    return {"resident": resident(), "active": mx.get_active_memory(), "cache": mx.get_cache_memory()}


def report_points(run: LongRun, way: str) -> None:
    """Print the points of a run, a line each; stop at the limit of the memory."""
    for point in watch(run, way):
        print(json.dumps(point), flush=True)
        if point["resident"] > LIMIT:
            break


def collect(name: str, way: str, on_point: Callable[[], None]) -> dict[str, Any]:
    """Run one way in a process of its own; return its points by column, and how it ended if that was early."""
    points: list[dict[str, float]] = []
    ended = ""
    try:
        for point in alone(name, way, FASTSTEP_FLUSH_DENORMALS=str(int(way == FLUSHED))):
            points.append(point)
            on_point()
    except subprocess.CalledProcessError as error:
        ended = f"ended by itself with status {error.returncode}"
    if not ended and len(points) < POINTS:
        ended = f"stopped at {LIMIT / 1e9:.1f} GB of resident memory"
    return {"ended early": ended, **{key: [point[key] for point in points] for key in points[0]}}


def main() -> None:
    """Watch every way in the cases asked for, or do the part of a process of its own."""
    args = arguments("Watch memory, traces and time over long runs.", list(RUNS)).parse_args()
    use_device(args.device)
    if args.alone:
        report_points(RUNS[args.alone[0]], args.alone[1])
        return
    sample = Sample("runs", args)
    with bars() as progress:
        for name in args.cases or RUNS:
            result: dict[str, Any] = {"title": RUNS[name].case.title, "steps": RUNS[name].steps, "ways": {}}
            for way in RUNS[name].ways:
                bar = progress.add_task(f"{name}, {way}", total=POINTS)
                result["ways"][way] = collect(name, way, functools.partial(progress.advance, bar))
            sample.add(name, result)
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
