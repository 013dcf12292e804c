"""Measure `faststep.losses` beside plain MLX: time as a ratio within rounds, and the peak of MLX's memory.

The ways take turns in one process, on the same arrays::

    python benches/losses.py                                          # 2,048 tokens, a vocabulary of 32,768
    python benches/losses.py --tokens 4096 --vocabulary 50257 --size 256 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from faststep.losses import linear_cross_entropy

Loss = Callable[[mx.array, mx.array, mx.array], mx.array]
Way = Callable[..., Any]
KINDS: dict[str, Callable[[Loss], Way]] = {
    "loss alone": lambda f: f,
    "and the gradient of hidden": mx.value_and_grad,
    "and all gradients": lambda f: mx.value_and_grad(f, (0, 1)),
    "and all gradients, compiled": lambda f: mx.compile(mx.value_and_grad(f, (0, 1))),
}


def plain(hidden: mx.array, weight: mx.array, targets: mx.array) -> mx.array:
    """Compute the loss from all logits."""
    return nn.losses.cross_entropy((hidden @ weight.T).astype(mx.float32), targets, reduction="mean")


def milliseconds(way: Way, arrays: list[mx.array]) -> float:
    """Time one call."""
    start = time.perf_counter()
    mx.eval(way(*arrays))
    return 1e3 * (time.perf_counter() - start)


def peak(way: Way, arrays: list[mx.array]) -> float:
    """Return the MiB that one call needs beyond its arguments; it builds the kernels too."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(way(*arrays))
    return (mx.get_peak_memory() - before) / 2**20


def compare(kind: str, arrays: list[mx.array], chunk_size: int | None, rounds: int) -> str:
    """Measure both ways; return a line of the table."""
    ways = [KINDS[kind](f) for f in (plain, functools.partial(linear_cross_entropy, chunk_size=chunk_size))]
    peaks = [peak(way, arrays) for way in ways]
    times = [[milliseconds(way, arrays) for way in ways] for _ in range(rounds)]
    ratio = statistics.median(ours / reference for reference, ours in times)
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    cells = [*(f"{ms:,.0f} ms" for ms in medians), f"{ratio:.2f}", *(f"{mib:,.0f} MiB" for mib in peaks)]
    return f"| {kind} | {' | '.join(cells)} | {peaks[1] / peaks[0]:.2f} |"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure the chunked cross entropy beside plain MLX.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--size", type=int, default=128, help="the hidden size (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--chunk-size", type=int, help="rows of the weight (default: the loss's own)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    return parser.parse_args()


def main() -> None:
    """Measure and print a table."""
    args = parse_arguments()
    mx.random.seed(0)
    dtype = getattr(mx, args.dtype)
    hidden, weight = (mx.random.normal((rows, args.size)).astype(dtype) for rows in (args.tokens, args.vocabulary))
    arrays = [hidden, weight / args.size**0.5, mx.random.randint(0, args.vocabulary, (args.tokens,))]
    mx.eval(arrays)
    logits = 4 * args.tokens * args.vocabulary / 2**20
    print(f"{args.tokens} tokens, vocabulary {args.vocabulary}, hidden size {args.size}, {args.dtype}:")
    print(f"{logits:,.0f} MiB of float32 logits. Medians of {args.rounds} rounds; ratios: ours to plain.\n")
    print("| | plain | ours | ratio | plain | ours | ratio |\n|---|---:|---:|---:|---:|---:|---:|")
    for kind in args.kinds:
        print(compare(kind, arrays, args.chunk_size, args.rounds), flush=True)


if __name__ == "__main__":
    main()
