"""The page of one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from faststep._optional import need
from faststep._records import REASONS, clock, count, data_lines, figure, parameter_table, quantity, share, size, span
from faststep.report._charts import charts
from faststep.report._log import Log, read_log
from faststep.report._page import Html, cards, figures, page, said, section, when, write
from faststep.report._page import table as html_table
from faststep.report._series import finite

MOST = 400  # rows of a table


def report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write a page about a run: what ran, how it ended, its plots, modules, config, events and checkpoints.

    The page is one file that fetches nothing.

    Args:
        run: The run's folder, or its `log.jsonl`.
        out: The page; None: `report.html` beside the log.

    Returns:
        The page's path, which a notebook shows as the page.

    Raises:
        FileNotFoundError: There is no log.
        LogError: The log cannot be read; the message names file and line.
        ImportError: matplotlib or PyYAML is not installed.
    """
    log = read_log(run)
    name = log.path.resolve().parent.name
    text = page(
        f"{name} · training",
        _header(name, log),
        cards(_numbers(log)),
        figures((chart.title, chart.svg, chart.note) for chart in charts(log)),
        section("Parameters", _modules(log)),
        section("Data", _data(log)),
        section("Events", _events(log)),
        section("Checkpoints", _checkpoints(log)),
        section("Config", _config(log.config), folded=True),
        section("Starts", _starts(log)),
    )
    return write(log.path.with_name("report.html") if out is None else Path(out), text)


def _header(name: str, log: Log) -> str:
    start: Mapping[str, Any] = log.starts[-1] if log.starts else {}
    versions = ", ".join(f"{each} {version}" for each, version in (start.get("versions") or {}).items())
    facts = [str(log.starts[0].get("command") or "") if log.starts else "", str(start.get("device") or ""), versions]
    lines = [f"<h1>{said(name)}</h1>", f"<p>{ending(log)}</p>"]
    lines += [f'<p class="soft">{said(" · ".join(filter(None, facts)))}</p>'] if any(facts) else []
    notes = []
    if log.superseded:
        notes.append(f"{log.superseded:,} records of steps that were taken again after a resume are left out")
    if log.torn:
        notes.append(f"torn at line {', '.join(map(str, log.torn))} where the process was killed")
    lines += [f'<p class="soft">{said("; ".join(notes))}</p>'] if notes else []
    return "".join(lines)


def ending(log: Log, *, start: bool = True) -> str:
    """Return how the run ended, as HTML; with `start`, when it began too."""
    if log.end is None:
        state, kind = f"no end: it was killed, or goes on (last record {when(log.last)})", "warning"
    else:
        reason = str(log.end.get("reason", ""))
        state = f"{REASONS.get(reason, reason)}, {when(log.end['time'])}"
        kind = {"done": "good", "early_stop": "good", "error": "error", "bad_batches": "error"}.get(reason, "warning")
    began = f"started {when(log.starts[0]['time'])}, " if start and log.starts else ""
    return f'{said(began)}<span class="{kind}">{said(state)}</span>'


def _numbers(log: Log) -> list[tuple[str, str]]:
    seconds = {part: float(np.nansum(each)) for part, each in log.intervals.group("seconds").items()}
    stepping = sum(seconds.get(part, 0.0) for part in ("data", "step", "other"))
    return [
        ("steps", position(log)),
        ("time of training", clock(log.seconds)),
        ("last loss", last_value(log)),
        *((f"last {name}", last_value(log, f"metrics.{name}")) for name in log.metrics[:4]),
        (f"best validation {log.best[0]}" if log.best else "best validation", best(log)),
        *((f"{name} per second", rate(log, name)) for name in ("tokens", "samples")),
        ("median step", span(_median(log.steps["seconds"]))),
        ("waiting for data", share(seconds["data"] / stepping) if stepping > 0 and "data" in seconds else "-"),
        ("peak memory", peak(log)),
        ("skipped batches", count(int(np.nansum(log.steps["skipped"]))) if len(log.steps) else "-"),
        ("parameters", count(log.starts[-1].get("trainable")) if log.starts else "-"),
    ]


