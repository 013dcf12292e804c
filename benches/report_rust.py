"""The report of ``rust.py``."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from markdown import megabytes, short, spread, table

FAST = "faststep::Step"
RUST = """`cargo bench`: `faststep::Step` with its default options beside the loop that a user of mlx-rs writes by
hand (`value_and_grad`, `clip_grad_norm`, `AdamW`, one evaluation of parameters and moments), on the same batches,
from the same weights, with the same BLAS. Both take turns in one process, and a ratio is that of two times in the
same round. "Alone" is what criterion measures, one way after the other. Milliseconds a step, medians with quartiles.
The models are those of `benches/cases.py`, so that the times compare with Python's.
"""
OVERHEAD = """The engine's own time. The loss is the mean of the batch, so that forward and backward cost nothing and
all gradients are zeros. The rest of a step remains: clipping, AdamW, evaluation, and the handling of many tensors,
each of float32 [4, 4]. Medians with quartiles.
"""


def rust(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out one model, or the overhead."""
    return overhead(result["points"]) if "points" in result else model(result)


def model(result: dict[str, Any]) -> list[str]:
    """Lay out time and ratio of each way of training one model."""
    head = ["way", "ms a step", f"time over {FAST}'s", "alone, ms"]
    rows = (row(result, way) for way in sorted(result["ms"], key=FAST.__eq__))
    return [f"### {result['title']}", "", *table(head, rows), note(result), ""]


def row(result: dict[str, Any], way: str) -> list[str]:
    """Lay out one way."""
    ratios = [a / b for a, b in zip(result["ms"][way], result["ms"][FAST], strict=True)]
    return [way, spread(result["ms"][way]), "" if way == FAST else spread(ratios), spread(result["ms alone"][way])]


def note(result: dict[str, Any]) -> str:
    """Say what the table's numbers rest on."""
    return (
        f"Rounds: {len(result['ms'][FAST])}, steps of each way in a round: {result['steps in a block']}; parameters "
        f"{megabytes(result['parameters'])} MB; largest difference between the losses of the first steps "
        f"{result['largest loss difference']:.1e}."
    )


def overhead(points: list[dict[str, Any]]) -> list[str]:
    """Lay out what a step costs by the number of tensors."""
    head = ["tensors", "us a step", "us a tensor"]
    return ["### Overhead by the number of tensors", "", OVERHEAD, *table(head, map(cost, points)), growth(points), ""]


def cost(point: dict[str, Any]) -> list[str]:
    """Lay out one number of tensors."""
    tensors = point["tensors"]
    return [f"{tensors:,}", spread(point["us"]), spread([us / tensors for us in point["us"]])]


def growth(points: list[dict[str, Any]]) -> str:
    """Say what one tensor more costs between neighbouring points."""
    costs = []
    for before, last in itertools.pairwise(points):
        low, high = (statistics.median(point["us"]) for point in (before, last))
        each = short((high - low) / (last["tensors"] - before["tensors"]))
        costs.append(f"{each} us from {before['tensors']:,} to {last['tensors']:,}")
    return f"One tensor more costs {', '.join(costs)}."
