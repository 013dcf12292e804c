"""Results of `tune`: the rule by which a setting counts as faster, and the table."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LEAST_GAIN = 0.02
LEAST_ROUNDS = 3

Verdict = Literal["faster", "not faster", "other losses", "failed"]


@dataclass(frozen=True)
class Measured:
    """Measurements of one child process.

    Attributes:
        milliseconds: The median time of a step.
        losses: The losses of its first steps.
        peak_bytes: The peak of MLX's memory after the warm-up.
        back_end: "cpu", "cuda" or "metal".
        device: The name of the device.
    """

    milliseconds: float
    losses: tuple[float, ...]
    peak_bytes: int
    back_end: str
    device: str


@dataclass(frozen=True)
class Trial:
    """One setting, measured in several child processes.

    Attributes:
        environment: The variables that were set; none for the baseline.
        milliseconds: The median time of a step in each child.
        ratios: That time over the baseline's in the same round, one for each round.
        peak_bytes: The largest peak of MLX's memory; 0 when nothing was measured.
        loss_difference: How much the losses of its first steps differ from the baseline's, relatively, at most.
        verdict: "faster" by the rule of `gains`, "not faster", "other losses" or "failed".
        failure: Why a child gave no result: the last line of its stderr, or that it took too long. None otherwise.
    """

    environment: dict[str, str]
    milliseconds: tuple[float, ...]
    ratios: tuple[float, ...]
    peak_bytes: int
    loss_difference: float
    verdict: Verdict
    failure: str | None = None

    @property
    def ratio(self) -> float:
        """The median of the ratios, NaN without any."""
        return statistics.median(self.ratios) if self.ratios else math.nan


@dataclass(frozen=True)
class Tuning:
    """Result of `tune`; `str()` of it is a table.

    Attributes:
        target: The step that was measured.
        device: The device that it ran on.
        environment: What to set; empty when nothing is faster beyond the noise.
        ratio: The time of a step with it, over the time without: 1.0 when nothing is to be set.
        baseline: The environment as it is.
        control: The environment as it is once more: how far its ratios are from 1 is the noise.
        trials: Every setting that was tried.
        verified: The winners together, and the best of them alone, measured once more in fresh children.
        interrupted: Whether Ctrl-C ended it early. Nothing is to be set that was not verified before.
        note: That equal runs differ in time or in losses, and what to do about it; empty when they agree.
    """

    target: str
    device: str
    environment: dict[str, str]
    ratio: float
    baseline: Trial
    control: Trial
    trials: tuple[Trial, ...]
    verified: tuple[Trial, ...]
    interrupted: bool
    note: str

    @property
    def export(self) -> str:
        """The line for a shell, empty when there is nothing to set."""
        return f"export {assignments(self.environment)}" if self.environment else ""

    def __str__(self) -> str:
        rows = [_HEADER, _row("as it is", self.baseline), _row("as it is, again", self.control)]
        rows += [_row(assignments(trial.environment), trial) for trial in self.trials]
        rows += [_row(f"verified: {assignments(trial.environment)}", trial) for trial in self.verified]
        notes = ["Interrupted: this is what was measured so far."] if self.interrupted else []
        notes += [self.note] if self.note else []
        return "\n".join([f"{self.target} on {self.device}", "", *_aligned(rows), "", *notes, self._advice()])

    def _advice(self) -> str:
        if self.environment:
            return f"A step takes {self.ratio:.3f} of its time with:\n{self.export}"
        if self.interrupted:
            return "Nothing to set: no gain was verified."
        return f"Nothing to set: no setting is faster by {LEAST_GAIN:.0%} and beyond the noise."


def gains(ratios: Sequence[float], control: Sequence[float]) -> bool:
    """Return whether a setting is faster beyond the noise.

    It is when the median of its ratios to the baseline is at most 0.98, and their upper quartile lies below the lower
    quartile of the control's: the ratios of a second baseline to the first. Both take at least three rounds.

    Args:
        ratios: Time of a step with the setting, over the baseline's in the same round.
        control: Time of a step of the second baseline, over the first's in the same round.

    Returns:
        Whether both hold.
    """
    if min(len(ratios), len(control)) < LEAST_ROUNDS:
        return False
    return statistics.median(ratios) <= 1 - LEAST_GAIN and quartiles(ratios)[1] < quartiles(control)[0]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile, interpolated linearly (type 7 of Hyndman and Fan, 1996)."""
    if len(values) == 1:
        return values[0], values[0]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


def loss_difference(losses: Iterable[float], reference: Iterable[float]) -> float:
    """Return the largest relative difference of two series of losses; infinite where only one of two is finite."""
    differences = [
        abs(a - b) / max(abs(a), abs(b))
        for a, b in zip(losses, reference, strict=True)
        if a != b and not (math.isnan(a) and math.isnan(b))
    ]
    return max((math.inf if math.isnan(difference) else difference for difference in differences), default=0.0)


def combine(winners: Iterable[Trial]) -> list[dict[str, str]]:
    """Return what to verify: the winners together, the best value of each variable, and the best of them alone."""
    ordered = [winner.environment for winner in sorted(winners, key=lambda winner: winner.ratio)]
    together: dict[str, str] = {}
    for environment in ordered:
        if not together.keys() & environment.keys():
            together |= environment
    return [together] if together == ordered[0] else [together, ordered[0]]


def assignments(environment: Mapping[str, str]) -> str:
    """Return `A=1 B=2`, quoted for a shell."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())


_HEADER = ("setting", "ms a step", "from-to", "ratio", "quartiles", "peak MB", "rounds", "")


def _row(name: str, trial: Trial) -> tuple[str, ...]:
    said: str = trial.verdict if trial.environment else ""
    if trial.verdict == "other losses":
        said = f"changes the losses by {trial.loss_difference:.1e}"
    if trial.failure is not None:
        said = f"failed: {trial.failure}"
    if not trial.milliseconds:
        return (name, *["-"] * 5, "0", said)
    times = trial.milliseconds
    taken = f"{statistics.median(times):.2f}", f"{min(times):.2f}-{max(times):.2f}"
    ratio = (f"{trial.ratio:.3f}", "{:.3f}-{:.3f}".format(*quartiles(trial.ratios))) if trial.ratios else ("-", "-")
    return (name, *taken, *ratio, f"{trial.peak_bytes / 1e6:.1f}", str(len(times)), said)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]).rstrip() for row in rows
    ]