def _median(values: Any) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def position(log: Log) -> str:
    """Return the last step, of how many where that is known."""
    last = max((int(each.step[-1]) for each in (log.steps, log.intervals) if len(each)), default=0)
    target = log.starts[-1].get("steps") if log.starts else None
    return f"{last:,}" + (f" of {int(target):,}" if target is not None else "")


def last_value(log: Log, name: str = "loss") -> str:
    """Return a value of the last interval that has it, or else of the last step or validation."""
    for each in (log.intervals, log.steps, log.validations):
        values = finite(each.step, each[name])[1]
        if len(values):
            return figure(values[-1])
    return "-"


def best(log: Log) -> str:
    """Return the best value of what is monitored, and its step."""
    return "-" if log.best is None else f"{figure(log.best[1])} at {log.best[2]:,}"


def rate(log: Log, name: str) -> str:
    """Return the median of tokens or samples per second."""
    rates = log.intervals[f"{name}_per_second"]
    return quantity(np.nanmedian(rates)) if np.isfinite(rates).any() else "-"


def peak(log: Log) -> str:
    """Return the largest peak of MLX's memory."""
    values = log.intervals["memory.peak"]
    return size(np.nanmax(values)) if np.isfinite(values).any() else "-"


def _modules(log: Log) -> str:
    return html_table(
        ("module", "trainable", "frozen"), parameter_table(log.starts[-1]) if log.starts else [], numbers=(1, 2)
    )


def _data(log: Log) -> str:
    lines = [] if not log.starts else data_lines(log.starts[-1])
    return "".join(f"<p>{said(line)}</p>" for line in lines)


def _few(rows: list[list[str]]) -> list[list[str]]:
    """Leave out the middle of a long table, and say so."""
    if len(rows) <= MOST:
        return rows
    gap = [f"... {len(rows) - MOST:,} more ...", *[""] * (len(rows[0]) - 1)]
    return [*rows[: MOST // 4], gap, *rows[-(MOST - MOST // 4) :]]


def _events(log: Log) -> str:
    rows: list[list[str]] = []
    for event in log.events:
        level = str(event.get("level", "info"))
        kind = Html(f'<span class="{level if level in ("warning", "error") else "soft"}">{said(level)}</span>')
        rows.append(
            [when(event["time"]), count(event["step"]), kind, str(event.get("what", "")), str(event.get("text", ""))]
        )
    return html_table(("time", "step", "level", "what", ""), _few(rows), numbers=(1,))


def _checkpoints(log: Log) -> str:
    written = {str(each.get("path")): each for each in log.written.records}
    rows = []
    for each in log.checkpoints.records:
        path = str(each.get("path", ""))
        files = written.get(path, {})
        there = (log.path.parent / "checkpoints" / Path(path).name).is_dir()
        state = "" if there else Html('<span class="soft">deleted</span>')
        rows.append([count(each["step"]), path, state, figure(each.get("metric")), span(each.get("pause")),
                     span(files.get("seconds")), size(files.get("bytes"))])  # fmt: skip
    header = ("step", "path", "", "metric", "training paused", "written in", "size")
    return html_table(header, _few(rows), numbers=(0, 3, 4, 5, 6))


def _config(config: dict[str, Any]) -> str:
    if not config:
        return ""
    text = need("yaml").safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    return f"<pre>{said(text)}</pre>"


def _starts(log: Log) -> str:
    rows = [
        [when(each["time"]), count(each["step"]), "resumed" if each.get("resumed") else "started",
         str(each.get("command") or "")]
        for each in log.starts
    ]  # fmt: skip
    return html_table(("time", "step", "", "command"), _few(rows), numbers=(1,)) if len(rows) > 1 else ""
