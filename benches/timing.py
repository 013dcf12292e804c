"""Timing of several ways: blocks of steps, all ways in turns, so that a disturbance of the machine meets them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import mlx.core as mx
from ways import StepFn

Batches = list[tuple[mx.array, ...]]
BLOCK_MS = 40  # what a block should take about; dead units have denormal moments from about 850 steps on


def run_block(step: StepFn, batches: Batches, count: int) -> float:
    """Take one step more than so many, wait until all is done, and return the milliseconds of one of the others.

    The first step has to bring its data back into the processor's caches after the turns of the others.
    """
    mx.eval(step(*batches[0]))
    mx.synchronize()
    start = time.perf_counter()
    for i in range(count):
        loss = step(*batches[i % len(batches)])
    mx.eval(loss)
    mx.synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def block_size(ms: float, least: int = 4) -> int:
    """Return the number of steps in a block, from the milliseconds of one; enough for steps in flight to overlap."""
    return max(least, round(BLOCK_MS / ms))


def in_turns(
    blocks: Mapping[str, Callable[[], float]], rounds: int, after_round: Callable[[], object]
) -> dict[str, list[float]]:
    """Let every way take its block once a round, each round in an order rotated by one.

    Args:
        blocks: What takes a block and returns the milliseconds of one step, by way.
        rounds: The number of rounds.
        after_round: Called after each.

    Returns:
        Milliseconds a step, by way and round.
    """
    names = list(blocks)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        at = i % len(names)
        for name in names[at:] + names[:at]:
            times[name].append(blocks[name]())
        after_round()
    return times
