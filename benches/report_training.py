"""The report of what stands around the step: ``trainer.py``, ``loader.py``, ``checkpoints.py``."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from markdown import short, spread, table

TRAINER = """The trainer, with its log and its progress lines, beside a loop of `fast_step` written by hand that
reads its losses every 20 steps. Milliseconds a step, medians with quartiles; the two take turns.
"""
LOADER = """The loader alone, by the number of worker threads: batches a second, and the share of its time for which
a training with steps of 10 ms waits for data. Medians.
"""
CHECKPOINTS = """Pause of the training for a checkpoint: written by a thread, and written by the training itself. Then
the slowdown of steps while the thread writes. Medians. "Bare write" is a write of the same number of bytes with
one fsync.
"""
_HAND, _TRAINER = "loop by hand", "Trainer"


def trainer(result: dict[str, Any], plot: Path) -> list[str]:
    """Lay out the trainer beside a loop by hand."""
    times = result["ms"]
    pairs = list(zip(times[_HAND], times[_TRAINER], strict=True))
    ratios, more = [ours / hand for hand, ours in pairs], [1e3 * (ours - hand) for hand, ours in pairs]
    head = [_HAND, _TRAINER, "ratio", "more, us a step"]
    row = [spread(times[_HAND]), spread(times[_TRAINER]), spread(ratios), spread(more)]
    return [f"### {result['title']}", "", *table(head, [row])]


def loader(result: dict[str, Any], plot: Path) -> list[str]:
    """Lay out the speed of one kind of data, or the padding of several ways to batch texts."""
    lines = [f"### {result['title']}", ""]
    if "wait share" in result:
        workers = list(result["wait share"])
        rates = [short(statistics.median(result["batches a second"][n])) for n in workers]
        waits = [f"{statistics.median(result['wait share'][n]):.0%}" for n in workers]
        rows = [["batches a second", *rates], ["waiting", *waits]]
        return [*lines, *table(["", *(f"{n} workers" for n in workers)], rows)]
    ways = ((way, found) for way, found in result.items() if way != "title")
    rows = [[way, f"{found['efficiency']:.1%}", str(found["shapes"])] for way, found in ways]
    return [*lines, *table(["", "no padding", "shapes"], rows)]


def checkpoints(result: dict[str, Any], plot: Path) -> list[str]:
    """Lay out the pause of a checkpoint, and what its writing costs."""
    middle = {name: statistics.median(each) for name, each in result["ms"].items() if each}
    columns = {
        "the training stands, ms": short(middle["pause"]),
        "written before it goes on, ms": short(middle["synchronous"]),
        "the thread writes, s": short(middle["write"] / 1e3),
        "MB/s": short(result["bytes"] / 1e3 / middle["write"]),
        "bare write, MB/s": short(result["bytes"] / 1e3 / middle["bare"]),
        "step before, ms": short(middle["step"]),
        "first step after": short(middle["first"]),
        "step while it writes": short(middle["busy"]) if "busy" in middle else "",
    }
    return [f"### {result['title']}", "", *table(list(columns), [list(columns.values())])]
