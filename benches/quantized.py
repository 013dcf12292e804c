"""Measure a step over 4-bit weights with adapters on a CPU: MLX's quantized products, and ours by way of float32.

``python benches/quantized.py`` takes a minute.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from cases import CASES
from samples import measure_alone
from timing import in_turns, run_block
from ways import COMPILED, FAST, WAYS, StepFn

CASE = CASES["qlora"]
OWN = f"{FAST}, MLX's quantized products"


def build(way: str) -> StepFn:
    """Make a step, and take two; the first traces it, with the products that the environment asks for by then."""
    step = WAYS[COMPILED if way == COMPILED else FAST](CASE.new_run())
    os.environ["FASTSTEP_QUANTIZED"] = "0" if way == OWN else "1"
    for batch in CASE.batches(2):
        mx.eval(step(*batch))
    return step


def measure(rounds: int, after_round: Callable[[], None]) -> dict[str, Any]:
    """Time every way; return milliseconds by way and round, and how far the losses of three steps are apart."""
    batches = CASE.batches()
    steps = {way: build(way) for way in (COMPILED, OWN, FAST)}
    losses = {way: float(step(*batches[2])) for way, step in steps.items()}
    blocks = {way: functools.partial(run_block, step, batches, 2) for way, step in steps.items()}
    gap = max(abs(loss - losses[COMPILED]) for loss in losses.values())
    return {"title": CASE.title, "largest loss difference": gap, "ms": in_turns(blocks, rounds, after_round)}


if __name__ == "__main__":
    measure_alone("quantized", "qlora", "Measure a step over quantized weights.", measure, rounds=10, gpu=False)
