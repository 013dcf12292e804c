"""Measure a step by the threads of its products, on a machine that does nothing else, and with busy neighbours.

One thread, OpenBLAS's own threads, and ours, each in a process of its own; they take turns, quiet and beside a process
on each core that computes all the time::

    python benches/threads.py                     # four models
    python benches/threads.py --cases gpt4 --rounds 20
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
from cases import CASES, ON_CPU, Case
from samples import Sample, arguments, bars, on_gpu, use_device
from timing import block_size, in_turns, run_block
from ways import FAST, WAYS

ONE, OPENBLAS, OURS = "one thread", "OpenBLAS's own threads", "ours"
THREADS = {ONE: "1", OPENBLAS: "1", OURS: ""}  # OPENBLAS_NUM_THREADS of its process; of OpenBLAS's own see `let_loose`
BUSY = "while True: pass"


def let_loose() -> None:
    """Have OpenBLAS take a thread for each core again: with one of ours it computes every product whole."""
    import scipy_openblas32 as openblas

    library = ctypes.CDLL(str(Path(openblas.get_lib_dir(), openblas.get_library(fullname=True))))
    library.scipy_openblas_set_num_threads(len(os.sched_getaffinity(0)))


def serve(case: Case, way: str) -> None:
    """Be one of the processes: take blocks of steps when asked to."""
    if way == OPENBLAS:
        let_loose()
    batches, step = case.batches(), WAYS[FAST](case.new_run())
    losses = [float(step(*batch)) for batch in batches]
    ms = min(run_block(step, batches, 2) for _ in range(4))
    print(json.dumps({"ways": {way: {"losses": losses, "ms": ms}}}), flush=True)
    for line in sys.stdin:
        _, count = json.loads(line)
        print(json.dumps(run_block(step, batches, count)), flush=True)


@contextlib.contextmanager
def neighbours() -> Iterator[None]:
    """Keep every core busy."""
    cores = range(len(os.sched_getaffinity(0)))
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in cores]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(name: str, rounds: int, after_round: Callable[[], None]) -> dict[str, Any]:
    """Time every way on one case, quiet and busy; return milliseconds by way and round."""
    with contextlib.ExitStack() as stack:
        blocks, paces = {}, []
        for way, threads in THREADS.items():
            command = [sys.executable, *sys.argv, "--alone", name, way]
            peer = stack.enter_context(peers.start(command, {**os.environ, "OPENBLAS_NUM_THREADS": threads}))
            paces.append(peer.built["ways"][way]["ms"])
            blocks[way] = functools.partial(peer.run_block, way, block_size(min(paces)))
        quiet = in_turns(blocks, rounds, after_round)
        with neighbours():
            busy = in_turns(blocks, rounds, after_round)
    return {"title": CASES[name].title, "quiet": quiet, "busy": busy}


def main() -> None:
    """Measure the cases asked for."""
    parser = arguments("Measure the threads of products.", list(ON_CPU))
    parser.add_argument("--rounds", type=int, default=15, help="how often each way takes its turn (default: 15)")
    args = parser.parse_args()
    use_device(args.device)
    if on_gpu():
        print("threads: nothing to measure on a GPU")
        return
    if args.alone:
        name, way = args.alone
        serve(CASES[name], way)
        return
    sample = Sample("threads", args)
    with bars() as progress:
        for name in args.cases or ON_CPU:
            bar = progress.add_task(name, total=2 * args.rounds)
            sample.add(name, measure(name, args.rounds, functools.partial(progress.advance, bar)))
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
