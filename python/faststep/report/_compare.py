"""The page of several runs, over each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from faststep._records import clock, flat, printable, quantity, size
from faststep.report._charts import Form
from faststep.report._log import Log, Table, read_log
from faststep.report._page import Html, figures, page, said, section, write
from faststep.report._page import table as html_table
from faststep.report._plot import COLOURS, from_zero, logarithmic, plot, tick
from faststep.report._report import best, ending, last_value, peak, position, rate
from faststep.report._series import extremes, since_last, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Spec = tuple[str, str, str, bool, Form]
DASHES = ("-", "--", ":", "-.")
# title, which table, column, whether it is averaged, form of the y axis
PLOTS: tuple[Spec, ...] = (
    ("Loss", "steps", "loss", True, None),
    ("Validation loss", "validations", "loss", False, None),
    ("Gradient norm", "steps", "grad_norm", True, None),
    ("Learning rate", "steps", "learning_rate", False, None),
    ("Tokens per second", "intervals", "tokens_per_second", False, quantity),
    ("Samples per second", "intervals", "samples_per_second", False, quantity),
    ("Active memory", "intervals", "memory.active", False, size),
    ("Memory of the process", "intervals", "memory.process", False, size),
)


def compare(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page on which runs are drawn over each other, by step and by time of training.

    It has a table of how they ended and one of the config's keys in which they differ. The page is one file that
    fetches nothing.

    Args:
        runs: The folders of the runs, or their `log.jsonl`.
        out: The page.

    Returns:
        The page's path, which a notebook shows as the page.

    Raises:
        FileNotFoundError: A run has no log.
        LogError: A log cannot be read; the message names file and line.
        ImportError: matplotlib is not installed.
        ValueError: `runs` is empty.
    """
    if not runs:
        raise ValueError("compare: expected one run or more, got none")
    logs = [read_log(run) for run in runs]
    names = _names([log.path.resolve().parent for log in logs])
    metrics = dict.fromkeys(name for log in logs for name in log.metrics)
    specs: list[Spec] = [*PLOTS[:2]]
    for name in metrics:
        title = name[:1].upper() + name[1:]
        specs += [(title, "steps", f"metrics.{name}", True, None)]
        specs += [(f"Validation {name}", "validations", f"metrics.{name}", False, None)]
    charts = (chart for spec in [*specs, *PLOTS[2:]] for chart in _charts(spec, names, logs))
    text = page(
        f"{', '.join(names)} · comparison",
        f"<h1>{len(logs)} runs</h1>",
        section("How they ended", _ends_table(names, logs)),
        section("Where their configs differ", _differences(names, logs)),
        section("By step, and by time of training", figures(charts)),
    )
    return write(Path(out), text)


def _names(folders: Sequence[Path]) -> list[str]:
    """Name the runs by as much of the end of their paths as tells them apart, a run that comes again with a number."""
    different = set(folders)
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        if len({folder.parts[-parts:] for folder in different}) == len(different):
            break
    names = [printable(str(Path(*folder.parts[-parts:]))) for folder in folders]
    times = [names[:place].count(name) for place, name in enumerate(names, 1)]
    return [name if time == 1 else f"{name} ({time})" for name, time in zip(names, times, strict=True)]


def _style(place: int) -> tuple[str, str]:
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def _charts(spec: Spec, names: Sequence[str], logs: Sequence[Log]) -> Iterator[tuple[str, str, str]]:
    title, source, column, averaged, form = spec
    tables = [_table(log, source, column) for log in logs]
    if not any(table.known(column) for table in tables):
        return
    for by_time in (False, True):
        svg = plot(f"{title} by {'time' if by_time else 'step'}".lower(),
                   lambda axes: _paint(axes, names, tables, column, averaged, form, by_time),  # noqa: B023
                   by_time=by_time)  # fmt: skip
        yield title, svg, "Means over a fiftieth of the run; faint: lowest and highest." if averaged else ""


def _table(log: Log, source: str, column: str) -> Table:
    table: Table = getattr(log, source)
    if column.endswith("_per_second"):
        return table.where(since_last(table.step, log.resumes) > 0)
    return log.intervals if source == "steps" and not table.known(column) else table


def _paint(
    axes: Axes,
    names: Sequence[str],
    tables: Sequence[Table],
    column: str,
    averaged: bool,
    form: Form,
    by_time: bool,
) -> None:
    logarithmic(axes, np.concatenate([table[column] for table in tables]), rather=column == "grad_norm")
    for place, (name, table) in enumerate(zip(names, tables, strict=True)):
        colour, dash = _style(place)
        x = table.elapsed if by_time else table.step
        if averaged:
            axes.plot(*extremes(x, table[column], 200), color=colour, alpha=0.2, linewidth=0.6)
        line = smooth(x, table[column])[:2] if averaged else extremes(x, table[column], 200)
        dots = "o" if len(line[0]) <= 30 else ""
        axes.plot(
            *line, color=colour, linestyle=dash, marker=dots, markersize=2.5, label=name if len(names) <= 6 else None
        )
    if column not in ("loss", "grad_norm", "learning_rate") and not column.startswith("metrics."):
        from_zero(axes, *(table[column] for table in tables))
    tick(axes, form)


def _swatch(place: int, name: str) -> Html:
    return Html(f'<span class="swatch" style="background: {_style(place)[0]}"></span>{said(name)}')


def ends(runs: Sequence[str | Path]) -> list[list[str]]:
    """Return how runs ended, as texts: a row of headings, and one for each run.

    Args:
        runs: The folders of the runs, or their `log.jsonl`.

    Raises:
        FileNotFoundError: A run has no log.
        LogError: A log cannot be read; the message names file and line.
    """
    logs = [read_log(run) for run in runs]
    header, rows = _ends(_names([log.path.resolve().parent for log in logs]), logs)
    return [header, *rows]


def _ends(names: Sequence[str], logs: Sequence[Log]) -> tuple[list[str], list[list[str]]]:
    metrics = list(dict.fromkeys(name for log in logs for name in log.metrics))[:4]
    rates = [name for name in ("tokens", "samples") if any(rate(log, name) != "-" for log in logs)]
    monitors = dict.fromkeys(log.best[0] for log in logs if log.best)
    rows = []
    for name, log in zip(names, logs, strict=True):
        values = [last_value(log, f"metrics.{each}") for each in metrics]
        value = f"{log.best[0]} {best(log)}" if log.best and len(monitors) > 1 else best(log)
        rows.append([name, position(log), clock(log.seconds), last_value(log), *values, value,
                     *(rate(log, each) for each in rates), peak(log)])  # fmt: skip
    monitor = "best validation" if len(monitors) != 1 else f"best validation {next(iter(monitors))}"
    header = ["run", "steps", "time", "last loss", *(f"last {each}" for each in metrics), monitor,
              *(f"{each}/s" for each in rates), "peak memory"]  # fmt: skip
    return header, rows


def _ends_table(names: Sequence[str], logs: Sequence[Log]) -> str:
    header, rows = _ends(names, logs)
    cells = [[_swatch(place, name), *rest, Html(ending(log, start=False))]
             for place, ((name, *rest), log) in enumerate(zip(rows, logs, strict=True))]  # fmt: skip
    return html_table([*header, "end"], cells, numbers=range(1, len(header)))


def _differences(names: Sequence[str], logs: Sequence[Log]) -> str:
    configs = [flat(log.config) for log in logs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [json.dumps(config[key], default=str) if key in config else "" for config in configs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return html_table(("key", *names), rows)
