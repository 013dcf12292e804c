"""Measure the training step, side by side: plain MLX, compiled, compiled with async evaluation, and ``fast_step``.

The ways take turns in one process, in rotating order, on the same batches from the same weights; every ratio is taken
within a round, so that what disturbs the machine disturbs both sides of it. Memory and BLAS are measured in processes
of their own::

    python benches/step.py            # measures, writes a sample below benches/samples, and the report
    python benches/step.py --report   # only writes the report, docs/benchmarks.md, from the samples there
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from cases import CASES, Case
from machine import ROOT, commit, machine, versions
from mlx.utils import tree_reduce
from report import write_report
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from ways import BOUND, WAYS, StepFn

SAMPLES = ROOT / "benches" / "samples"
REPORT = ROOT / "docs" / "benchmarks.md"
Batches = list[tuple[mx.array, mx.array]]


def run_block(step: StepFn, batches: Batches, count: int) -> float:
    """Take so many steps, wait until all is done, and return the milliseconds of one."""
    start = time.perf_counter()
    for i in range(count):
        loss = step(*batches[i % len(batches)])
    mx.eval(loss)
    mx.synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def check(steps: dict[str, StepFn], batches: Batches) -> float:
    """Take the first steps of every way; return the largest difference between their losses.

    This is the warm-up too: kernels are compiled, traces made.

    Raises:
        SystemExit: The losses of two ways differ by more than 1e-3.
    """
    losses = {name: [float(step(*batch)) for batch in batches] for name, step in steps.items()}
    reference = losses["plain MLX"]
    gaps = {name: float(np.abs(np.subtract(values, reference)).max()) for name, values in losses.items()}
    del gaps[BOUND]  # it never updates
    if not max(gaps.values()) <= 1e-3:
        sys.exit(f"nothing was measured: the losses differ from plain MLX by {gaps}")
    return max(gaps.values())


def measure(case: Case, rounds: int, progress: Progress) -> dict[str, Any]:
    """Time every way on one case; return milliseconds by way and round."""
    bar = progress.add_task(case.title, total=rounds)
    batches = case.batches()
    steps = {name: way(*case.new_run()) for name, way in WAYS.items()}
    gap = check(steps, batches)
    fastest = min(run_block(steps["plain MLX"], batches, 2) for _ in range(4))
    count = max(4, round(60 / fastest))  # some 60 ms a block, and enough for steps in flight to overlap
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(run_block(steps[name], batches, count))
        progress.advance(bar)
    return {"title": case.title, "steps in a block": count, "largest loss difference": gap, "ms": times}


def peak(case: Case, way: str) -> dict[str, float]:
    """Return the peak of MLX's memory over steps of one way, and the bytes of the parameters (run alone)."""
    model, optimizer = case.new_run()
    step, batches = WAYS[way](model, optimizer), case.batches()
    run_block(step, batches, 4)
    mx.reset_peak_memory()
    run_block(step, batches, 8)
    return {"peak": mx.get_peak_memory(), "parameters": tree_reduce(lambda n, a: n + a.nbytes, model.parameters(), 0)}


def matmul(size: int = 1024) -> dict[str, float]:
    """Time a float32 matmul and compare it with float64 (run alone, with and without our BLAS)."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    x, y = mx.array(a), mx.array(b)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        product = x @ y
        mx.eval(product)
        times.append(1e3 * (time.perf_counter() - start))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return {"ms": statistics.median(times[1:]), "error": float(np.abs(product - exact).max() / np.abs(exact).max())}


def child(*arguments: str, **environment: str) -> dict[str, float]:
    """Run this program again in a process of its own and return what it measured."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def sample(cases: list[str], rounds: int) -> dict[str, Any]:
    """Measure everything once."""
    now = datetime.datetime.now(datetime.timezone.utc)
    result: dict[str, Any] = {
        "date": f"{now:%Y-%m-%d}",
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    with Progress(*columns, TimeElapsedColumn()) as progress:
        result["cases"] = {name: measure(CASES[name], rounds, progress) for name in cases}
        bar = progress.add_task("Memory, each way alone", total=len(cases) * len(WAYS))
        for name in cases:
            result["cases"][name]["memory"] = {}
            for way in WAYS:
                result["cases"][name]["memory"][way] = child("--peak", name, way)
                progress.advance(bar)
        bar = progress.add_task("Matmul, with and without our BLAS", total=2)
        result["matmul"] = {}
        for setting in ("1", "0"):
            result["matmul"][setting] = child("--matmul", FASTSTEP_BLAS=setting)
            progress.advance(bar)
    return result


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure the training step, side by side.")
    parser.add_argument("--report", action="store_true", help="only write the report, from the samples that are there")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=40, help="turns that every way takes (default: %(default)s)")
    parser.add_argument("--samples", type=Path, default=SAMPLES, help="folder of the samples")
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--matmul", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, or report, or do a child's part."""
    args = parse_arguments()
    if args.peak:
        print(json.dumps(peak(CASES[args.peak[0]], args.peak[1])))
    elif args.matmul:
        print(json.dumps(matmul()))
    elif args.report:
        write_report(args.samples, REPORT)
    else:
        result = sample(args.cases, args.rounds)
        args.samples.mkdir(parents=True, exist_ok=True)
        file = args.samples / f"{result['date']}-{result['commit'].split()[0]}.json"
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {file.name}")
        if args.samples == SAMPLES:
            write_report(SAMPLES, REPORT)


if __name__ == "__main__":
    main()
