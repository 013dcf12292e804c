"""The result of a diagnosis, as text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faststep._records import count, figure, size, span
from faststep.doctor._finding import LEVELS, Finding
from faststep.doctor._growth import LEAST_ACTIVE, growth
from faststep.doctor._user_code import users_stacks
from faststep.doctor._watch import Measured

_BAR = 24  # characters
_ONCE = ("forward", "checkpoint")  # times that are not those of a step
_PARTS = {"numbers": "what the numbers say", "native": "the native step", "own": "your own step (own_step=)"}
_MODULES = 16  # whose gradients are printed


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
            return f"healthy: no fault found. Looked at: {self.looked_at}"
        names = dict.fromkeys(each.name for each in worst[1:] if each.name != worst[0].name)
        more = f"; and {', '.join(names)}" if names else ""
        first = f"; the first rung with a fault is '{self.first.title}'" if self.first else ""
        return f"{worst[0].name}: {worst[0].text}{more}{first}"

    @property
    def looked_at(self) -> str:
        """The checks that the rungs made, in words, and those that they did not make."""
        climbed = {each.name: each for each in self.rungs if each.status != "skipped"}
        parts = []
        if (numbers := climbed.get("numbers")) is not None:
            batches = numbers.facts.get("batches", {}).get("looked_at", 0)
            parts += [f"the values of {batches} batches", f"the gradients of {len(numbers.steps)} steps"]
        if (own := climbed.get("own")) is not None:
            facts = own.facts.get("own", {"calls": 0, "updates": 0})
            parts += [f"{facts['calls']} calls of your own step with {facts['updates']} updates, beside plain MLX"]
        steps = max((len(each.steps) for each in climbed.values()), default=0)
        parts += [f"time and memory of up to {steps} steps in {len(climbed)} rungs"]
        missing = [title for name, title in _PARTS.items() if name not in climbed]
        return "; ".join(parts) + (f". Not looked at: {', '.join(missing)}" if missing else "")

    @property
    def gradients(self) -> list[dict[str, Any]]:
        """Each module with its parameters, the shape of its output, and its gradient at the last step in plain MLX."""
        facts = next((each.facts for each in self.rungs if "gradients" in each.facts), None)
        if facts is None:
            return []
        shapes: dict[str, list[int]] = facts["shapes"]["outputs"]
        return [{**each, "output": shapes.get(each["module"])} for each in facts["gradients"]["modules"]]

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
        from faststep.report import write

        return write(Path(path), self._page())

    def _repr_html_(self) -> str:
        """Show the page in a notebook."""
        from faststep.report import framed

        return framed(self._page())

    def _page(self) -> str:
        from faststep.doctor._page import page_of
        from faststep.report import Html, said

        verdict = Html(f'<span class="{"good" if self.healthy else "error"}">{said(self.verdict)}</span>')
        return page_of(verdict, self.notes, self.findings, self.rungs, self.gradients)

    def __str__(self) -> str:
        lines = [*table(self.rungs), "", *_gradients(self.gradients)]
        for number, each in enumerate(self.findings, start=1):
            lines += [f"{number}. {each.level}: {each.name}: {each.text}", f"   -> {each.remedy}"]
            lines += [f"      {line}" for line in each.code.splitlines()]
        for rung in self.rungs:
            if rung.stack:
                lines += ["", f"stacks of '{rung.title}':", *users_stacks(rung.stack).splitlines()[:40]]
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


def _gradients(modules: Sequence[dict[str, Any]]) -> list[str]:
    """Return the gradients by module as lines of text; of many modules those with the largest and the smallest."""
    if not modules:
        return []
    by_size = sorted(modules, key=lambda each: -float(each["gradient"]))
    shown = {each["module"] for each in (*by_size[: _MODULES // 2], *by_size[-_MODULES // 2 :])}
    rows = [("gradients by module", "output", "parameters", "norm", "by element", "update by weights")]
    for each in (each for each in modules if each["module"] in shown):
        norm = each["gradient"] * each["parameters"] ** 0.5
        numbers = (figure(norm), figure(each["gradient"]), figure(each["update"]))
        rows.append((each["module"], str(each["output"] or "-"), count(each["parameters"]), *numbers))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    left = len(modules) - len(shown)
    return [*lines, *([f"and {left} more modules between these"] if left else []), ""]


def _bar(value: float, of: Sequence[float]) -> str:
    most = max(of, default=0.0)
    return "#" * round(_BAR * value / most) if most > 0 else ""
