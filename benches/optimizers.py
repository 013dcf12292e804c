"""Measure the step with each of MLX's optimizers: compiled MLX and ``fast_step``, in turns.

All cases that suit the device, or those asked for::

    python benches/optimizers.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from cases import CASES, Case, adamw
from samples import Sample, arguments, bars, on_gpu, use_device
from timing import block_size, in_turns, run_block
from ways import COMPILED, COMPILED_ASYNC, FAST, WAYS

ON_CPU = ("mlp", "gpt24", "gpt4")
ON_GPU = ("gpt24", "gpt6")
ROUNDS = 12
COMPARED = (COMPILED, COMPILED_ASYNC, FAST)


def is_matrix(path: str, array: mx.array) -> bool:
    """Choose what Muon is for: the matrices between embeddings and output."""
    return array.ndim == 2 and path.startswith(("blocks", "layers"))


OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "SGD, momentum": lambda: optim.SGD(1e-3, momentum=0.9),
    "Adam": lambda: optim.Adam(1e-3),
    "AdamW": adamw,
    "Adamax": lambda: optim.Adamax(1e-3),
    "Lion": lambda: optim.Lion(1e-4),
    "RMSprop": lambda: optim.RMSprop(1e-3),
    "Adagrad": lambda: optim.Adagrad(1e-3),
    "AdaDelta": lambda: optim.AdaDelta(1e-3),
    "Adafactor": lambda: optim.Adafactor(),
    "Muon, AdamW": lambda: optim.MultiOptimizer([optim.Muon(1e-3), adamw()], [is_matrix]),
}


def measure(case: Case, optimizer: Callable[[], optim.Optimizer]) -> dict[str, list[float]]:
    """Time the ways with one optimizer; return milliseconds by way and round."""
    batches = case.batches()
    steps = {name: WAYS[name](case.new_run(optimizer=optimizer)) for name in COMPARED}
    for step in steps.values():
        run_block(step, batches, 4)
    count = block_size(min(run_block(steps[COMPILED], batches, 2) for _ in range(4)))
    blocks = {name: functools.partial(run_block, step, batches, count) for name, step in steps.items()}
    return in_turns(blocks, ROUNDS, lambda: None)


def main() -> None:
    """Measure the cases asked for."""
    args = arguments("Measure the step with each optimizer.", list(CASES)).parse_args()
    use_device(args.device)
    sample = Sample("optimizers", args)
    with bars() as progress:
        for name in args.cases or (ON_GPU if on_gpu() else ON_CPU):
            bar = progress.add_task(f"optimizers, {name}", total=len(OPTIMIZERS))
            result: dict[str, Any] = {"title": CASES[name].title, "ms": {}}
            for title, optimizer in OPTIMIZERS.items():
                result["ms"][title] = measure(CASES[name], optimizer)
                mx.clear_cache()
                sample.add(name, result)
                progress.advance(bar)
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
