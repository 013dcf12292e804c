"""The child process of `tune`: takes the user's steps under one setting and writes down their time."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from faststep._step import StepOutput
from faststep._tune._report import Measured

COMPARED = 5  # the first steps, whose losses are compared between settings


def main() -> None:
    """Run the job in `sys.argv[1]`, a JSON object made by `tune`, and write a `Measured` into the file it names."""
    job = json.loads(sys.argv[1])
    signal.alarm(job["alarm"])  # ends this process when its parent is gone
    sys.path += [entry for entry in job["path"] if entry not in sys.path]
    for seed in (random.seed, np.random.seed, mx.random.seed):
        seed(0)
    measured = measure(Losses(job["target"]), job["seconds"])
    Path(job["result"]).write_text(json.dumps(asdict(measured)), encoding="utf-8")
    os._exit(0)  # the user's worker threads, and whatever else runs at exit, cannot spoil what was measured


class Losses:
    """The user's loop: every item it yields is the loss of a step that was taken."""

    def __init__(self, target: str) -> None:
        """Call the user's function.

        Raises:
            TypeError: It returned something that is no iterator.
        """
        self._target, self._taken = target, 0
        loop = load(target)()
        if not isinstance(loop, Iterator):
            raise TypeError(
                f"{target}() returned a {type(loop).__name__}; expected an iterator of losses: "
                "write the training loop in it, with `yield loss` after each step"
            )
        self._loop = loop

    def take(self) -> Any:
        """Take a step and return its loss.

        Raises:
            RuntimeError: The loop has ended.
            TypeError: It yields no loss.
        """
        try:
            value = next(self._loop)
        except StopIteration:
            raise RuntimeError(
                f"{self._target}() ended after {self._taken} steps: let it loop for ever, or measure for fewer seconds"
            ) from None
        self._taken += 1
        value = value.loss if isinstance(value, StepOutput) else value
        value = value[0] if isinstance(value, tuple) else value
        if not isinstance(value, (mx.array, int, float, np.generic, np.ndarray)):
            raise TypeError(f"{self._target}() yielded a {type(value).__name__}; expected the loss of the step")
        return value

    def block(self, count: int) -> float:
        """Take so many steps, wait until all is done, and return the seconds of one."""
        start = time.perf_counter()
        for _ in range(count):
            loss = self.take()
        mx.eval(loss)
        mx.synchronize()
        return (time.perf_counter() - start) / count

    def blocks(self, count: int, least: int, seconds: float) -> list[float]:
        """Take blocks of so many steps for a time, but not fewer than `least`; return the seconds of a step in each."""
        end, taken = time.perf_counter() + seconds, [self.block(count) for _ in range(least)]
        while time.perf_counter() < end:
            taken.append(self.block(count))
        return taken


def measure(losses: Losses, seconds: float) -> Measured:
    """Warm up, then measure the median time of a step over blocks that each end with a wait.

    Blocks are long enough for steps in flight to overlap: eight steps or a twentieth of the time, yet at least three.
    """
    first = [float(losses.take()) for _ in range(COMPARED)]
    pace = statistics.median(losses.blocks(1, 2, seconds / 4))
    mx.reset_peak_memory()
    count = round(min(max(8, seconds / 20 / pace), seconds / 3 / pace))
    taken = losses.blocks(max(1, count), 3, seconds)
    return Measured(1e3 * statistics.median(taken), tuple(first), mx.get_peak_memory(), *device())


def device() -> tuple[str, str]:
    """Return the back end that MLX computes on by now, "cpu", "cuda" or "metal", and the name of the device."""
    on_cpu = mx.default_device().type == mx.cpu
    back_end = "cpu" if on_cpu else "cuda" if mx.cuda.is_available() else "metal"
    return back_end, str(mx.device_info(mx.default_device()).get("device_name", back_end))


def load(target: str) -> Any:
    """Import what "module:function" or "file.py:function" names; beside a file, its neighbours can be imported."""
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        found: Any = importlib.import_module(place)
    else:
        file = Path(place).resolve()
        sys.path.insert(0, str(file.parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} cannot be imported")
        found = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    for part in name.split("."):
        found = getattr(found, part)
    return found


if __name__ == "__main__":
    main()
