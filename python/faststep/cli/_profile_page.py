"""The page of a profile: where the time of a step goes, and what its memory is for while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from faststep._profile import KINDS, Profile
from faststep._records import size, span
from faststep.report import COLOURS, cards, figures, page, plot, said, section, table, tick, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STRETCHES = 600  # of the memory that is drawn, each by the operation with the most in use


def write_profile(path: Path, name: str, found: Profile) -> Path:
    """Write the page; see `faststep.report.write` for what is replaced."""
    steps = max(found.steps, 1)
    stages = [
        [stage, span(seconds / steps), f"{seconds / found.seconds:.1%}"] for stage, seconds in found.stages().items()
    ]
    peak = found.peak()
    numbers = [("a step", span(found.seconds / steps)), ("operations", f"{len(found.operations):,}")]
    if peak is not None:
        numbers.append(("most memory in a step", size(peak.held.in_use)))
    return write(
        path,
        page(
            f"profile of {name}",
            f"<h1>Profile of {said(name)}</h1>",
            cards(numbers),
            section("Stages", table(("stage", "time a step", "share"), stages, numbers=(1, 2))),
            section("Memory of a step", figures([_memory(found)]) if found.operations else ""),
            section("All", f"<pre>{said(found)}</pre>", folded=True),
        ),
    )


def _memory(found: Profile) -> tuple[str, str, str]:
    """Stack what is in use while each operation runs, by kind."""
    held = np.array([each.held for each in found.operations], dtype=float)
    ends = 1e6 * np.cumsum([each.seconds for each in found.operations])
    stretches = np.array_split(np.arange(len(held)), min(_STRETCHES, len(held)))
    in_use = held[:, : len(KINDS)].sum(axis=1)
    rows = [stretch[np.argmax(in_use[stretch])] for stretch in stretches]
    edges = np.repeat(np.concatenate([[0.0], ends[[stretch[-1] for stretch in stretches]]]), 2)[1:-1]
    kinds = [place for place in range(len(KINDS)) if held[:, place].any()]

    def paint(axes: Axes) -> None:
        areas = [np.repeat(held[rows, place], 2) for place in kinds]
        colours = [COLOURS[place % len(COLOURS)] for place in kinds]
        axes.stackplot(edges, *areas, colors=colours, labels=[KINDS[place] for place in kinds], alpha=0.85, linewidth=0)
        axes.set_ylim(0, 1.25 * in_use.max())
        tick(axes, size)

    title = "In use, by what it is for"
    note = "By the memory plan, while the operations run, each as long as it takes alone."
    return title, plot("memory of a step", paint, across="microseconds of operations"), note
