"""A training in a process of its own, which is started again when it dies."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from faststep._command import HUNG
from faststep.cli._saved import config_of
from faststep.cli._status import GAVE_UP

if TYPE_CHECKING:
    from faststep.config import Config

MOST_DEATHS = 3  # in a row without a new checkpoint in between
# Texts of allocators' errors: those of MLX (allocator.cpp of each back end), C++'s, Python's.
OUT_OF_MEMORY = re.compile(
    r"\[(malloc\w*|metal::malloc|malloc_or_wait)\] Unable to allocate|unable to allocate \d+ bytes|std::bad_alloc"
    r"|out of memory|cudaErrorMemoryAllocation|MemoryError|Cannot allocate memory",
    re.IGNORECASE,
)
# Signals to the supervisor, and those that the training gets for them; the terminal's end ends it with a checkpoint.
_FORWARDED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
EXIT_ON_HANG = "--exit-on-hang"  # of the commands that train: a training that hangs is started again
SUSPECT_SECONDS = 60.0  # before a memory fault, in which checkpoints may have been spoilt
_FAULTS = (signal.SIGSEGV, signal.SIGBUS)


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
        """True if it ended by its own decision, and would end the same way again."""
        return self.code >= 0 and self.memory is None and self.code != HUNG

    def __str__(self) -> str:
        if self.code == HUNG:
            return "it made no progress, and ended itself"
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {signal.Signals(-self.code).name}"
        return f"{how} ({self.memory})" if self.memory else how


def supervise(command: list[str], load: Callable[[list[str]], Config], overrides: list[str]) -> int:
    """Train until the end: restart a training that died from its newest valid checkpoint.

    A training that ends by itself, well or with an error of its own, is not started again; one that makes no progress
    for `train.hang_timeout` ends itself, and is. One that ran out of memory, on evidence only, goes on with half the
    batch size and twice the accumulation. Where it died of a memory fault, the checkpoints of its last minute are set
    aside: what they hold may have been written over before.

    Args:
        command: The command that begins it: `train CONFIG`, or `resume RUN`.
        load: Loads its config, with overrides.
        overrides: Keys that are set on top of the config.

    Returns:
        The exit code: that of the training, or `GAVE_UP`.
    """
    run = Path(load(overrides).run)
    deaths, reached = 0, newest(run)
    smaller: list[str] = []  # keys that are set because memory ran out
    while True:
        began, size = time.time(), _log_size(run)
        death = _watch([sys.executable, "-m", "faststep", *command, EXIT_ON_HANG, *_set([*overrides, *smaller])])
        if death.by_itself:
            return death.code
        if _log_size(run) > size:  # it had begun: its config is saved, and its checkpoints are the newest ones
            command, load, overrides = ["resume", str(run)], functools.partial(config_of, run), []
        if -death.code in _FAULTS:
            _pass_over(run, max(began, time.time() - SUSPECT_SECONDS))
        before, reached = reached, newest(run)
        deaths = 1 if reached > before else deaths + 1
        _say(f"the training died at {time.strftime('%H:%M:%S')}: {death}; {_shown(reached)}")
        if deaths >= MOST_DEATHS:
            _say(f"giving up: {deaths} deaths in a row without a new checkpoint, the last by {death}")
            return GAVE_UP
        if death.memory is not None:
            halved = _halved(load([*overrides, *smaller]))
            if halved is None:
                _say("giving up: memory ran out with a batch size that cannot be halved")
                return GAVE_UP
            smaller = halved
            _say(f"going on with {' and '.join(smaller)}")
        _say(f"restarting (death {deaths} of at most {MOST_DEATHS} without a new checkpoint)")


def _log_size(run: Path) -> int:
    try:
        return (run / "log.jsonl").stat().st_size
    except OSError:
        return 0


def _shown(number: int) -> str:
    return "there is no checkpoint" if number < 0 else f"the newest checkpoint is of step {number}"


def _pass_over(run: Path, since: float) -> None:
    """Set the checkpoints aside that were written since a time."""
    from faststep.checkpoints import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    suspect = [each for each in checkpoints.list() if each.time >= since]
    if (place := checkpoints.set_aside(suspect)) is not None:
        _say(
            f"a memory fault: checkpoints written within {SUSPECT_SECONDS:.0f} s before it are passed over, see {place}"
        )


def _watch(command: list[str]) -> Death:
    """Run a training to its end; pass on signals, and its stderr while looking for an allocator's last words."""
    killed = _kills()
    tail: collections.deque[str] = collections.deque(maxlen=50)
    # in a session of its own: a terminal's Ctrl-C goes to the supervisor alone, which passes each signal on once
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
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
        process.send_signal(_FORWARDED[signal.Signals(number)])

    def pause(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # goes on here behind SIGCONT
        process.send_signal(signal.SIGCONT)

    wanted = {each: send for each in _FORWARDED} | {signal.SIGTSTP: pause}
    before = {each: signal.getsignal(each) for each in wanted}
    heard = [each for each in wanted if before[each] != signal.SIG_IGN]  # nohup ignores SIGHUP
    try:
        for each in heard:
            signal.signal(each, wanted[each])
        yield
    finally:
        for each in heard:
            signal.signal(each, before[each])


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


def _halved(config: Config) -> list[str] | None:
    size = config.data.batch_size
    if size < 2 or size % 2:
        return None
    return [f"data.batch_size={size // 2}", f"step.accumulate={2 * config.step.accumulate}"]


def _set(overrides: list[str]) -> list[str]:
    return [word for each in overrides for word in ("--set", each)]


def _say(text: str) -> None:
    print(f"faststep: {text}", file=sys.stderr, flush=True)
