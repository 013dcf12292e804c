"""The plots of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from faststep._records import figure, quantity, share, size, span
from faststep.report._log import Log, Numbers, Table
from faststep.report._plot import COLOURS, INK, PAPER, from_zero, logarithmic, marker, plot, tick
from faststep.report._series import extremes, finite, since_last, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED = COLOURS[:4]
PARTS = {"data": ORANGE, "step": BLUE, "validation": GREEN, "checkpoint": COLOURS[4], "other": COLOURS[7]}
MEMORY = {"active": BLUE, "cache": ORANGE, "peak": RED, "process": COLOURS[7]}
Form = Callable[[float], str] | None  # formats a value
FEW = 60  # points that are seen one by one
RATES = {  # the first one that is known is drawn
    "tokens_per_second": "Tokens per second",
    "samples_per_second": "Samples per second",
    "steps_per_second": "Steps per second",
}
SPLIT = 150  # bars of the split of time


@dataclass(frozen=True)
class Chart:
    """A plot with its heading and a line of explanation."""

    title: str
    svg: str
    note: str = ""


def charts(log: Log) -> Iterator[Chart]:
    """Return the plots for which the log has data."""
    steps, intervals = log.steps, log.intervals
    schedule = steps if steps.known("learning_rate") else intervals
    if steps.known("loss") or intervals.known("loss") or log.validations.known("loss"):
        yield _loss(log)
    for name in log.metrics:
        yield _metric(log, name)
    norms = steps if steps.known("grad_norm") else intervals
    if norms.known("grad_norm"):
        yield _norm(log, norms)
    if schedule.known("learning_rate"):
        yield _line("Learning rate", log, schedule, {"learning_rate": BLUE})
    rates = intervals.where(since_last(intervals.step, log.resumes) > 0)  # the last one may hold no step
    for name, title in RATES.items():
        if rates.known(name):
            yield _line(title, log, rates, {name: BLUE}, quantity)
            break
    if any(column.any() for column in intervals.group("seconds").values()):
        yield _split(log)
    if steps.known("seconds"):
        yield _durations(log)
    memory = {f"memory.{name}": colour for name, colour in MEMORY.items() if intervals.known(f"memory.{name}")}
    if memory:
        yield _line("Memory", log, intervals, memory, size, "Of MLX: active, cache and peak. Of the process: process.")
    if intervals.known("traces") or intervals.known("skipped"):
        yield _counts(log)
    if intervals.known("padding"):
        note = "The share of a batch that is no padding."
        yield _line("Padding efficiency", log, intervals, {"padding": BLUE}, share, note)
    if intervals.known("update_ratio"):
        note = "The norm of an update over the norm of the weights."
        yield _line("Update ratio", log, intervals, {"update_ratio": BLUE}, note=note)
    for name, each in (log.starts[-1].get("data") or {}).items() if log.starts else ():
        yield _lengths(name, each)
    for name in log.values.group("values"):
        if log.values.known(f"values.{name}"):
            yield _line(name, log, log.values, {f"values.{name}": GREEN}, dots=True)


def _loss(log: Log) -> Chart:
    table = log.steps if log.steps.known("loss") else log.intervals
    x, y, window = smooth(table.step, table["loss"])

    def paint(axes: Axes) -> None:
        raw, validation = finite(table.step, table["loss"])[1], log.validations["loss"]
        logarithmic(axes, np.concatenate([raw, validation]))
        _raw(axes, table, "loss", BLUE)
        if window > 1:
            axes.plot(x, y, color=BLUE, label=f"mean of {window} steps")
        _validations(axes, log)
        tick(axes)
        _marks(axes, log)
        skipped(axes, log)

    lost = int(np.nansum(log.steps["skipped"]))
    note = "Faint: each step, of long runs the lowest and the highest of each stretch."
    note += f" Marks at the foot: {lost} skipped batches." if lost else ""
    return Chart("Loss", plot("loss", paint), note + _resumed(log))


def _metric(log: Log, name: str) -> Chart:
    column = f"metrics.{name}"
    table = log.steps if log.steps.known(column) else log.intervals
    x, y, window = smooth(table.step, table[column])

    def paint(axes: Axes) -> None:
        logarithmic(axes, np.concatenate([table[column], log.validations[column]]))
        _raw(axes, table, column, BLUE)
        if window > 1:
            axes.plot(x, y, color=BLUE, label=f"mean of {window} steps")
        _validations(axes, log, name)
        tick(axes)
        _marks(axes, log)

    title = name[:1].upper() + name[1:]
    return Chart(title, plot(f"metric {name}", paint), "Faint: each step." if len(y) else "")


def _raw(axes: Axes, table: Table, name: str, colour: str) -> None:
    """Draw every point faintly."""
    x, y = extremes(table.step, table[name])
    axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.7, marker=marker(x), markersize=3)


def _validations(axes: Axes, log: Log, name: str = "loss") -> None:
    """Draw a value of the validations, with a star at the best where it is what is monitored."""
    table = log.validations
    x, y = finite(table.step, table[name if name == "loss" else f"metrics.{name}"])
    if not len(y):
        return
    dots = "o" if len(y) <= FEW else ""
    axes.plot(*extremes(x, y, 150), color=GREEN, marker=dots, markersize=3, linewidth=1, label="validation")
    if log.best is not None and log.best[0] == name:
        _, value, at = log.best
        axes.plot(at, value, "*", color=GREEN, markersize=11, markeredgecolor=PAPER,
                  label=f"best {figure(value)} at {at:,}", linestyle="none")  # fmt: skip


def _marks(axes: Axes, log: Log) -> None:
    """Draw a line where the run was resumed."""
    for at in log.resumes[-200:]:
        axes.axvline(at, color=INK, alpha=0.35, linewidth=0.8, linestyle=(0, (3, 3)))


def _resumed(log: Log) -> str:
    count = len(log.resumes)
    return f" Dashed: resumed, {count} time{'s' if count > 1 else ''}." if count else ""


def skipped(axes: Axes, log: Log) -> None:
    """Mark the skipped batches at the foot of the plot."""
    at = log.steps.step[np.nan_to_num(log.steps["skipped"]) > 0]
    if len(at):
        at = np.unique(np.linspace(0, len(at) - 1, min(len(at), 1000)).astype(int)) if len(at) > 1000 else at
        axes.plot(
            at,
            np.full(len(at), 0.02),
            "|",
            color=RED,
            markersize=7,
            transform=axes.get_xaxis_transform(),
            label="skipped",
        )


def _norm(log: Log, table: Table) -> Chart:
    x, y, window = smooth(table.step, table["grad_norm"])

    def paint(axes: Axes) -> None:
        logarithmic(axes, table["grad_norm"], rather=True)
        _raw(axes, table, "grad_norm", BLUE)
        if window > 1:
            axes.plot(x, y, color=BLUE, label=f"mean of {window} steps")
        tick(axes)
        _marks(axes, log)

    return Chart("Gradient norm", plot("gradient norm", paint), "Before clipping.")


def _line(
    title: str,
    log: Log,
    table: Table,
    columns: dict[str, str],
    form: Form = None,
    note: str = "",
    *,
    dots: bool = False,
) -> Chart:
    averaged = len(columns) == 1 and len(table) > 2 * FEW and title != "Learning rate"

    def paint(axes: Axes) -> None:
        for name, colour in columns.items():
            x, y = extremes(table.step, table[name])
            dot = "o" if dots and len(y) <= FEW else marker(x)
            label = name.rpartition(".")[2] if len(columns) > 1 else None
            (line,) = axes.plot(x, y, color=colour, label=label, marker=dot, markersize=3)
            if averaged:
                line.set(alpha=0.3, linewidth=0.7)
                axes.plot(*smooth(table.step, table[name])[:2], color=colour)
        if not dots and title != "Learning rate":
            from_zero(axes, *(table[name] for name in columns))
        tick(axes, form)
        _marks(axes, log)

    return Chart(title, plot(title.lower(), paint), note)


def _split(log: Log) -> Chart:
    """Stack where the time of a step goes."""
    table = log.intervals
    covered = since_last(table.step, log.resumes)
    known = covered > 0
    parts = [np.nan_to_num(table[f"seconds.{part}"])[known] for part in PARTS]
    stretches = np.array_split(np.arange(int(known.sum())), min(SPLIT, max(1, int(known.sum()))))
    steps = np.array([covered[known][each].sum() for each in stretches])
    stacked = [np.array([part[each].sum() for each in stretches]) / steps for part in parts]
    ends = np.array([table.step[known][each][-1] for each in stretches])
    begin = float(table.step[known][0] - covered[known][0]) if known.any() else 0.0

    def paint(axes: Axes) -> None:
        edges, doubled = _stairs(begin, ends, stacked)
        axes.stackplot(edges, *doubled, colors=PARTS.values(), labels=list(PARTS), alpha=0.85, linewidth=0)
        axes.set_ylim(0, top)
        tick(axes, span)

    heights = sum(stacked)
    usual = float(np.median(heights)) if len(steps) else 0.0
    top = 4 * usual if len(steps) and heights.max() > 8 * usual > 0 else None
    cut = int((heights > top).sum()) if top else 0
    whole = sum(part.sum() for part in parts)
    shares = ", ".join(
        f"{name} {share(part.sum() / whole)}".replace(" ", "\N{NO-BREAK SPACE}")
        for name, part in zip(PARTS, parts, strict=True)
    )
    note = f"Mean of each stretch. In all: {shares}."
    if cut:  # tracing, and the kernels that it compiles
        note += f" Cut off: {cut} with up to {span(heights.max())} a step."
    return Chart("Time of a step", plot("time of a step", paint), note)


def _stairs(begin: float, ends: Numbers, values: list[Numbers]) -> tuple[Numbers, list[Numbers]]:
    """Return x and the y's of areas that are level over each stretch."""
    edges = np.repeat(np.concatenate([[begin], ends]), 2)[1:-1]
    return edges, [np.repeat(each, 2) for each in values]


