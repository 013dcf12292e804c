"""Schedules that `mlx.optimizers.schedulers` leaves to be joined; all of them stay on the device."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx.optimizers import join_schedules, linear_schedule

Schedule = Callable[[mx.array], mx.array]


def constant(init: float) -> Schedule:
    """Make a schedule that always gives `init`: a rate that needs a warm-up and nothing else."""
    schedule: Schedule = linear_schedule(init, init, 1)
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
