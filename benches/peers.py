"""Ways to take the step in another process, which take their turns beside those of this one."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any


class Peer:
    """The ways of a process that waits while others take their turns.

    It prints what it has built, a line of JSON, then takes a block of steps for every line ``["way", steps]`` that it
    reads, and prints its milliseconds a step.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Take over the process, which builds its ways meanwhile."""
        self.process = process

    @functools.cached_property
    def built(self) -> dict[str, Any]:
        """What the peer says of itself, once all its ways are built and compiled: `built["ways"]` by way.

        Each has the first losses, in nats.
        """
        built: dict[str, Any] = self.answer()
        return built

    def run_block(self, way: str, count: int) -> float:
        """Do what ``timing.run_block`` does, there."""
        assert self.process.stdin is not None
        print(json.dumps([way, count]), file=self.process.stdin, flush=True)
        ms: float = self.answer()
        return ms

    def answer(self) -> Any:
        """Return the next line.

        Raises:
            SystemExit: The process has ended, and said why itself.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} has ended with status {self.process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def start(command: list[str], environment: Mapping[str, str]) -> Iterator[Peer]:
    """Run a peer; it ends with the context."""
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Peer(process)
