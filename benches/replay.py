"""Train a GPT on this documentation: each step evaluated by MLX, replayed as one CUDA graph, and evaluated again.

All see the same batches in one order; the losses are held beside each other. Needs an NVIDIA GPU::

    python benches/replay.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from cases import gpt
from machine import ROOT
from samples import measure_alone
from ways import EVALUATED, FAST, WAYS

CASE = gpt(layers=4, width=128, heads=4, batch=32, seq=128)
STEPS = 2000
EVERY = 10  # steps between two points
AGAIN = f"{EVALUATED}, once more"


def text() -> np.ndarray:
    """Return the bytes of the documentation."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return np.frombuffer(b"\n".join(page.read_bytes() for page in pages), dtype=np.uint8).astype(np.int32)


def measure(steps: int, after: Callable[[], None]) -> dict[str, Any]:
    """Train each way, and the evaluated one once more: those two part by the order of the device's sums.

    Returns:
        Losses at some steps by way, and the largest difference from the evaluated way's since the step before.
    """
    ways = {EVALUATED: EVALUATED, FAST: FAST, AGAIN: EVALUATED}
    runs = {name: WAYS[way](CASE.new_run()) for name, way in ways.items()}
    taken: dict[str, list[mx.array]] = {name: [] for name in runs}
    data, rng, length = text(), np.random.default_rng(0), CASE.shape["seq"] + 1
    for _ in range(steps):
        starts = rng.integers(len(data) - length, size=CASE.batch)
        tokens = np.stack([data[start : start + length] for start in starts])
        for name, step in runs.items():
            taken[name].append(step(mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:])))
        after()
    losses = {name: np.array(mx.stack(values)) for name, values in taken.items()}
    apart = {name: np.abs(losses[name] - losses[EVALUATED]).reshape(-1, EVERY).max(axis=1) for name in (FAST, AGAIN)}
    return {
        "title": f"{CASE.title}, on bytes of the documentation",
        "step": list(range(EVERY, steps + 1, EVERY)),
        "losses": {name: values[EVERY - 1 :: EVERY].tolist() for name, values in losses.items()},
        "difference": {name: values.tolist() for name, values in apart.items()},
    }


if __name__ == "__main__":
    if mx.cuda.is_available():
        measure_alone("replay", "losses", "Losses with and without replay.", measure, rounds=STEPS, gpu=True)
    else:
        print("replay: nothing to measure without an NVIDIA GPU")
