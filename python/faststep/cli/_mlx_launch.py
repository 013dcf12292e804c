"""The command line of `mlx.launch`, signals to what it runs, and what it says of the ends of that."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from faststep._command import HUNG
from faststep.cli._status import LOST

LOCAL = "127.0.0.1"
# `mlx.launch` itself; signals reach its ranks, and it goes on until they have ended. A thread of it for each rank asks
# without a pause whether the rank takes input, which it always does: so it would keep a processor from the ranks.
_MLX_LAUNCH = """
import select, signal
from mlx._distributed_utils import launch

def patient(reading, writing, others, seconds):
    found = select.select(reading, [], others, min(seconds, 0.05) if writing else seconds)[0]
    return found, select.select([], writing, [], 0)[1], []

for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, lambda *_: None)
launch.select = patient
launch.main()
"""
_ENDED = re.compile(r"Node with rank (\d+) exited with code (-?\d+)")  # as `mlx.launch` tells it
SSH_LOST = 255  # the exit code of ssh where the connection is gone


@dataclass(frozen=True)
class Launch:
    """The arguments of `mlx.launch`.

    Attributes:
        hosts: The hosts; empty where a file has them.
        repeat: The number of ranks on each of them.
        options: The other arguments.
        python: The interpreter on the hosts; None: this one.
        fewer: Whether fewer ranks may go on.
    """

    hosts: tuple[str, ...]
    repeat: int
    options: tuple[str, ...] = ()
    python: str | None = None
    fewer: bool = False

    @property
    def is_local(self) -> bool:
        """True if all ranks are processes of this machine."""
        return set(self.hosts) == {LOCAL}

    def line(self, command: list[str]) -> list[str]:
        """Return the command line by which all ranks run a command of faststep."""
        where = ["--hosts", ",".join(self.hosts), "-n", str(self.repeat)] if self.hosts else []
        run = [sys.executable] if self.python is None else []
        return [sys.executable, "-c", _MLX_LAUNCH, *where, *self.options, "--", *run, "-m", "faststep", *command]

    def send(self, number: int, process: subprocess.Popen[str]) -> None:
        """Pass on a signal that asks for the end, as a terminal does with Ctrl-C; or one that is for the processes."""
        if self.is_local or number not in (signal.SIGINT, signal.SIGTERM):
            os.killpg(process.pid, signal.SIGINT if number == signal.SIGTERM else number)
        elif process.stdin is not None:  # a signal would end ssh, and not what it runs
            process.stdin.write("\x03")
            process.stdin.flush()

    def without(self, rank: int) -> tuple[Launch, int] | None:
        """Return a launch with fewer ranks, and the factor by which they are fewer; None if there is none.

        On one host the ranks are divided by the least factor of their number, on several hosts the hosts are: without
        the host of `rank`, which was lost.
        """
        if not self.fewer:
            return None
        if len(self.hosts) == 1:
            parts = _least_factor(self.repeat)
            return None if parts == 1 else (dataclasses.replace(self, repeat=self.repeat // parts), parts)
        number = len(self.hosts)
        parts = _least_factor(number)
        lost = rank // self.repeat
        others = [host for index, host in enumerate(self.hosts) if index != lost]
        return dataclasses.replace(self, hosts=tuple(others[: number // parts])), parts

    def __str__(self) -> str:
        number = len(self.hosts) * self.repeat
        return "1 rank" if number == 1 else f"{number} ranks"


def _least_factor(number: int) -> int:
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 1)


def first_to_end(lines: Iterable[str]) -> tuple[int, int]:
    """Return the rank whose end has ended the others, and its exit code, from what `mlx.launch` has said.

    One that was killed counts before one that ended itself, and that before those that have lost it. 0 and 0 where all
    ended well.
    """
    found = [(int(rank), int(code)) for line in lines for rank, code in _ENDED.findall(line)]

    def order(each: tuple[int, int]) -> int:
        code = each[1]
        if code == -signal.SIGTERM:  # by `mlx.launch`, mostly
            return 3
        return 0 if code < 0 or code in (HUNG, SSH_LOST) else 2 if code == LOST else 1

    return min(found, key=order, default=(0, 0))
