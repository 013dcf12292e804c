"""Measure the loader: batches a second and the share of the time that a step waits, and how much padding there is.

The numbers of workers take turns in rotating order, over the same batches, once with nothing done with them and once
with a step of some 10 ms of matrix products between them::

    python benches/loader.py                              # all
    python benches/loader.py --cases files padding
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from faststep.data import Loader, LoaderStats, Pack, Pad, stack
from markdown import short, table
from samples import Sample, arguments, bars, use_device

ROUNDS = 5
WORKERS = (0, 1, 4)
STEP_MS = 10
ITEM_SECONDS = 1e-3  # what an item of the costly cases takes
TEXTS = 4096


class Items(NamedTuple):
    """A dataset: so many items, each made by a function of its number."""

    make: Callable[[int], Any]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


class Case(NamedTuple):
    """A loader that is measured, and its name for a user."""

    title: str
    source: Callable[[], Any]
    batch_size: int
    batches: int
    collate: Callable[[Any], Any] = stack


def small(index: int) -> dict[str, Any]:
    """Make an item that costs next to nothing."""
    return {"x": np.full(64, index, dtype=np.float32), "y": index}


def waiting(index: int) -> dict[str, Any]:
    """Wait as for a file or a server."""
    time.sleep(ITEM_SECONDS)
    return small(index)


def computing(index: int) -> dict[str, Any]:
    """Compute in numpy, as decoding does: without the GIL."""
    noise = np.random.default_rng(index).standard_normal(1 << 15)
    return {"x": np.sort(noise)[:64].astype(np.float32), "y": index}


def costly_collate(items: list[dict[str, Any]]) -> Any:
    """Stack, and then compute for some milliseconds."""
    batch = stack(items)
    np.sort(np.random.default_rng(0).standard_normal(1 << 18))
    return batch


CASES = {
    "arrays": Case("arrays, batches of 256 x 64", lambda: {"x": np.zeros((51200, 64), np.float32)}, 256, 200),
    "items": Case("cheap items, batches of 32", lambda: Items(small, 6400), 32, 200),
    "files": Case("items that wait 1 ms each, batches of 16", lambda: Items(waiting, 640), 16, 40),
    "decoding": Case("items that compute 1 ms or so each, batches of 16", lambda: Items(computing, 640), 16, 40),
    "collate": Case("a collate that computes 10 ms or so", lambda: Items(small, 1280), 32, 40, costly_collate),
}


def new_step() -> Callable[[], None]:
    """Return what stands for a training step: as many matrix products as take about `STEP_MS`."""
    x = mx.random.normal((256, 256)) / 16

    def products(count: int) -> float:
        start = time.perf_counter()
        y = x
        for _ in range(count):
            y = mx.tanh(y @ x)
        mx.eval(y)
        return 1e3 * (time.perf_counter() - start)

    products(20)
    count = max(1, round(20 * STEP_MS / statistics.median(products(20) for _ in range(5))))
    return lambda: products(count) and None


def loop(case: Case, workers: int, step: Callable[[], None] | None) -> LoaderStats:
    """Go through one epoch."""
    loader = Loader(case.source(), case.batch_size, shuffle=True, collate=case.collate, workers=workers)
    for _ in loader:
        if step is not None:
            step()
    return loader.stats


def measure(case: Case, step: Callable[[], None], advance: Callable[[], None]) -> dict[str, Any]:
    """Measure a case with each number of workers, in turns."""
    result: dict[str, Any] = {
        "title": case.title,
        "batches a second": {str(n): [] for n in WORKERS},
        "wait share": {str(n): [] for n in WORKERS},
    }
    for i in range(ROUNDS):
        at = i % len(WORKERS)
        for workers in WORKERS[at:] + WORKERS[:at]:
            alone, beside = loop(case, workers, None), loop(case, workers, step)
            result["batches a second"][str(workers)].append(alone.batches / alone.seconds)
            result["wait share"][str(workers)].append(beside.wait_share)
            advance()
    return result


def padding() -> dict[str, Any]:
    """Return the share of elements that is no padding, for lengths as texts have them (lognormal, 1 to 1,024)."""
    lengths = np.random.default_rng(0).lognormal(5, 0.8, TEXTS).clip(1, 1024).astype(int).tolist()
    texts = [np.zeros(n, dtype=np.int32) for n in lengths]
    ways = {
        "to the batch's longest (multiples of 32)": Pad(),
        "to buckets of 128, 256, 512, 1024": Pad(buckets=[128, 256, 512, 1024]),
        "the same, a window of 16 batches sorted": Pad(buckets=[128, 256, 512, 1024], window=16),
        "multiples of 32, a window of 16 batches sorted": Pad(window=16),
        "packed into rows of 1,024": Pack(1024),
    }
    result: dict[str, Any] = {"title": f"{TEXTS} texts of {statistics.mean(lengths):.0f} tokens, batches of 32"}
    for name, collate in ways.items():
        loader = Loader(texts, 32, shuffle=True, collate=collate)
        shapes = {(batch["tokens"] if isinstance(batch, dict) else batch[0]).shape for batch in loader}
        stats = loader.stats
        result[name] = {"efficiency": stats.efficiency, "shapes": len(shapes), "seconds": stats.seconds}
    return result


def report(results: dict[str, Any]) -> list[str]:
    """Lay out what was measured."""
    head = ["", *(f"{n} workers" for n in WORKERS), *(f"waiting, {n}" for n in WORKERS)]
    rows = []
    for name, result in results.items():
        if name == "padding":
            continue
        rates = [short(statistics.median(result["batches a second"][str(n)])) for n in WORKERS]
        waits = [f"{statistics.median(result['wait share'][str(n)]):.0%}" for n in WORKERS]
        rows.append([result["title"], *rates, *waits])
    lines = [f"Batches a second; share of the time that a step of {STEP_MS} ms waits. Medians of {ROUNDS} rounds.", ""]
    lines += table(head, rows) if rows else []
    for name, ways in {name: result for name, result in results.items() if name == "padding"}.items():
        cells = [[way, f"{w['efficiency']:.1%}", str(w["shapes"])] for way, w in ways.items() if way != "title"]
        lines += [f"{name.capitalize()}: {ways['title']}", "", *table(["", "no padding", "shapes"], cells)]
    return lines


def main() -> None:
    """Measure, write the sample and print the tables."""
    args = arguments("Measure the loader.", [*CASES, "padding"]).parse_args()
    use_device(args.device)
    chosen = args.cases or [*CASES, "padding"]
    sample, results, step = Sample("loader", args), {}, new_step()
    with bars() as progress:
        for name in chosen:
            if name == "padding":
                results[name] = padding()
            else:
                bar = progress.add_task(name, total=ROUNDS * len(WORKERS))
                results[name] = measure(CASES[name], step, functools.partial(progress.advance, bar))
            sample.add(name, results[name])
    print("\n".join(report(results)))


if __name__ == "__main__":
    main()
