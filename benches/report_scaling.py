"""The report of ``scaling.py``."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import plots
from markdown import short, spread, table
from ways import BOUND, COMPILED, FAST

SCALING = """The time of a step by the number of tensors and of parameters. The gradients cost nothing here: they are
the parameters themselves. The rest of a step remains: clipping to norm 1.0, AdamW, evaluation, and the handling of
many arrays. Milliseconds a step, medians with quartiles; the ways take turns. The first step includes tracing, and
the compilation of kernels that MLX had not yet compiled on this machine.
"""


def scaling(result: dict[str, Any], plot: Path) -> list[str]:
    """Lay out how a step grows along one axis, with its plot."""
    points = result["points"]
    axis = "tensors" if points[0]["tensors"] != points[-1]["tensors"] else "parameters"
    fixed = "parameters" if axis == "tensors" else "tensors"
    title = f"A step against the number of {axis} ({points[0][fixed]:,} {fixed})"
    plots.scaling(axis, title, points, plot)
    head = [axis, COMPILED, FAST, "ratio", BOUND, f"first step, s: {COMPILED}", FAST]
    lines = [f"### {title}", "", f"![{title}](../plots/{plot.name})", ""]
    return [*lines, *table(head, (row(axis, point) for point in points)), growth(axis, points), ""]


def row(axis: str, point: dict[str, Any]) -> list[str]:
    """Lay out one point."""
    ratios = [a / b for a, b in zip(point["ms"][COMPILED], point["ms"][FAST], strict=True)]
    times = [spread(point["ms"][way]) for way in (COMPILED, FAST)]
    first = [short(point["first step, s"][way]) for way in (COMPILED, FAST)]
    return [f"{point[axis]:,}", *times, spread(ratios), spread(point["ms"][BOUND]), *first]


def growth(axis: str, points: list[dict[str, Any]]) -> str:
    """Say how a step grows between the last two points."""
    before, last = points[-2:]
    ways = "; ".join(f"{way} {grows(axis, way, before, last)}" for way in (COMPILED, FAST))
    return f"From {before[axis]:,} to {last[axis]:,} {axis}: {ways}."


def grows(axis: str, way: str, before: dict[str, Any], last: dict[str, Any]) -> str:
    """Return the exponent between two points, and what one tensor or a million parameters more cost."""
    low, high = (statistics.median(point["ms"][way]) for point in (before, last))
    exponent = math.log(high / low) / math.log(last[axis] / before[axis])
    each = (high - low) / (last[axis] - before[axis])
    cost = f"{1e3 * each:.2f} us a tensor" if axis == "tensors" else f"{1e6 * each:.3f} ms a million parameters"
    return f"grows as {axis}^{exponent:.2f}, by {cost}"
