"""The result of a diagnosis, as text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faststep._records import size, span
from faststep.doctor._finding import LEVELS, Finding
from faststep.doctor._growth import LEAST_ACTIVE, growth
from faststep.doctor._watch import Measured

_BAR = 24  # characters
_ONCE = ("forward", "checkpoint")  # times that are not those of a step


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a training.

    Attributes:
        findings: What is wrong, in the order of the rungs.
        rungs: What was measured on each rung.
        notes: How it was measured, where that matters.
    """

    findings: tuple[Finding, ...]
    rungs: tuple[Measured, ...]
    notes: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """True if there is neither a failure nor a warning."""
        return not any(each.level != "note" for each in self.findings)

    @property
    def first(self) -> Measured | None:
        """The first rung that hangs, fails, grows, changes the numbers or is slow."""
        return next((each for each in self.rungs if each.status not in ("ok", "skipped")), None)

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if not self.rungs:
            return "nothing was diagnosed in this process"
        worst = sorted(
            (each for each in self.findings if each.level != "note"), key=lambda each: LEVELS.index(each.level)
        )
        if not worst:
            return "healthy: nothing hangs, grows, fails or changes the numbers"
        first = f"; the first rung with a fault is '{self.first.title}'" if self.first else ""
        return f"{worst[0].name}: {worst[0].text}{first}"

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        rungs = [asdict(each) | {"milliseconds": each.milliseconds, "place": each.place} for each in self.rungs]
        values = {"healthy": self.healthy, "verdict": self.verdict, "notes": list(self.notes)}
        return {**values, "findings": [each.plain() for each in self.findings], "rungs": rungs}

    def html(self, path: str | Path) -> Path:
        """Write a page with it: what to do, and memory and time by rung.

        Args:
            path: The file; a page of this package that is there is replaced.

        Returns:
            The path.

        Raises:
            FileExistsError: Something else is there.
            ImportError: matplotlib is not installed.
        """
        if not self.rungs:  # a child that is there for another call writes over nothing
            return Path(path)
        from faststep.doctor._page import write_page
        from faststep.report import Html, said

        verdict = Html(f'<span class="{"good" if self.healthy else "error"}">{said(self.verdict)}</span>')
        return write_page(Path(path), verdict, self.notes, self.findings, self.rungs)

    def __str__(self) -> str:
        lines = [*table(self.rungs), ""]
        for number, each in enumerate(self.findings, start=1):
            lines += [f"{number}. {each.level}: {each.name}: {each.text}", f"   -> {each.remedy}"]
            lines += [f"      {line}" for line in each.code.splitlines()]
        for rung in self.rungs:
            if rung.stack:
                lines += ["", f"stacks of '{rung.title}':", *rung.stack.splitlines()[:40]]
        return "\n".join([*lines, "", *self.notes, self.verdict])


def table(rungs: Sequence[Measured]) -> list[str]:
    """Return the rungs as lines of text, with bars of time and memory."""
    times = [0.0 if each.name in _ONCE else each.milliseconds or 0.0 for each in rungs]
    peaks = [max(each.column("active"), default=0.0) for each in rungs]
    rows = [("", "", "time a step", "", "MLX memory", "", "growth a step")]
    for rung, milliseconds, peak in zip(rungs, times, peaks, strict=True):
        line, measured = growth(rung.column("active")), rung.milliseconds
        shown = "-" if measured is None else span(measured / 1e3)
        grown = "-" if line is None or not rung.steps else "none" if not line.is_real(LEAST_ACTIVE) else str(line)
        memory = size(peak) if rung.steps else "-"
        rows.append((rung.title, rung.status, shown, _bar(milliseconds, times), memory, _bar(peak, peaks), grown))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = (2, 4)
    return [
        "  ".join(
            cell.rjust(widths[place]) if place in right else cell.ljust(widths[place]) for place, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def _bar(value: float, of: Sequence[float]) -> str:
    most = max(of, default=0.0)
    return "#" * round(_BAR * value / most) if most > 0 else ""
