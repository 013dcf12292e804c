"""Trainings of which rank 1 ends or stops in the middle, or loses its network: `python rank_lost.py HOW`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from faststep import Step
from faststep.data import Loader
from faststep.training import Callback, Trainer

GROUP = mx.distributed.init(strict="MLX_RANK" in os.environ)
RANK = GROUP.rank()


def make(width: int, hang_timeout: float | None) -> Step:
    mx.random.seed(0)
    model = nn.Linear(width, width)
    options = {"group": GROUP, "hang_timeout": hang_timeout}
    return Step(model, optim.SGD(0.1), lambda m, x: mx.square(m(x)).mean(), **options)


def stop_before_the_gradients() -> None:
    """Give the loss and its weight to the others, and stop."""
    mx.eval(mx.distributed.all_gather(mx.zeros((1, 2)), group=GROUP))
    os.kill(os.getpid(), signal.SIGSTOP)


def loop(how: str) -> None:
    """Make 40 steps; print a checksum of the weights."""
    limit = 50.0 if how == "SIGKILL" else 2.0  # a ring takes its time to tell that a rank is gone
    step = make(64, limit if how != "whole" else None)
    for number in range(40):
        if (number, how) == (20, "gradients") and RANK == 0:
            step.gradients(mx.ones((4, 64)))
        if (number, RANK) == (20, 1):
            if how == "gradients":
                step.ranks.together("gradients", stop_before_the_gradients)
            elif how == "cut":
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            elif how != "whole":
                os.kill(os.getpid(), signal.Signals[how])
        step(mx.random.normal((4, 64), key=mx.random.key(2 * number + RANK)))
    print("weights", zlib.crc32(np.array(step.model.weight).tobytes()), flush=True)


class Harm(Callback):
    """At step 5 rank 1 stops and the other has an error; or rank 1 is killed in the middle of the next sum."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step(self, trainer: Trainer, number: int) -> None:
        if number != 5:
            return
        if self.how == "error" and RANK == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "error":
            raise OSError("the disk is full")
        elif RANK == 1:
            threading.Thread(target=self.kill, args=(trainer.step,), daemon=True).start()

    def kill(self, step: Step) -> None:
        exchanging = 0
        while exchanging < 5:  # times in a row: longer than the row before the sum takes
            exchanging = exchanging + 1 if step.stage()[0] == "collective" else 0
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    how = sys.argv[1]
    if how not in ("error", "sum"):
        return loop(how)
    width = 2048 if how == "sum" else 8
    data = Loader(np.ones((80, width), np.float32), 4, rank=RANK, world_size=2)
    harm, limit = [Harm(how)], 2.0 if how == "error" else 50.0
    with tempfile.TemporaryDirectory() as run:
        Trainer(make(width, None), data, run=run, epochs=9, callbacks=harm, hang_timeout=limit).train()


if __name__ == "__main__":
    main()