def _durations(log: Log) -> Chart:
    table = log.steps

    def paint(axes: Axes) -> None:
        logarithmic(axes, np.concatenate([table["seconds"], table["wait"]]))
        for name, colour, label in (("seconds", BLUE, "a step, data included"), ("wait", ORANGE, "waited for data")):
            if table.known(name):
                _raw(axes, table, name, colour)
                axes.plot(*smooth(table.step, table[name])[:2], color=colour, label=label)
        if axes.get_yscale() != "log":
            from_zero(axes, table["seconds"])
        tick(axes, span)
        _marks(axes, log)

    return Chart("Seconds of each step", plot("seconds of each step", paint), "Faint: shortest and longest.")


def _lengths(name: str, summary: dict[str, Any]) -> Chart:
    """Plot how many samples of a dataset have which length."""
    edges, counts = summary["histogram"]["edges"], summary["histogram"]["counts"]

    def paint(axes: Axes) -> None:
        axes.stairs(counts, edges, fill=True, color=BLUE, alpha=0.6)
        axes.set_ylabel("samples")
        tick(axes, quantity, whole=True)

    title = f"Lengths of samples, {name}"
    return Chart(title, plot(title.lower(), paint, across="tokens"), "Of each sample, before padding or packing.")


def _counts(log: Log) -> Chart:
    table = log.intervals

    def paint(axes: Axes) -> None:
        for name, colour, label in (("traces", BLUE, "traces made"), ("skipped", RED, "batches skipped")):
            if table.known(name):
                axes.plot(*extremes(table.step, table[name]), color=colour, label=label, drawstyle="steps-post")
        from_zero(axes, table["traces"], table["skipped"])
        tick(axes, quantity, whole=True)
        _marks(axes, log)

    return Chart("Traces and skipped batches", plot("traces and skipped batches", paint), "Counted from each start.")
