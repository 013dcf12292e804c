"""The report of ``mlx_lm_trainer.py``."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from markdown import megabytes, spread, table

OURS, THEIRS = "faststep.mlx_lm.train", "mlx_lm.tuner.trainer.train"
MLX_LM = """mlx-lm's own trainer beside `faststep.mlx_lm.train`, which takes the same arguments. Model, data and
order of batches are the same. Each run has a process of its own; both use this package's kernels. The first
iterations are not timed. The losses of both are compared at every iteration.
"""


def mlx_lm(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out time and memory of both trainers, or how far their windows are off."""
    return _windows(result) if "title" not in result else _case(result)


def _case(result: dict[str, Any]) -> list[str]:
    times, peaks = result["ms"], result["peak bytes"]
    ratio = statistics.median(times[OURS]) / statistics.median(times[THEIRS])
    rows = [[f"`{way}`", spread(times[way]), megabytes(peaks[way])] for way in (OURS, THEIRS)]
    gap = result["largest relative loss difference"]
    apart = "The losses are the same numbers." if gap == 0 else f"Largest relative difference of the losses: {gap:.1e}."
    lines = [
        f"Ours takes {ratio:.2f} of the time and {peaks[OURS] / peaks[THEIRS]:.2f} of the memory. {apart}",
        "",
    ]
    return [f"### {result['title']}", "", *table(["trainer", "ms an iteration", "peak memory, MB"], rows), *lines]


def _windows(result: dict[str, Any]) -> list[str]:
    full, open_ = sorted(result[OURS], key=int)
    head = ["trainer", "one window of 4 batches", "10 batches: the last window has 2"]
    rows = [[f"`{way}`", f"{found[full]:.1e}", f"{found[open_]:.1e}"] for way, found in result.items()]
    text = (
        "The distance of the final weights from those of plain MLX, whose gradients are averaged over the tokens of "
        "each window, as a share of the way that the weights have moved (SGD). mlx-lm averages the means of batches, "
        "and drops the last window if it is not full."
    )
    return ["### Accumulated gradients", "", text, "", *table(head, rows), ""]
