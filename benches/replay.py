"""Train a small GPT on this project's documentation twice: each step evaluated by MLX, and replayed as one CUDA graph.

Both see the same batches in one order; the losses are held beside each other. Needs an NVIDIA GPU::

    python benches/replay.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from cases import Case, gpt
from machine import ROOT
from samples import measure_alone
from ways import EVALUATED, FAST, WAYS

CASE = gpt(layers=4, width=128, heads=4, batch=32, seq=128)
STEPS = 2000
EVERY = 10  # steps between two points


def text() -> np.ndarray:
    """Return the bytes of the documentation."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return np.frombuffer(b"\n".join(page.read_bytes() for page in pages), dtype=np.uint8).astype(np.int32)


def losses(way: str, case: Case, steps: int, after: Callable[[], None]) -> list[float]:
    """Train; return the loss of each step."""
    step, data, rng, taken = WAYS[way](case.new_run()), text(), np.random.default_rng(0), []
    length = case.shape["seq"] + 1
    for i in range(steps):
        starts = rng.integers(len(data) - length, size=case.batch)
        tokens = np.stack([data[start : start + length] for start in starts])
        taken.append(step(mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:])))
        if (i + 1) % EVERY == 0:
            mx.eval(taken[-EVERY:])
            after()
    return [loss.item() for loss in taken]


def measure(steps: int, after: Callable[[], None]) -> dict[str, Any]:
    """Train both ways; return losses at some steps, and the largest difference between each of them and the last."""
    ways = {way: losses(way, CASE, steps, after) for way in (EVALUATED, FAST)}
    differences = np.abs(np.subtract(*ways.values())).reshape(-1, EVERY)
    return {
        "title": f"{CASE.title}, on bytes of the documentation",
        "step": list(range(EVERY, steps + 1, EVERY)),
        "losses": {way: values[EVERY - 1 :: EVERY] for way, values in ways.items()},
        "difference": differences.max(axis=1).tolist(),
    }


if __name__ == "__main__":
    if EVALUATED in WAYS:
        measure_alone("replay", "losses", "Losses with and without replay.", measure, rounds=STEPS, gpu=True)
    else:
        print("replay: nothing to measure without an NVIDIA GPU")
