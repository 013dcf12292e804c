"""The process of a rung, watched from outside: how far it is, how much memory it has, and whether it hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faststep.doctor._finding import Finding
from faststep.doctor._user_code import place_in_dump

_PAUSE = 0.05
_FEW = 6  # steps that say nothing about time: they compile kernels
_STACKS = 2.0  # seconds for a process to write its stacks


@dataclass
class Measured:
    """Measurements of a rung.

    Attributes:
        name: The rung.
        title: What it does.
        status: "ok", "hangs", "grows", "error", "numbers", "slow" or "skipped".
        steps: What each step took and left: `seconds`, `active`, `cache`, `process`, `loss`.
        facts: What else it said, by kind.
        findings: What it found itself.
        at: What it was doing last.
        error: The error that ended it: `error`, `message`, `place`, `trace`.
        stack: The stacks of all threads, where it hung.
        seconds: How long it took in all.
        begun: Whether it came to the rung.
        ended: Whether it came to the end of the rung, good or bad.
    """

    name: str
    title: str
    status: str = "ok"
    steps: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    at: str = ""
    error: dict[str, Any] | None = None
    stack: str = ""
    seconds: float = 0.0
    begun: bool = False
    ended: bool = False

    def take(self, event: dict[str, Any]) -> None:
        """Take a line of the record."""
        kind = event.pop("kind")
        event.pop("time", None)
        self.begun = True
        if kind == "step":
            self.steps.append(event)
        elif kind == "at":
            self.at = event["what"]
        elif kind == "finding":
            self.findings.append(Finding(**event["finding"]))
        elif kind == "end":
            self.ended = True
        elif kind == "error":
            self.error, self.status = event, "error"
        else:
            self.facts[kind] = event

    def column(self, name: str) -> list[float]:
        """Return one value of every step that has it as a number."""
        return [each[name] for each in self.steps if isinstance(each.get(name), int | float)]

    @property
    def milliseconds(self) -> float | None:
        """The median time of a step, without the first, which traces and compiles."""
        times = sorted(self.column("seconds")[1:] or self.column("seconds"))
        return 1e3 * times[len(times) // 2] if times else None

    @property
    def fast(self) -> float | None:
        """The lower quartile of the time of a step, in milliseconds: where the machine was not busy; None of few."""
        times = sorted(self.column("seconds")[2:])
        return 1e3 * times[len(times) // 4] if len(times) >= _FEW else None

    @property
    def place(self) -> str | None:
        """The user's code at which it hung or failed."""
        return place_in_dump(self.stack) if self.stack else self.error["place"] if self.error else None


def watch(
    process: subprocess.Popen[bytes],
    measured: Measured,
    job: dict[str, Any],
    *,
    limits: tuple[float, float],
    memory: float | None,
    tell: Callable[[Measured], None],
) -> None:
    """Watch a process until the rung or the process ends; end it where it hangs or takes too much memory.

    Args:
        process: The process, which leads a group of its own.
        measured: Takes what it writes.
        job: Its job.
        limits: Seconds without a line: until the rung begins, and then.
        memory: Bytes that it may have; None: any.
        tell: Is called when there is news.
    """
    began = last = time.monotonic()
    tail, stays = Tail(Path(job["events"])), False
    try:
        while True:
            ended = process.poll() is not None  # asked first: what it wrote before its end is read below
            if tail.read(measured):
                last = time.monotonic()
                tell(measured)
            stays = measured.ended and not ended
            if ended or measured.ended:
                break
            if memory is not None and (taken := resident(process.pid)) > memory:
                measured.status, measured.facts["memory"] = "grows", {"bytes": taken, "limit": memory}
                break
            if time.monotonic() - last > limits[measured.begun]:
                measured.status = "hangs"
                measured.stack = _stacks(process, Path(job["stacks"]))
                break
            time.sleep(_PAUSE)
    finally:
        if not stays:
            end(process)
        measured.seconds = time.monotonic() - began
    if measured.status == "ok" and not measured.ended:
        status = process.returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        measured.status = "error"
        measured.error = {"error": "", "message": f"the process ended by {how}", "place": None, "trace": ""}


class Tail:
    """New lines at the end of a file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self, into: Measured) -> bool:
        """Take the whole lines that are new; return whether there were any."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
        except OSError:
            return False
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            into.take(json.loads(line))
        return bool(whole)


def _stacks(process: subprocess.Popen[bytes], file: Path) -> str:
    """Have a process write the stacks of its threads, and read them."""
    with suppress(OSError):
        if file.exists():  # or it does not listen yet, and the signal would end it
            os.kill(process.pid, signal.SIGUSR1)
            until = time.monotonic() + _STACKS
            while time.monotonic() < until and not file.read_text():
                time.sleep(_PAUSE)
            time.sleep(_PAUSE)
            return file.read_text()
    return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started: it leads a group of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has in use; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
