"""The plots of the report: small SVG files, equal for equal samples."""

from __future__ import annotations

import re
import statistics
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from ways import COMPILED, FAST, FLUSHED

# Told apart by the colour-blind too (Okabe and Ito).
COLOURS = {COMPILED: "#d55e00", FAST: "#0072b2", FLUSHED: "#009e73"}

POINTS = 50  # of a line, at most
FONTS = "DejaVu Sans, Verdana, Arial, sans-serif"


class Panel(NamedTuple):
    """One of the axes over the steps of a run: which columns, in which style, times what."""

    title: str
    unit: str
    scale: float
    columns: dict[str, str]


PANELS = (
    Panel("Resident memory of the process", "MB", 1e-6, {"resident": "-"}),
    Panel("Memory of MLX: active, and cache (dashed)", "MB", 1e-6, {"active": "-", "cache": "--"}),
    Panel("Traces made", "traces", 1, {"traces": "-"}),
    Panel("Time of a step", "ms, mean between points", 1, {"ms": "-"}),
)
mpl.rcParams.update(
    {
        "svg.hashsalt": "faststep",
        "svg.fonttype": "none",
        "font.sans-serif": FONTS.split(", ")[:-1],
        "axes.grid": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
    }
)


def scaling(axis: str, title: str, points: list[dict[str, Any]], file: Path) -> None:
    """Plot milliseconds a step against the number of tensors or parameters, both logarithmic."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for way, colour in COLOURS.items():
        if way not in points[0]["ms"]:
            continue
        quartiles = [statistics.quantiles(point["ms"][way], n=4, method="inclusive") for point in points]
        low, middle, high = zip(*quartiles, strict=True)
        sizes = [point[axis] for point in points]
        axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(sizes, middle, "o-", color=colour, label=way)
    axes.set(title=title, xlabel=axis, ylabel="ms a step (median, quartiles shaded)", xscale="log", yscale="log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.legend(frameon=False)
    save(figure, file)


def run(title: str, ways: dict[str, Any], file: Path) -> None:
    """Plot memory, traces and the time of a step over the steps of a run."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(2, 2)
    for axes, panel in zip(panels.flat, PANELS, strict=True):
        draw(axes, panel, ways)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ways), frameon=False)
    save(figure, file)


def losses(result: dict[str, Any], file: Path) -> None:
    """Plot the losses of some ways over the steps of a run, and below how far they are from those of the first."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    figure.suptitle(textwrap.fill(result["title"], 80), fontsize="medium")
    above, below = figure.subplots(2, 1, sharex=True)
    colours = dict(zip(result["losses"], (COLOURS[COMPILED], COLOURS[FAST], COLOURS[FLUSHED]), strict=False))
    for (way, values), width in zip(result["losses"].items(), (4, 1.5, 0.8), strict=False):
        above.plot(result["step"], values, color=colours[way], linewidth=width, label=way)
    above.set(ylabel="loss, nats")
    above.legend(frameon=False)
    for way, values in result["difference"].items():
        below.plot(result["step"], values, color=colours[way], linewidth=1, label=f"{way}, from the first")
    below.set(xlabel="step", ylabel="largest difference")
    below.set_ylim(bottom=0)
    below.legend(frameon=False)
    save(figure, file)


def draw(axes: Axes, panel: Panel, ways: dict[str, Any]) -> None:
    """Draw the columns of one panel, every way in its colour; a line that lies on another is thinner."""
    for way, columns in ways.items():
        for name, style in panel.columns.items():
            values = [panel.scale * value for value in thinned(columns[name], mean=name == "ms")]
            width = 3 if way == COMPILED else 1.5
            axes.plot(thinned(columns["step"]), values, style, color=COLOURS[way], linewidth=width, label=way)
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", nbins=5)


def thinned(values: list[float], *, mean: bool = False) -> list[float]:
    """Return at most POINTS of the values: the last of each group, or its mean."""
    size = -(-len(values) // POINTS)
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    return [statistics.fmean(group) if mean else group[-1] for group in groups]


def save(figure: Figure, file: Path) -> None:
    """Write a figure, on white so that it can be read on a dark page too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    file.write_text(small(file.read_text(encoding="utf-8")), encoding="utf-8")


def small(text: str) -> str:
    """Return an SVG with a path on one line, positions in tenths of a pixel, and its font named once."""
    text = re.sub(r'(?<= d=")[^"]*', lambda path: " ".join(path[0].split()), text)
    text = re.sub(r"-?\d+\.\d{4,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r" ?font-family: [^;\"]*;?", "", text).replace("<svg ", f'<svg font-family="{FONTS}" ', 1)
    text = re.sub(r'^ *<g id="(text|line2d|patch)_\d+">\n(.*\n) *</g>\n', r"\2", text, flags=re.MULTILINE)
    return "\n".join(line.strip() for line in text.splitlines()) + "\n"
