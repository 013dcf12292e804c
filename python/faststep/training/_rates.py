"""Learning rates across a resume: one that was set anew wins over the checkpoint's, a schedule that jumps is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from faststep._records import figure
from faststep._records import number as value_of

_JUMP = 0.01  # of a learning rate, from which on it is told


def given(optimizer: Any) -> list[float | None]:
    """Return the learning rates that an optimizer was made with; None for those of schedules."""
    return [None if schedule_of(each) else rate_of(each) for each in parts(optimizer)]


def go_on(optimizer: Any, now: Sequence[float | None], before: Sequence[float | None] | None) -> Iterator[str]:
    """Set the rates of an optimizer that a checkpoint was put into, where they were given anew; yield what changes.

    Args:
        optimizer: The optimizer, with the checkpoint's state.
        now: What `given` said of it before.
        before: What it said when the training that the checkpoint is of began; None: unknown.
    """
    known = before if before is not None and len(before) == len(now) else now
    for part, new, old in zip(parts(optimizer), now, known, strict=True):
        rate, schedule = rate_of(part), schedule_of(part)
        if rate is None:
            continue
        if schedule is not None:
            expected = value_of(schedule(mx.maximum(part.step - 1, 0)))
            if abs(expected - rate) > _JUMP * max(abs(rate), abs(expected)):
                yield (
                    f"the schedule is another one than before: it says a learning rate of {figure(expected)} at this "
                    f"step, which had {figure(rate)}"
                )
        elif new is not None and new != old:
            part.learning_rate = new
            yield f"the learning rate is {figure(new)} from now on, as you set it; it was {figure(rate)}"


def parts(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, or those that it consists of."""
    if hasattr(optimizer, "optimizers"):
        for each in optimizer.optimizers:
            yield from parts(each)
    else:
        yield optimizer


def rate_of(optimizer: Any) -> float | None:
    """Return the learning rate of one optimizer, None where it has none."""
    rate = vars(optimizer).get("_state", {}).get("learning_rate")
    return None if rate is None else value_of(rate)


def schedule_of(optimizer: Any) -> Any:
    """Return the schedule of its learning rate, None where it has none."""
    return vars(optimizer).get("_schedulers", {}).get("learning_rate")
