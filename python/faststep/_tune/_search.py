"""The search of `tune`: child processes one at a time, in rounds, and the verdicts on their times."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from faststep._tune._report import (
    Measured,
    Trial,
    Tuning,
    Verdict,
    assignments,
    combine,
    gains,
    loss_difference,
    quartiles,
)

INSIDE = "FASTSTEP_TUNING"  # set in the children: a target that tunes when it is imported would start them for ever
_GROUP = 4  # settings that share a baseline: with more, the machine may drift in between
_GIVE_UP = 2  # rounds after which a setting that was faster in none is left out
_BUSY = 0.1  # width of the noise, between its quartiles, above which a note says so


class Run:
    """One setting: what its children measured, by round, and why one failed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.measured: dict[int, Measured] = {}
        self.failure: str | None = None

    def ratios(self, baseline: Run) -> list[float]:
        """Return its times over the baseline's, of the rounds in which both were measured."""
        rounds = self.measured.keys() & baseline.measured.keys()
        return [self.measured[i].milliseconds / baseline.measured[i].milliseconds for i in sorted(rounds)]


class Group:
    """Settings that run next to each other, the environment as it is among them twice."""

    def __init__(self, settings: Sequence[dict[str, str]]) -> None:
        self.baseline, self.again = Run({}), Run({})
        self.runs = [Run(setting) for setting in settings]

    def order(self, number: int) -> list[Run]:
        """Return what runs in a round, rotated by one place each: all that may still be faster, or nothing."""
        middle = (len(self.runs) + 1) // 2
        runs = [self.baseline, *self.runs[:middle], self.again, *self.runs[middle:]]
        first = number % len(runs)
        left_out = [run for run in self.runs if not self._may_gain(run)]
        return [run for run in runs[first:] + runs[:first] if run not in left_out] if left_out != self.runs else []

    def control(self) -> list[float]:
        """Return the ratios of two equal runs."""
        return self.again.ratios(self.baseline)

    def _may_gain(self, run: Run) -> bool:
        ratios = run.ratios(self.baseline)
        return run.failure is None and (len(ratios) < _GIVE_UP or min(ratios) < 1)


