"""Measure checkpoints: how long the training stands, against writing before it goes on.

In every round the same step is saved in both ways, in turns, and the same bytes are written by one bare write and one
fsync, which is what the disk can do. While the thread writes, steps are taken, and timed as those before the save are::

    python benches/checkpoints.py
    python benches/checkpoints.py --cases large --folder /where/checkpoints/would/be
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from cases import Case
from faststep import Step
from faststep.checkpoints import Checkpoints
from models import MLP
from rich.console import Console
from rich.table import Table
from samples import Sample, arguments, bars, use_device

Times = dict[str, list[float]]

# weights and AdamW's two moments: 12 bytes a parameter
CASES = {
    "small": Case("1 MB: MLP, 3 layers x 200, batch 64", MLP, {"layers": 3, "width": 200}, batch=64),
    "middle": Case("50 MB: MLP, 5 layers x 1,020, batch 64", MLP, {"layers": 5, "width": 1020}, batch=64),
    "large": Case("500 MB: MLP, 11 layers x 2,040, batch 64", MLP, {"layers": 11, "width": 2040}, batch=64),
}
COLUMNS = {
    "pause": "pause, ms",
    "synchronous": "written before\nit goes on, ms",
    "share": "pause /\nsynchronous",
    "write": "the thread\nwrites, s",
    "speed": "MB/s",
    "bare": "bare write\nand fsync, MB/s",
    "step": "step\nbefore, ms",
    "first": "first step\nafter, ms",
    "busy": "step while\nit writes, ms",
}


class Bench:
    """A step and its checkpoints.

    Attributes:
        times: Seconds by what was timed, one for each time.
        bytes: The bytes of a checkpoint.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        """Take the first steps."""
        run = case.new_run()
        self.step = Step(run.model, run.optimizer, run.loss_fn, max_grad_norm=run.max_grad_norm)
        self.batches = case.batches()
        self.folder = folder
        self.ways = {
            "pause": Checkpoints(folder / "background", keep_last=1, keep_best=0),
            "synchronous": Checkpoints(folder / "synchronous", keep_last=1, keep_best=0, background=False),
        }
        self.times: Times = {name: [] for name in ("pause", "synchronous", "write", "bare", "step", "first", "busy")}
        self.bytes = 0
        self._taken = 0
        self._steps(4)

    def take(self) -> None:
        """Take one round."""
        order = [self._background, self._synchronous, self._bare]
        at = len(self.times["pause"]) % len(order)
        for part in order[at:] + order[:at]:
            part()

    def _background(self) -> None:
        checkpoints = self.ways["pause"]
        self.times["step"] += self._steps(4)
        self._time("pause", lambda: checkpoints.save(self.step, number=len(self.times["pause"])))
        self.times["first"] += self._steps(1)
        busy, written = [], checkpoints.take_written()
        while not written:
            busy += self._steps(1)
            written = checkpoints.take_written()
        self.times["busy"] += busy[:-1]  # the last one was not written beside all the time
        self.times["write"].append(written[0].seconds)
        self.bytes = written[0].bytes
        checkpoints.wait()

    def _synchronous(self) -> None:
        checkpoints = self.ways["synchronous"]
        self._steps(2)
        self._time("synchronous", lambda: checkpoints.save(self.step, number=len(self.times["synchronous"])))

    def _bare(self) -> None:
        contents = os.urandom(1 << 20) * -(-max(self.bytes, 1) >> 20)
        file = self.folder / "bare"

        def write() -> None:
            with file.open("wb") as out:
                out.write(memoryview(contents)[: self.bytes])
                os.fsync(out.fileno())

        if self.bytes:
            self._time("bare", write)
            file.unlink()

    def _steps(self, count: int) -> list[float]:
        """Take so many steps, each waited for; return their seconds."""
        seconds = []
        for _ in range(count):
            batch = self.batches[self._taken % len(self.batches)]
            start = time.perf_counter()
            mx.eval(self.step(*batch).loss)
            mx.synchronize()
            seconds.append(time.perf_counter() - start)
            self._taken += 1
        return seconds

    def _time(self, name: str, what: Callable[[], object]) -> None:
        start = time.perf_counter()
        what()
        self.times[name].append(time.perf_counter() - start)


def measure(case: Case, folder: Path, rounds: int, after_round: Callable[[], object]) -> dict[str, object]:
    """Take the rounds of one case; return milliseconds by what was timed, and the bytes of a checkpoint."""
    with tempfile.TemporaryDirectory(dir=folder) as here:
        bench = Bench(case, Path(here))
        for _ in range(rounds):
            bench.take()
            after_round()
    times = {name: [1e3 * each for each in seconds] for name, seconds in bench.times.items()}
    return {"title": case.title, "bytes": bench.bytes, "ms": times}


def row(result: dict[str, object]) -> list[str]:
    """Return the medians of a case, in the order of the columns."""
    times: Times = result["ms"]  # type: ignore[assignment]
    megabytes = int(result["bytes"]) / 1e6  # type: ignore[call-overload]
    middle = {name: statistics.median(each) if each else float("nan") for name, each in times.items()}
    shares = [pause / whole for pause, whole in zip(times["pause"], times["synchronous"], strict=True)]
    shown = {
        "pause": f"{middle['pause']:.2f}",
        "synchronous": f"{middle['synchronous']:.0f}",
        "share": f"{statistics.median(shares):.1%}",
        "write": f"{middle['write'] / 1e3:.3f}",
        "speed": f"{megabytes / middle['write'] * 1e3:.0f}",
        "bare": f"{megabytes / middle['bare'] * 1e3:.0f}",
        "step": f"{middle['step']:.2f}",
        "first": f"{middle['first']:.2f}",
        "busy": f"{middle['busy']:.2f}",
    }
    return [f"{megabytes:.1f} MB", *(shown[name] for name in COLUMNS)]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = arguments("Measure the pause that a checkpoint makes.", list(CASES))
    parser.add_argument("--rounds", type=int, default=15, help="how often each is saved (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to be measured (default: that of TMPDIR)")
    return parser.parse_args()


def main() -> None:
    """Measure every case."""
    args = parse_arguments()
    use_device(args.device)
    sample = Sample("checkpoints", args)
    table = Table("state", *COLUMNS.values(), title="Medians")
    with bars() as progress:
        for name in args.cases or CASES:
            bar = progress.add_task(CASES[name].title, total=args.rounds)
            result = measure(CASES[name], args.folder, args.rounds, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
            sample.add(name, result)
            table.add_row(*row(result))
    Console(width=140).print(table)
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
