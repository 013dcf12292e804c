"""The result of a check: differences between the native step and plain MLX, beside plain MLX's own rounding noise."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from faststep._records import count, figure, size, span

ALLOWED = 10.0  # times the noise
_LINES = 60  # of the summary of the modules


@dataclass(frozen=True)
class Difference:
    """Difference of one quantity between the native step and plain MLX.

    Attributes:
        kind: "loss", "gradient", "parameter" or "optimizer".
        path: The array: "layers.0.weight", or "step 3" of a loss.
        difference: The largest absolute difference of its elements.
        noise: The same between two runs of plain MLX that differ by rounding.
        scale: The largest absolute value of the array in plain MLX.
        limit: The largest difference that counts as rounding: ten times the noise and some units in the last place.
    """

    kind: str
    path: str
    difference: float
    noise: float
    scale: float
    limit: float

    @property
    def is_rounding(self) -> bool:
        """True if the difference is no more than rounding."""
        return self.difference <= self.limit

    @property
    def excess(self) -> float:
        """The difference by the limit."""
        return self.difference / self.limit if self.limit else float("inf") if self.difference else 0.0


@dataclass(frozen=True)
class ModuleShape:
    """A module of the model, as the first batch goes through it.

    Attributes:
        path: Its path: "layers.0".
        kind: Its class.
        output: The shape of its output; None where it returns no array, or is not called.
        parameters: The number of its own parameters, without those of modules inside it.
        frozen: How many of these do not train.
    """

    path: str
    kind: str
    output: tuple[int, ...] | None
    parameters: int
    frozen: int


@dataclass(frozen=True)
class Timing:
    """Time and memory of a loop.

    Attributes:
        milliseconds: A step's, in each round.
        peak_bytes: The peak of MLX's memory, without what the check keeps to put back.
    """

    milliseconds: tuple[float, ...]
    peak_bytes: int

    @property
    def median(self) -> float:
        """The median of the rounds, in milliseconds."""
        return statistics.median(self.milliseconds)

    def __str__(self) -> str:
        low, high = min(self.milliseconds), max(self.milliseconds)
        return (
            f"{span(self.median / 1e3)} a step ({span(low / 1e3)} to {span(high / 1e3)}), peak {size(self.peak_bytes)}"
        )


@dataclass(frozen=True)
class Comparison:
    """A native step beside plain MLX.

    Attributes:
        steps: How many batches each took.
        mode: How the steps were computed: "native" where calls of the loss were left out, "called" or "plain"; see
            `Stats`.
        reason: Why it is not "native"; None of one or two steps, too, which are always called.
        differences: For each kind the array that is furthest from plain MLX, by what rounding explains.
        native: Time and memory of the step; None where nothing was measured.
        plain: Those of plain MLX.
        notes: What the reader should know.
        modules: The modules in the order of their calls, those that are not called last.
    """

    steps: int
    mode: str
    reason: str | None
    differences: tuple[Difference, ...]
    native: Timing | None
    plain: Timing | None
    notes: tuple[str, ...] = ()
    modules: tuple[ModuleShape, ...] = ()

    @property
    def same(self) -> bool:
        """True if all differences are rounding."""
        return all(each.is_rounding for each in self.differences)

    @property
    def speedup(self) -> float | None:
        """The time of a plain step by that of a native one."""
        return self.plain.median / self.native.median if self.plain and self.native else None

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        wrong = [each for each in self.differences if not each.is_rounding]
        if wrong:
            worst = max(wrong, key=lambda each: each.excess)
            return (
                f"the numbers differ: {worst.kind} {worst.path} by {worst.difference:.1e}, where rounding explains "
                f"{worst.limit:.1e}. Train with Step(..., compile=False) or plain MLX, and please report it"
            )
        identical = all(each.difference == 0 for each in self.differences)
        said = "the same numbers to the bit" if identical else "the same numbers within rounding"
        if self.speedup is None:
            return said
        return f"{said}; the native step takes {1 / self.speedup:.2f} of plain MLX's time"

    def plain_values(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {**asdict(self), "same": self.same, "speedup": self.speedup, "verdict": self.verdict}

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "largest difference", "noise", "allowed", "of", "where")]
        for each in self.differences:
            numbers = (each.difference, each.noise, each.limit)
            rows.append((each.kind, *(f"{number:.1e}" for number in numbers), figure(each.scale), each.path))
        lines = [
            *_summary(self.modules),
            f"{self.steps} steps, mode {self.mode}" + (f": {self.reason}" if self.reason else ""),
            "",
            *_aligned(rows),
            "",
        ]
        if self.native and self.plain:
            lines += [f"native  {self.native}", f"plain   {self.plain}", ""]
        return "\n".join([*lines, *self.notes, self.verdict])


def _summary(modules: Sequence[ModuleShape]) -> list[str]:
    """Return the modules with parameters of their own as lines of text; of many the first ones and the last ones."""
    rows: list[tuple[str, ...]] = [("module", "output", "parameters", "frozen", "class")]
    for each in (each for each in modules if each.parameters):
        output = "-" if each.output is None else str(list(each.output))
        rows.append((each.path, output, count(each.parameters), count(each.frozen), each.kind))
    total = [count(sum(getattr(each, name) for each in modules)) for name in ("parameters", "frozen")]
    lines = _aligned([*rows, ("all", "", *total, "")])
    left = len(lines) - _LINES
    return [*(lines if left < 1 else [*lines[: _LINES // 2], f"... {left} more", *lines[-_LINES // 2 :]]), ""]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]).rstrip() for row in rows
    ]