class Search:
    """The state of a search, which Ctrl-C may end anywhere."""

    def __init__(self, target: str, seconds: float, timeout: float, tolerance: float) -> None:
        """Start nothing yet."""
        self.target, self._seconds, self._timeout, self._tolerance = target, seconds, timeout, tolerance
        self.reference: Measured | None = None
        self.tried: list[Group] = []
        self.verified: list[Group] = []

    def run(self, settings: list[dict[str, str]], rounds: int) -> None:
        """Try the settings, then verify the winners."""
        self.tried = [Group(settings[i : i + _GROUP]) for i in range(0, len(settings), _GROUP)]
        self._measure("trying", self.tried, rounds)
        winners = [trial for trial in self._trials(self.tried) if trial.verdict == "faster"]
        if winners:
            self.verified = [Group(combine(winners))]
            self._measure("verifying", self.verified, rounds)

    def first(self) -> Measured:
        """Run the step as it is once: caches get warm, device and losses become known. Its time does not count.

        Raises:
            RuntimeError: It fails.
        """
        _say(f"{self.target}: the step as it is, to warm up")
        outcome = run_child(self.target, {}, self._seconds, self._timeout)
        if isinstance(outcome, str):
            raise RuntimeError(f"{self.target} fails in the environment as it is:\n{outcome}")
        self.reference = outcome
        return outcome

    def result(self, *, interrupted: bool) -> Tuning:
        """Return what was measured so far."""
        trials, verified = self._trials(self.tried), self._trials(self.verified)
        passed = [trial for trial in verified if trial.verdict == "faster"]
        best = min(passed, key=lambda trial: trial.ratio, default=None)
        control = [ratio for group in self.tried for ratio in group.control()]
        return Tuning(
            target=self.target,
            device=self.reference.device if self.reference else "",
            environment=best.environment if best else {},
            ratio=best.ratio if best else 1.0,
            baseline=self._trial([group.baseline for group in self.tried], []),
            control=self._trial([group.again for group in self.tried], control),
            trials=tuple(trials),
            verified=tuple(verified),
            interrupted=interrupted,
            note=self._note(),
        )

    def _measure(self, doing: str, groups: list[Group], rounds: int) -> None:
        done, start = 0, time.monotonic()
        for number in range(rounds):
            queue = [run for group in groups for run in group.order(number)]
            for i, run in enumerate(queue):
                outcome = run_child(self.target, run.environment, self._seconds, self._timeout)
                if isinstance(outcome, str):
                    run.failure = outcome.splitlines()[-1]
                else:
                    run.measured[number] = outcome
                done += 1
                left = (len(queue) * (rounds - number) - i - 1) * (time.monotonic() - start) / done
                found = (
                    f"failed: {run.failure}" if isinstance(outcome, str) else f"{outcome.milliseconds:.2f} ms a step"
                )
                name = assignments(run.environment) or "as it is"
                _say(f"{doing}, round {number + 1} of {rounds}: {name}: {found} (at most {_duration(left)} left)")

    def _trials(self, groups: list[Group]) -> list[Trial]:
        control = [ratio for group in groups for ratio in group.control()]
        return [self._trial([run], run.ratios(group.baseline), control) for group in groups for run in group.runs]

    def _trial(self, runs: list[Run], ratios: list[float], control: Sequence[float] = ()) -> Trial:
        measured = [one for run in runs for one in run.measured.values()]
        failure = next((run.failure for run in runs if run.failure is not None), None)
        difference = max(map(self._difference, measured), default=0.0)
        verdict: Verdict = "faster" if gains(ratios, control) else "not faster"
        if failure is not None:
            verdict = "failed"
        elif difference > self._limit():
            verdict = "other losses"
        times, peak = tuple(one.milliseconds for one in measured), max((one.peak_bytes for one in measured), default=0)
        return Trial(runs[0].environment if runs else {}, times, tuple(ratios), peak, difference, verdict, failure)

    def _difference(self, measured: Measured) -> float:
        return loss_difference(measured.losses, self.reference.losses) if self.reference else math.inf

    def _own_difference(self) -> float:
        """Return how far the losses of equal runs differ."""
        equal = [run for group in self.tried + self.verified for run in (group.baseline, group.again)]
        return max((self._difference(one) for run in equal for one in run.measured.values()), default=0.0)

    def _limit(self) -> float:
        return max(self._tolerance, 3 * self._own_difference())

    def _note(self) -> str:
        notes, own = [], self._own_difference()
        lower, upper = quartiles([ratio for group in self.tried for ratio in group.control()] or [1.0])
        if upper - lower > _BUSY:
            notes.append(
                f"Equal runs take {lower:.2f} to {upper:.2f} of each other's time: the machine is busy, and smaller "
                "gains do not show. Measure again when it is idle, or for more seconds and rounds."
            )
        if own > self._tolerance:
            notes.append(
                f"Losses of equal runs differ by {own:.1e}: whether a setting changes them shows only above "
                f"{3 * own:.1e}. Are all seeds set? (random, numpy.random and mx.random have one)"
            )
        return "\n".join(notes)


def run_child(target: str, setting: dict[str, str], seconds: float, timeout: float) -> Measured | str:
    """Measure the target in a process of its own.

    Args:
        target: "module:function" or "file.py:function".
        setting: Variables to set beside those of this process.
        seconds: How long to measure.
        timeout: The seconds after which the child is killed.

    Returns:
        What it measured, or why it did not: the end of its stderr, never empty.
    """
    environment = {"PYTHONHASHSEED": "0", **os.environ, **setting, INSIDE: "1"}
    with TemporaryDirectory(prefix="faststep-tune-") as folder:
        result, errors = Path(folder, "result.json"), Path(folder, "stderr")
        job = {"target": target, "seconds": seconds, "alarm": math.ceil(timeout) + 5, "result": str(result)}
        command = [sys.executable, "-m", "faststep._tune._child", json.dumps({**job, "path": sys.path})]
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
            )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                return f"took longer than {timeout:g} s"
            finally:
                _kill(process)
        if status == 0:
            return Measured(**json.loads(result.read_text(encoding="utf-8")))
        return _reason(status, errors.read_text(encoding="utf-8", errors="replace"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child and all that it started: it leads a process group of its own."""
    with suppress(ProcessLookupError, PermissionError):  # all have ended; on macOS a zombie answers with the second
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(status: int, stderr: str) -> str:
    """Return the last lines of stderr; for a process that a signal ended, or that said nothing, how it ended last."""
    lines = [line for line in stderr.splitlines() if line.strip()][-20:]
    if status < 0:
        lines.append(f"ended by {signal.Signals(-status).name}" + (f" after: {lines[-1]}" if lines else ""))
    return "\n".join(lines) or f"exit status {status}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
