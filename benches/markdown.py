"""Shared parts of the report's sections: tables, spreads, and on what a sample was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lay out a table, the first column to the left and the others to the right."""
    line = "|---|" + "---:|" * (len(head) - 1)
    return [cells(head), line, *(cells(row) for row in rows), ""]


def cells(row: Sequence[str]) -> str:
    """Lay out one row."""
    return f"| {' | '.join(row)} |"


def spread(values: list[float]) -> str:
    """Format the median with the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{short(middle)} [{short(low)}, {short(high)}]"


def short(value: float) -> str:
    """Format a number with three digits, or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def megabytes(bytes: float | None) -> str:
    """Format bytes as MB of 10^6; nothing where none were measured."""
    return "" if bytes is None else f"{bytes / 1e6:,.1f}"


def measured_on(sample: dict[str, Any]) -> list[str]:
    """Say when, what and on what a sample was measured."""
    machine = ", ".join(f"{name}: {value}" for name, value in sample["machine"].items())
    versions = ", ".join(f"{name} {value}" for name, value in sample["versions"].items())
    return [f"Measured {sample['date']} (UTC), commit {sample['commit']}; {machine}; {versions}.", ""]
