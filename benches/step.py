"""Measure the training step, side by side: plain MLX, compiled, compiled with async evaluation, and ``fast_step``.

The ways take turns in one process, in rotating order, on the same batches from the same weights; every ratio is taken
within a round, so that what disturbs the machine disturbs both sides of it. Peaks of the memory are measured first, in
processes of their own: on a GPU several at once, which compile the kernels that all need::

    python benches/step.py                          # the cases that suit the device
    python benches/step.py --cases gpt24 --rounds 20
    python benches/step.py --torch /path/to/python3 # PyTorch's ways too, in a process of that Python, in the same turns
    python benches/step.py --jax /path/to/python3   # JAX's, in the same way
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import frameworks
import mlx.core as mx
import numpy as np
import peers
from cases import CASES, MAX_GRAD_NORM, ON_CPU, ON_GPU, Case
from faststep import Step
from mlx.utils import tree_reduce
from rich.progress import Progress
from samples import Sample, answer, arguments, bars, on_gpu, use_device
from timing import Batches, block_size, in_turns, run_block
from ways import BOUND, COMPILED, FAST, PLAIN, WAYS, StepFn, widened

TOLERANCE = {mx.float32: 1e-3, mx.bfloat16: 1e-2}  # of the largest loss
NOISE = 1.25  # plain MLX in bfloat16 or TF32 on a GPU differs from itself by so much: atomic sums
EXACT = "float32"  # gradients in float32, whose products are none of TF32
OWN_KERNELS = {f"{way}, MLX's own kernels": way for way in (COMPILED, FAST)}  # what FASTSTEP_KERNELS=0 leaves
GPU_PROCESSES = 5  # that share its memory
COMPILATION_SECONDS = 60  # at most; a step that is not captured is not known to be done
CLIPPING = {"peak": MAX_GRAD_NORM, "peak without clipping": None}


class Differs(Exception):
    """The ways of a case do not compute the same."""


def first_losses(steps: dict[str, StepFn], batches: Batches) -> dict[str, list[float]]:
    """Take the first steps of every way, which is the warm-up too; return their losses, in nats."""
    return {name: [float(step(*batch)) for batch in batches] for name, step in steps.items()}


def gaps(case: Case, losses: dict[str, list[float]], exact: list[float]) -> dict[str, float]:
    """Return the largest difference of each way's losses from those of gradients in float32.

    A way that never updates, or updates otherwise, gives its first loss only.

    Raises:
        Differs: One is larger than rounding explains, and than plain MLX's: the same would not be measured.
    """
    first = {name: x[: case.compared] for name, x in losses.items()}
    found = {name: float(np.abs(np.subtract(x, exact[: len(x)])).max()) for name, x in first.items()}
    if not max(found.values()) <= max(TOLERANCE[case.dtype] * max(exact), NOISE * found[PLAIN]):
        raise Differs(f"{case.title}: not measured, the losses differ from those of gradients in float32 by {found}")
    return found


def measure(
    case: Case, exact: list[float] | None, others: Sequence[peers.Peer], rounds: int, after_round: Callable[[], None]
) -> dict[str, Any]:
    """Time every way on one case; return milliseconds by way and round.

    `exact`: the losses of gradients in float32, where plain MLX's are others.
    """
    batches = case.batches()
    compile_kernels(case, batches)
    steps = {name: way(case.new_run()) for name, way in WAYS.items()}
    losses = first_losses(steps, batches)
    del losses[BOUND][1:]  # it never updates
    losses |= {way: built["losses"] for peer in others for way, built in peer.built["ways"].items()}
    apart = gaps(case, losses, exact or losses[PLAIN])
    count = block_size(min(run_block(steps[PLAIN], batches, 2) for _ in range(4)))
    blocks = blocks_of(steps, others, batches, count)
    result = {"title": case.title, "parameters": parameter_bytes(case), "largest loss difference": max(apart.values())}
    if exact:
        result["loss differences from float32"] = {way: apart[way] for way in (PLAIN, COMPILED, FAST)}
    result |= {"steps in a block": count, "ms": in_turns(blocks, rounds, after_round)}
    return result | {peer.built["framework"]: peer.built for peer in others if "framework" in peer.built}


def is_captured(step: Step[Any, Any]) -> bool:
    """Tell whether a step is replayed."""
    return any((trace.replay or "").startswith("captured") for trace in step.stats.traces)


def compile_kernels(case: Case, batches: Batches) -> None:
    """Take steps of another run until the kernels that a CPU's step waits for have been compiled in the background."""
    run = case.new_run()
    step = Step(run.model, run.optimizer, run.loss_fn, max_grad_norm=run.max_grad_norm)
    deadline = time.monotonic() + COMPILATION_SECONDS
    while not on_gpu() and time.monotonic() < deadline and not is_captured(step):
        mx.eval(step(*batches[0]).loss)


def blocks_of(
    steps: dict[str, StepFn], others: Sequence[peers.Peer], batches: Batches, count: int
) -> dict[str, Callable[[], float]]:
    """Return what takes a block of so many steps, by way."""
    ours = {way: functools.partial(run_block, step, batches, count) for way, step in steps.items()}
    theirs = {way: functools.partial(peer.run_block, way, count) for peer in others for way in peer.built["ways"]}
    return {**ours, **theirs}


