"""Plots as SVG that a page holds: its fonts, and its colours by day and by night."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from faststep._optional import need
from faststep._records import clock, quantity
from faststep.report._page import said

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 6.4, 2.7  # inches
COLOURS = ("#3b82c4", "#e07b39", "#3f9e5f", "#c94f5c", "#8a6fc0", "#9c7a52", "#d46fa8", "#7d8590", "#a8a02c", "#2fa5b5")
TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # seconds
INK, GRID, PAPER = "#010203", "#040506", "#070809"  # stand for the page's own, and are put in its style
_PAGE = {INK: "var(--ink)", GRID: "var(--grid)", PAPER: "var(--paper)"}
_IDS = re.compile(r' id="[a-zA-Z0-9]+_\d+"')
_HEAD = re.compile(r".*?<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", re.DOTALL)
_RULES = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.4,
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def plot(name: str, paint: Callable[[Axes], None], *, by_time: bool = False, across: str = "step") -> str:
    """Return an `<svg>` element.

    Args:
        name: What is plotted, for screen readers, and different from the other plots of a page.
        paint: Draws into the axes.
        by_time: x is seconds of training.
        across: What x is otherwise.
    """
    matplotlib: Any = need("matplotlib")
    name = said(name)
    with matplotlib.rc_context(_RULES | {"svg.hashsalt": name}):
        figure = need("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        _finish(axes, by_time)
        axes.set_xlabel("time of training" if by_time else across)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(text.getvalue(), name)


def _finish(axes: Axes, by_time: bool) -> None:
    form = need("matplotlib.ticker").FuncFormatter
    axes.xaxis.set_major_formatter(form(lambda x, _: clock(x) if by_time else quantity(x)))
    low, high = axes.get_xlim()
    if high - low < 1:  # a single step
        axes.set_xlim(low - 1, high + 1)
    axes.xaxis.set_major_locator(_places(axes, by_time))
    axes.margins(x=0.01)
    axes.tick_params(which="both", length=0)
    if axes.get_legend_handles_labels()[0]:
        # Above the axes, where no line runs.
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, borderaxespad=0.2, handlelength=1.2)


def _places(axes: Axes, by_time: bool) -> Any:
    """Return where the ticks of the x axis are: at round numbers, or at round times."""
    ticker = need("matplotlib.ticker")
    low, high = axes.get_xlim()
    round_times = (step for step in TIMES if (high - low) / step <= 6)
    step = next(round_times, 0) if by_time else 0
    return ticker.MultipleLocator(step) if step else ticker.MaxNLocator(6, integer=True)


def _for_page(text: str, name: str) -> str:
    text = _HEAD.sub(lambda head: f'<svg role="img" aria-label="{name}" {head[1]}>', text, count=1)
    text = _IDS.sub("", re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL))
    for colour, variable in _PAGE.items():
        text = text.replace(colour, variable)
    return re.sub(r"\n\s*", "\n", text).strip()


def marker(points: Any) -> str:
    """Return the marker with which so few points are seen at all; none for a line."""
    return "o" if len(np.unique(points)) == 1 else ""


def tick(axes: Axes, form: Callable[[float], str] | None = None, *, whole: bool = False) -> None:
    """Label the y axis by a function of the value; without one by plain numbers."""
    ticker = need("matplotlib.ticker")
    log = axes.get_yscale() == "log"
    if form is not None or log:
        said = form or (lambda y: f"{y:g}")
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: said(y)))
    if log:
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=whole))


def logarithmic(axes: Axes, values: Any, *, rather: bool = False) -> None:
    """Make the y axis logarithmic where the values are positive and far apart, `rather` so where they are it less."""
    values = np.asarray(values)
    values = values[np.isfinite(values)]
    if len(values) == 0 or values.min() <= 0:
        return
    if values.max() > (4 * values.min() if rather else 5 * np.median(values)):
        axes.set_yscale("log")
        ticker, wide = need("matplotlib.ticker"), values.max() > 50 * values.min()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=8))


def from_zero(axes: Axes, *values: Any) -> None:
    """Set the y axis to begin at zero and end above the values, unless it is logarithmic."""
    if axes.get_yscale() == "log":
        return
    top = max((float(np.nanmax(each)) for each in values if np.isfinite(each).any()), default=0.0)
    axes.set_ylim(0, 1.1 * top if 0 < top < np.inf else None)
