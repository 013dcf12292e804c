"""A training in a process of its own, which is started again when it dies."""

from __future__ import annotations

import collections
import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from faststep.cli._status import GAVE_UP

MOST_DEATHS = 3  # in a row without a new checkpoint in between
# What allocators say: those of MLX (allocator.cpp of each back end), C++'s, Python's.
OUT_OF_MEMORY = re.compile(
    r"\[(malloc\w*|metal::malloc|malloc_or_wait)\] Unable to allocate|unable to allocate \d+ bytes|std::bad_alloc"
    r"|out of memory|cudaErrorMemoryAllocation|MemoryError|Cannot allocate memory",
    re.IGNORECASE,
)
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Death:
    """The end of a training process.

    Attributes:
        code: Its exit code; minus the number of the signal that killed it.
        memory: Why it is sure that memory ran out; None where there is no evidence for that.
    """

    code: int
    memory: str | None

    @property
    def by_itself(self) -> bool:
        """Whether it ended by its own decision, and would end the same way again."""
        return self.code >= 0 and self.memory is None

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {signal.Signals(-self.code).name}"
        return f"{how} ({self.memory})" if self.memory else how


def supervise(run: Path) -> int:
    """Train until the end: restart a training that died from its newest valid checkpoint.

    A training that ends by itself, well or with an error of its own, is not started again. One that ran out of memory,
    on evidence only, goes on with half the batch size and twice the accumulation.

    Args:
        run: The folder of the run, with its config.

    Returns:
        The exit code: that of the training, or `GAVE_UP`.
    """
    deaths, reached = 0, newest(run)
    overrides: list[str] = []  # keys set on top of the config
    while True:
        death = _watch([sys.executable, "-m", "faststep", "resume", str(run), *_set(overrides)])
        if death.by_itself:
            return death.code
        before, reached = reached, newest(run)
        deaths = 1 if reached > before else deaths + 1
        _say(f"the training died at {time.strftime('%H:%M:%S')}: {death}; the newest checkpoint is of step {reached}")
        if deaths >= MOST_DEATHS:
            _say(f"giving up: {deaths} deaths in a row without a new checkpoint, the last by {death}")
            return GAVE_UP
        if death.memory is not None:
            smaller = _halved(run, overrides)
            if smaller is None:
                _say("giving up: memory ran out with a batch size that cannot be halved")
                return GAVE_UP
            overrides = smaller
            _say(f"going on with {' and '.join(overrides[-2:])}")
        _say(f"restarting (death {deaths} of at most {MOST_DEATHS} without a new checkpoint)")


def _watch(command: list[str]) -> Death:
    """Run a training to its end; pass on signals, and its stderr while looking for an allocator's last words."""
    killed = _kills()
    tail: collections.deque[str] = collections.deque(maxlen=50)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
    assert process.stderr is not None
    reader = threading.Thread(target=_copy, args=(process.stderr, tail))
    reader.start()
    with _passing_on(process):
        code = process.wait()
    reader.join()
    said = next((line.strip() for line in reversed(tail) if OUT_OF_MEMORY.search(line)), None)
    if code != 0 and said is not None:
        return Death(code, f"it said: {said}")
    if code == -signal.SIGKILL and _kills() > killed:
        return Death(code, "the kernel's count of processes killed for memory has grown")
    return Death(code, None)


def _copy(source: IO[str], tail: collections.deque[str]) -> None:
    for line in source:
        tail.append(line)
        sys.stderr.write(line)
        sys.stderr.flush()


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[str]) -> Iterator[None]:
    def send(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:  # a terminal sends Ctrl-C to the whole group
            process.send_signal(number)

    before: dict[Any, Any] = {each: signal.signal(each, send) for each in _FORWARDED}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _kills() -> int:
    """Return how many processes the kernel has killed for memory: in this control group, or on the machine."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        events = (Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    with contextlib.suppress(OSError, ValueError, KeyError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts["oom_kill"])
    return 0


def newest(run: Path) -> int:
    """Return the number of the newest valid checkpoint, -1 where there is none."""
    from faststep.checkpoints import Checkpoints

    folder = run / "checkpoints"
    if not folder.is_dir():
        return -1
    return max((each.number for each in Checkpoints(folder).list() if each.problem is None), default=-1)


def _halved(run: Path, overrides: list[str]) -> list[str] | None:
    from faststep.cli._status import config_of

    config = config_of(run, overrides)
    size = config.data.batch_size
    if size < 2 or size % 2:
        return None
    kept = [each for each in overrides if not each.startswith(("data.batch_size=", "step.accumulate="))]
    return [*kept, f"data.batch_size={size // 2}", f"step.accumulate={2 * config.step.accumulate}"]


def _set(overrides: list[str]) -> list[str]:
    return [word for each in overrides for word in ("--set", each)]


def _say(text: str) -> None:
    print(f"faststep: {text}", file=sys.stderr, flush=True)
