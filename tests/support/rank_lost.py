"""A training of which rank 1 ends in the middle, or stops: `python rank_lost.py HOW`."""

from __future__ import annotations

import os
import signal
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from faststep import Step


def main() -> None:
    group = mx.distributed.init(strict=True)
    mx.random.seed(0)
    limit = 2.0 if sys.argv[1] == "SIGSTOP" else 50.0  # a ring takes its time to tell that a rank is gone
    step = Step(nn.Linear(8, 8), optim.SGD(0.1), lambda m, x: mx.square(m(x)).mean(), group=group, hang_timeout=limit)
    for number in range(40):
        if (number, group.rank()) == (20, 1):
            os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        step(mx.ones((4, 8)))


if __name__ == "__main__":
    main()
