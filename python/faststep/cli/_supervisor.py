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
from faststep.cli._mlx_launch import SSH_LOST, Launch, first_to_end
from faststep.cli._saved import config_of
from faststep.cli._status import GAVE_UP, LOST

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
_BY_SIGNAL = 128  # exit codes above are those of a shell for signals


@dataclass(frozen=True)
class Death:
    """The end of a training process, or of the first of several ranks to end.

    Attributes:
        code: Its exit code; minus the number of the signal that killed it.
        memory: Why it is sure that memory ran out; None where there is no evidence for that.
        rank: The rank that it is of; None without ranks.
    """

    code: int
    memory: str | None = None
    rank: int | None = None

    @property
    def by_itself(self) -> bool:
        """True if it ended by its own decision, and would end the same way again."""
        return self.code >= 0 and self.memory is None and self.code not in (HUNG, LOST, SSH_LOST)

    def __str__(self) -> str:
        if self.rank is not None:
            return f"rank {self.rank}, {Death(self.code, self.memory)}"
        if self.code == HUNG:
            return "it made no progress, and ended itself"
        if self.code in (LOST, SSH_LOST):
            return "the others were lost" if self.code == LOST else "its host was lost"
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {signal.Signals(-self.code).name}"
        return f"{how} ({self.memory})" if self.memory else how


def run(command: list[str], ranks: Launch) -> int:
    """Run a command of several ranks once; return the exit code."""
    death = _watch(command, ranks)
    if death.code and death.rank is not None:
        _say(f"the training has ended: {death}")
    return death.code if death.code >= 0 else _BY_SIGNAL - death.code


def supervise(
    command: list[str], load: Callable[[list[str]], Config], overrides: list[str], ranks: Launch | None = None
) -> int:
    """Train until the end: restart a training that died from its newest valid checkpoint.

    A training that ends by itself, well or with an error of its own, is not started again; one that makes no progress
    for `train.hang_timeout` ends itself, and is. One that ran out of memory, on evidence only, goes on with half the
    batch size and twice the accumulation. Where it died of a memory fault, the checkpoints of its last minute are set
    aside: what they hold may have been written over before. Ranks that die twice in a row without a new checkpoint go
    on as fewer, with as many times the accumulation, where they may.

    Args:
        command: The command that begins it: `train CONFIG`, or `resume RUN`.
        load: Loads its config, with overrides.
        overrides: Keys that are set on top of the config.
        ranks: The ranks that run it; None: one process.

    Returns:
        The exit code: that of the training, or `GAVE_UP`.
    """
    run = Path(load(overrides).run)
    deaths, reached = 0, newest(run)
    changes: dict[str, int] = {}  # keys that are set because memory ran out, or because there are fewer ranks
    while True:
        began, size = time.time(), _log_size(run)
        death = _watch([*command, EXIT_ON_HANG, *set_([*overrides, *_pairs(changes)])], ranks)
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
        fewer = None if ranks is None or deaths < MOST_DEATHS - 1 else ranks.without(death.rank or 0)
        if fewer is not None:
            ranks, parts = fewer
            changes["step.accumulate"] = parts * load([*overrides, *_pairs(changes)]).step.accumulate
            deaths = 0
            _say(f"going on with {ranks} and step.accumulate={changes['step.accumulate']}")
        if death.memory is not None:
            halved = _halved(load([*overrides, *_pairs(changes)]))
            if halved is None:
                _say("giving up: memory ran out with a batch size that cannot be halved")
                return GAVE_UP
            changes |= halved
            _say(f"going on with {' and '.join(_pairs(halved))}")
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


def _watch(command: list[str], ranks: Launch | None) -> Death:
    """Run a training to its end; pass on signals, and its stderr while looking for an allocator's last words."""
    killed = _kills()
    tail: collections.deque[str] = collections.deque(maxlen=50 if ranks is None else 1000)
    line = [sys.executable, "-m", "faststep", *command] if ranks is None else ranks.line(command)
    stdin = None if ranks is None else subprocess.PIPE  # `mlx.launch` reads it without rest where it has ended
    # in a session of its own: a terminal's Ctrl-C goes to the supervisor alone, which passes each signal on once
    process = subprocess.Popen(
        line, stdin=stdin, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    assert process.stderr is not None
    reader = threading.Thread(target=_copy, args=(process.stderr, tail))
    reader.start()
    with _passing_on(process, ranks) as asked:
        code = process.wait()
    reader.join()
    rank, code = (None, code) if ranks is None else first_to_end(tail)
    if asked and (code < 0 or code == HUNG or code > _BY_SIGNAL):
        return Death(_BY_SIGNAL + asked[0])
    said = next((line.strip() for line in reversed(tail) if OUT_OF_MEMORY.search(line)), None)
    if code != 0 and said is not None:
        return Death(code, f"it said: {said}", rank)
    if code == -signal.SIGKILL and _kills() > killed:
        return Death(code, "the kernel's count of processes killed for memory has grown", rank)
    return Death(code, None, rank)


def _copy(source: IO[str], tail: collections.deque[str]) -> None:
    for line in source:
        tail.append(line)
        sys.stderr.write(line)
        sys.stderr.flush()


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[str], ranks: Launch | None) -> Iterator[list[int]]:
    """Pass signals on in the block, and list those that ask for the end."""
    asked: list[int] = []

    def give(number: int) -> None:
        if ranks is None:
            process.send_signal(number)
        else:
            ranks.send(number, process)

    def send(number: int, frame: FrameType | None) -> None:
        asked.append(_FORWARDED[signal.Signals(number)])
        give(asked[-1])

    def pause(number: int, frame: FrameType | None) -> None:
        give(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # goes on here behind SIGCONT
        give(signal.SIGCONT)

    wanted = {each: send for each in _FORWARDED} | {signal.SIGTSTP: pause}
    before = {each: signal.getsignal(each) for each in wanted}
    heard = [each for each in wanted if before[each] != signal.SIG_IGN]  # nohup ignores SIGHUP
    try:
        for each in heard:
            signal.signal(each, wanted[each])
        yield asked
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


def _halved(config: Config) -> dict[str, int] | None:
    size = config.data.batch_size
    if size < 2 or size % 2:
        return None
    return {"data.batch_size": size // 2, "step.accumulate": 2 * config.step.accumulate}


def _pairs(changes: dict[str, int]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def set_(overrides: list[str]) -> list[str]:
    """Return the words of a command line that set keys of a config."""
    return [word for each in overrides for word in ("--set", each)]


def _say(text: str) -> None:
    print(f"faststep: {text}", file=sys.stderr, flush=True)
