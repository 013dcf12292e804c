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


class Machines:
    """The machines of the samples, each named by a letter."""

    def __init__(self) -> None:
        """Begin with none."""
        self._known: list[dict[str, Any]] = []

    def name(self, sample: dict[str, Any]) -> str:
        """Return the letter of a sample's machine."""
        machine = {name: value for name, value in sample["machine"].items() if name not in _OF_A_RUN}
        if machine not in self._known:
            self._known.append(machine)
        return chr(ord("A") + self._known.index(machine))

    def measured_on(self, sample: dict[str, Any]) -> list[str]:
        """Say when, what and on which machine a sample was measured."""
        machine = sample["machine"]
        run = [f"{name}: {machine[name]}" for name in _OF_A_RUN if machine.get(name) not in (None, "none")]
        versions = [f"{name} {value}" for name, value in sample["versions"].items()]
        facts = "; ".join(filter(None, [f"machine {self.name(sample)}", ", ".join(run), ", ".join(versions)]))
        return [f"Measured {sample['date']} (UTC), commit {sample['commit']}; {facts}.", ""]

    def lines(self) -> list[str]:
        """Return the section with all machines."""
        names = list(self._known[0])
        rows = [[chr(ord("A") + i), *(str(each[name]) for name in names)] for i, each in enumerate(self._known)]
        return ["## Machines", "", *table(["machine", *names], rows)]


_OF_A_RUN = ("settings", "load before")
