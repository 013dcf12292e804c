"""The report of ``runs.py``."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import plots
from markdown import megabytes, short, table

RUNS = """Long trainings: do memory and time stay flat? Each way runs alone in a process, with a new batch at every
step. Resident memory is the process's. "Active" is what MLX has handed out, "cache" what it keeps for later. The loss
is called while tracing only, so its calls count the traces. Growth is the slope of the resident memory over the
second half of the run, by least squares. Moments of weights without a gradient fade to denormal numbers after some
800 steps; a CPU computes slowly with those.
"""

REPLAY = """One training on real text, on the same batches, three times: each step evaluated by MLX, each step
replayed as one CUDA graph, and evaluated by MLX once more. A GPU adds numbers in another order each time, so even two
runs of the same way differ.
"""


def runs(result: dict[str, Any], plot: Path) -> list[str]:
    """Lay out one run, with its plot."""
    plots.run(result["title"], result["ways"], plot)
    head = ["way", "steps", "traces", "resident after a tenth, MB", "at the end", "growth, KB a step"]
    head += ["active at the end, MB", "cache", "ms a step, second tenth", "last tenth"]
    lines = [f"### {result['title']}", "", f"![{result['title']}](../plots/{plot.name})", ""]
    lines += table(head, (row(way, columns) for way, columns in result["ways"].items()))
    for way, columns in result["ways"].items():
        if columns["ended early"]:
            lines += [f"{way}: {columns['ended early']}.", ""]
    return lines


def replay(result: dict[str, Any], plot: Path) -> list[str]:
    """Lay out the losses of one training, evaluated and replayed."""
    plots.losses(result, plot)
    ends = ", ".join(f"{values[-1]:.4f} ({way})" for way, values in result["losses"].items())
    apart = ", ".join(f"{max(values):.1g} ({way})" for way, values in result["difference"].items())
    text = f"{result['step'][-1]:,} steps; the last losses are {ends}; the largest differences from the first {apart}."
    return [f"![{result['title']}](../plots/{plot.name})", "", text, ""]


def row(way: str, columns: dict[str, Any]) -> list[str]:
    """Lay out one way."""
    tenth = max(1, len(columns["step"]) // 10)
    memory = [megabytes(columns[name][at]) for name, at in (("resident", tenth - 1), ("resident", -1))]
    rest = [megabytes(columns[name][-1]) for name in ("active", "cache")]
    times = [columns["ms"][tenth : 2 * tenth], columns["ms"][-tenth:]]
    return [
        way,
        f"{columns['step'][-1]:,}",
        f"{columns['traces'][-1]:,}",
        *memory,
        f"{growth(columns) / 1e3:.2f}",
        *rest,
        *(short(statistics.median(part)) for part in times),
    ]


def growth(columns: dict[str, Any]) -> float:
    """Return the slope of the resident memory over the second half, in bytes a step."""
    half = len(columns["step"]) // 2
    return statistics.linear_regression(columns["step"][half:], columns["resident"][half:]).slope
