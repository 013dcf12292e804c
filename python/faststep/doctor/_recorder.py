"""Record that a rung writes while it runs, a line of JSON after each step, for the process that watches it."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import mlx.core as mx

from faststep.doctor._finding import Finding
from faststep.doctor._growth import LEAST_ACTIVE, growth
from faststep.doctor._user_code import place_of

_ARGUMENT = re.compile(r"\bargument ([0-9]+)\b")
LEAST = 3  # steps of a rung, however long they take


class Recorder:
    """The record of a rung.

    Args:
        file: Where the lines go.
        steps: How many steps a rung takes at most.
        seconds: How long it takes them, at least three.
        names: What the loss function calls its arguments behind the model.
    """

    def __init__(self, file: TextIO, steps: int, seconds: float, names: Sequence[str] = ()) -> None:
        self._names = names
        self.steps, self.seconds, self.taken = steps, seconds, 0
        self._file = file
        self._active: list[float] = []

    def say(self, kind: str, **facts: Any) -> None:
        """Write a line."""
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n")
        self._file.flush()

    def at(self, what: str) -> None:
        """Say what begins now: where it hangs, if it does."""
        self.say("at", what=what)

    def find(self, finding: Finding) -> None:
        """Write a finding; places among the loss function's arguments get their names."""
        plain = finding.plain()
        self.say("finding", finding=plain | {"text": _ARGUMENT.sub(self._name, plain["text"])})

    def _name(self, found: re.Match[str]) -> str:
        place = int(found[1])
        return f"argument {self._names[place]}" if place < len(self._names) else found[0]

    def failed(self, error: BaseException) -> None:
        """Write an error with its place in the user's code."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.say("error", error=type(error).__name__, message=str(error), place=place_of(error), trace=text[-6000:])

    def step(self, seconds: float, loss: Any = None) -> None:
        """Write what a step took, and the memory after it."""
        self.taken += 1
        number = None if loss is None else float(loss)
        value = number if number is None or math.isfinite(number) else str(number)
        self._active.append(active := mx.get_active_memory())
        memory = {"active": active, "cache": mx.get_cache_memory(), "process": resident()}
        self.say("step", seconds=seconds, loss=value, **memory)

    def measure(self, body: Callable[[Any], Any], batches: Sequence[Any], steps: int | None = None) -> int:
        """Call a step with the batches, again and again, until there are enough steps or the time is up.

        Args:
            body: Takes a batch and returns its loss, evaluated, or None.
            batches: The batches.
            steps: How many at most; None: the recorder's.

        Returns:
            How many were taken.
        """
        taken, over = 0, self.enough(steps)
        for batch in itertools.cycle(batches):
            start = time.perf_counter()
            loss = body(batch)
            mx.synchronize()
            self.step(time.perf_counter() - start, loss)
            del loss
            taken += 1
            if over():
                break
        return taken

    def enough(self, steps: int | None = None) -> Callable[[], bool]:
        """Begin a rung, and return what tells after each of its steps whether there are enough, or the time is up.

        Args:
            steps: How many at most; None: the recorder's. Three times as many where memory seems to grow.
        """
        most, end, first = steps or self.steps, time.perf_counter() + self.seconds, self.taken
        self._active.clear()

        def over() -> bool:
            taken = self.taken - first
            late = taken >= most or (taken >= LEAST and time.perf_counter() > end)
            return late and (taken >= 3 * most or not self._grows())

        return over

    def _grows(self) -> bool:
        line = growth(self._active)
        return line is not None and line.is_real(LEAST_ACTIVE)


def resident() -> int:
    """Return the bytes of memory that this process has in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123, behind every step
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