def serve(case: Case) -> None:
    """Be the peer that leaves MLX's CPU kernels as they are."""
    batches = case.batches()
    steps = {name: way(case.new_run()) for name, way in WAYS.items()}
    losses = first_losses(steps, batches)
    print(json.dumps({"ways": {name: {"losses": losses[way]} for name, way in OWN_KERNELS.items()}}), flush=True)
    # a way is slower where others take turns with it (GPT 24x64: by a fifth): one goes before it here too, untimed
    before = itertools.cycle(steps.values())
    for line in sys.stdin:
        name, count = json.loads(line)
        run_block(next(before), batches, count)
        print(json.dumps(run_block(steps[OWN_KERNELS[name]], batches, count)), flush=True)


def start(stack: contextlib.ExitStack, name: str, pythons: dict[str, str | None]) -> list[peers.Peer]:
    """Start the other processes of one case; `pythons`: what runs a framework."""
    started: list[peers.Peer] = []
    if not on_gpu():
        command = [sys.executable, *sys.argv, "--alone", name]
        started.append(stack.enter_context(peers.start(command, {**os.environ, "FASTSTEP_KERNELS": "0"})))
    for framework, python in pythons.items():
        if python and CASES[name].model in frameworks.MODELS[framework]:
            started.append(stack.enter_context(frameworks.start(framework, python, CASES[name])))
    return started


def exact_losses(name: str) -> list[float] | None:
    """Return the losses of gradients in float32, by a process of its own; none where plain MLX's are those."""
    if CASES[name].dtype == mx.float32 and not on_gpu():
        return None
    losses: list[float] = answer(name, EXACT, MLX_ENABLE_TF32="0")
    return losses


def peaks(names: Sequence[str], progress: Progress) -> dict[str, dict[str, dict[str, float]]]:
    """Measure the peak of each way by case, each in a process of its own, with and without clipping."""
    ways = [(way, clipping) for way in WAYS for clipping in CLIPPING if way != BOUND or clipping == "peak"]
    bar = progress.add_task("memory of each way", total=len(names) * len(ways))
    with futures.ThreadPoolExecutor(GPU_PROCESSES if on_gpu() else 1) as pool:
        found = {pool.submit(answer, name, *of): (name, *of) for name in names for of in ways}
        for _ in futures.as_completed(found):
            progress.advance(bar)
    result: dict[str, dict[str, dict[str, float]]] = {name: {way: {} for way in WAYS} for name in names}
    for bytes, (name, way, clipping) in found.items():
        result[name][way][clipping] = bytes.result()
    return result


def peak(case: Case, way: str, max_grad_norm: float | None) -> int:
    """Return the peak of MLX's memory over steps of one way, in bytes (run alone)."""
    step, batches = WAYS[way](case.new_run(max_grad_norm=max_grad_norm)), case.batches()
    run_block(step, batches, 16)  # the step has been captured then
    mx.reset_peak_memory()
    run_block(step, batches, 8)
    return max(mx.get_peak_memory(), mx.get_active_memory())  # a replayed step may allocate nothing


def parameter_bytes(case: Case) -> int:
    """Return the bytes of a case's parameters."""
    bytes: int = tree_reduce(lambda n, a: n + a.nbytes, case.new_run().model.parameters(), 0)
    return bytes


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = arguments("Measure the training step, side by side.", list(CASES))
    parser.add_argument("--rounds", type=int, default=40, help="turns that every way takes (default: %(default)s)")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch: its ways are measured too")
    parser.add_argument("--jax", metavar="PYTHON", help="a Python that has JAX: its way is measured too")
    return parser.parse_args()


def main() -> None:
    """Measure every case, or do the part of a process of its own."""
    args = parse_arguments()
    use_device(args.device)
    if args.alone:
        case, *what = args.alone
        if what == [EXACT]:
            print(json.dumps(first_losses({EXACT: widened(CASES[case].new_run())}, CASES[case].batches())[EXACT]))
        elif what:
            print(json.dumps(peak(CASES[case], what[0], CLIPPING[what[1]])))
        else:
            serve(CASES[case])
        return
    sample, failed = Sample("step", args), []
    names = args.cases or (ON_GPU if on_gpu() else ON_CPU)
    with bars() as progress, contextlib.ExitStack() as stack:
        others = {name: start(stack, name, {"PyTorch": args.torch, "JAX": args.jax}) for name in names}
        if not on_gpu():  # what builds beside it would change the peak of a step there
            for each in (peer for of in others.values() for peer in of):
                each.built  # noqa: B018, waits
        memory = peaks(names, progress)
        with futures.ThreadPoolExecutor(GPU_PROCESSES if on_gpu() else 1) as pool:
            losses = progress.track(pool.map(exact_losses, names), len(names), description="losses in float32")
            exact = dict(zip(names, losses, strict=True))
        for name in names:
            bar = progress.add_task(f"{name}, in turns", total=args.rounds)
            after = functools.partial(progress.advance, bar)
            try:
                result = measure(CASES[name], exact[name], others[name], args.rounds, after)
            except Differs as error:
                failed.append(str(error))
            else:
                sample.add(name, result | {"memory": memory[name]})
            mx.clear_cache()  # on a GPU the other processes share its memory with this one
    print(f"wrote {sample.file.name}")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
