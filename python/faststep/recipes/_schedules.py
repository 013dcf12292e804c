"""Schedules that `mlx.optimizers.schedulers` leaves to be joined; all of them stay on the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
from mlx.optimizers import join_schedules, linear_schedule

Schedule = Callable[[mx.array], mx.array]


def constant(init: float) -> Schedule:
    """Make a schedule that always gives `init`: a rate that needs a warm-up and nothing else."""
    schedule: Schedule = linear_schedule(init, init, 1)
    return schedule


def one_cycle(
    peak: float, steps: int, start: float | None = None, end: float | None = None, share: float = 0.3
) -> Schedule:
    """Make a schedule that rises to a peak and falls below where it began, along half waves of a cosine.

    Smith and Topin, "Super-Convergence" (2018, https://arxiv.org/abs/1708.07120); the defaults are PyTorch's.

    Args:
        peak: The largest value.
        steps: How many steps it takes in all.
        start: The first value; None: the 25th part of the peak.
        end: The last value; None: the 10,000th part of the first.
        share: The share of the steps that rise.

    Raises:
        ValueError: There are too few steps, or the share is not between 0 and 1.

    Example:
        >>> from faststep.recipes import one_cycle
        >>> schedule = one_cycle(1.0, 10)
        >>> [round(float(schedule(mx.array(step))), 3) for step in (0, 1, 2, 5, 9)]
        [0.04, 0.52, 1.0, 0.611, 0.0]
    """
    if steps < 2 or not 0 < share < 1:
        raise ValueError(f"steps: expected 2 or more and a share between 0 and 1, got {steps} and {share}")
    first = peak / 25 if start is None else start
    last = first / 1e4 if end is None else end
    top = max(share * steps - 1, 1e-6)

    def schedule(step: mx.array) -> mx.array:
        rising, falling = step / top, (step - top) / max(steps - 1 - top, 1e-6)
        up = peak + (first - peak) * (1 + mx.cos(math.pi * mx.clip(rising, 0, 1))) / 2
        down = last + (peak - last) * (1 + mx.cos(math.pi * mx.clip(falling, 0, 1))) / 2
        return mx.where(step < top, up, down)

    return schedule


def warm_up(schedule: Schedule, steps: int, init: float = 0.0) -> Schedule:
    """Put linear warm-up in front of a schedule, which starts when it ends.

    Args:
        schedule: What comes behind it, a function of the step.
        steps: How many steps it takes to reach the schedule's first value.
        init: The first value of all.

    Example:
        >>> from faststep.recipes import warm_up
        >>> from mlx.optimizers import cosine_decay
        >>> schedule = warm_up(cosine_decay(1.0, 8), 4)
        >>> [round(float(schedule(mx.array(step))), 3) for step in (0, 2, 4, 8, 12)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    first = float(schedule(mx.array(0)))
    joined: Schedule = join_schedules([linear_schedule(init, first, steps), schedule], [steps])
    return joined
