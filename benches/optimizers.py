"""Measure the step with each of MLX's optimizers: compiled MLX and ``fast_step``, in turns.

All cases that suit the device, or those asked for::

    python benches/optimizers.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from cases import CASES, Case, Run, adamw
from samples import Sample, arguments, bars, on_gpu, use_device
from timing import block_size, in_turns, run_block
from ways import COMPILED, COMPILED_ASYNC, FAST, WAYS, StepFn

ON_CPU = ("mlp", "gpt24", "gpt4")
ON_GPU = ("gpt24", "gpt6")
ROUNDS = 12
COMPARED = {name: WAYS[name] for name in (COMPILED, COMPILED_ASYNC, FAST)}


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


def measure(
    case: Case, optimizer: Callable[[], optim.Optimizer], ways: Mapping[str, Callable[[Run], StepFn]], warm: int
) -> dict[str, list[float]]:
    """Time the ways with one optimizer, after so many steps of each; return milliseconds by way and round."""
    batches = case.batches()
    steps = {name: way(case.new_run(optimizer=optimizer)) for name, way in ways.items()}
    for step in steps.values():
        run_block(step, batches, warm)
    count = block_size(min(run_block(steps[COMPILED], batches, 2) for _ in range(4)))
    blocks = {name: functools.partial(run_block, step, batches, count) for name, step in steps.items()}
    return in_turns(blocks, ROUNDS, lambda: None)


def measure_all(
    part: str,
    optimizers: Mapping[str, Callable[[], optim.Optimizer]],
    ways: Mapping[str, Callable[[Run], StepFn]],
    warm: int,
) -> None:
    """Measure optimizers on the cases asked for, or those that suit the device, and write the sample of a part."""
    title = part.replace("_", " ")
    args = arguments(f"Measure the step: {title}.", list(CASES)).parse_args()
    use_device(args.device)
    sample = Sample(part, args)
    with bars() as progress:
        for name in args.cases or (ON_GPU if on_gpu() else ON_CPU):
            bar = progress.add_task(f"{title}, {name}", total=len(optimizers))
            result: dict[str, Any] = {"title": CASES[name].title, "ms": {}}
            for of, optimizer in optimizers.items():
                result["ms"][of] = measure(CASES[name], optimizer, ways, warm)
                mx.clear_cache()
                sample.add(name, result)
                progress.advance(bar)
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    measure_all("optimizers", OPTIMIZERS, COMPARED, warm=4)
