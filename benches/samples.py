"""Samples: JSON files of what was measured, one for each part, commit and device, and what all parts have in common.

A part is a program of this folder. Run again at the same commit, with other cases, it adds to its sample.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from machine import ROOT, commit, machine, versions
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

SAMPLES = ROOT / "benches" / "samples"
DIGITS = 5


class Sample:
    """Measurements of one part; the file is written after each of its cases, so that a later one loses nothing."""

    def __init__(self, part: str, args: argparse.Namespace) -> None:
        """Describe machine and versions now, or go on with the sample that is there."""
        now = datetime.datetime.now(datetime.timezone.utc)
        self.content: dict[str, Any] = {
            "part": part,
            "date": f"{now:%Y-%m-%d %H:%M}",
            "commit": args.commit or commit(),
            "machine": machine(),
            "versions": versions(),
            "results": {},
        }
        name = f"{now:%Y-%m-%d}-{self.content['commit'].split()[0]}-{part}-{device_slug(self.content)}.json"
        self.file: Path = args.samples / name
        if self.file.exists():
            self.content = read(self.file)

    def add(self, case: str, result: dict[str, Any]) -> None:
        """Add the result of one case, or replace it, and write the file."""
        self.content["results"][case] = rounded(result)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> dict[str, Any]:
    """Return what a sample holds."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def newest(folder: Path) -> list[dict[str, Any]]:
    """Return the newest results of each case of a part on a device, by sample, in the order of parts and devices."""
    samples = [read(file) for file in folder.glob("*.json")]
    known: set[tuple[str, str, str]] = set()
    found = []
    for sample in sorted(samples, key=lambda sample: str(sample["date"]), reverse=True):
        of = sample["part"], sample["machine"]["device"]
        results = {case: result for case, result in sample["results"].items() if (*of, case) not in known}
        known |= {(*of, case) for case in results}
        if results:
            found.append(sample | {"results": results})
    return sorted(found, key=lambda sample: (sample["part"], sample["machine"]["device"]))


def device_slug(sample: dict[str, Any]) -> str:
    """Return the device as it stands in names of files: cpu, nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", sample["machine"]["device"].lower())


def rounded(value: Any) -> Any:
    """Return a tree of results with as many digits as the measurements have."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def arguments(description: str, cases: list[str]) -> argparse.ArgumentParser:
    """Return the parser of a part's command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", nargs="+", choices=cases, help="what to measure; default: all that suits the device")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: MLX's")
    parser.add_argument("--samples", type=Path, default=SAMPLES, help="folder of the samples")
    parser.add_argument("--commit", help="what is measured, where the checkout is a copy that git does not know")
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)  # what a process started by `alone` does
    return parser


def measure_alone(
    part: str, case: str, description: str, measure: Callable[[int, Callable[[], None]], Any], *, rounds: int, gpu: bool
) -> None:
    """Measure a part that has one case, and add it to the sample: its `main`.

    Args:
        part: The name of the sample.
        case: The name of the case.
        description: What is measured, for the command line's help.
        measure: `measure(rounds, after_round)` returns what the sample takes.
        rounds: How often each way takes its turn, unless told otherwise.
        gpu: Whether there is something to measure on a GPU.
    """
    parser = arguments(description, [case])
    help_text = "how often each way takes its turn (default: %(default)s)"
    parser.add_argument("--rounds", type=int, default=rounds, help=help_text)
    args = parser.parse_args()
    use_device(args.device)
    if on_gpu() and not gpu:
        print(f"{part}: nothing to measure on a GPU")
        return
    sample = Sample(part, args)
    with bars() as progress:
        bar = progress.add_task(case, total=args.rounds)
        sample.add(case, measure(args.rounds, functools.partial(progress.advance, bar)))
    print(f"wrote {sample.file.name}")


def use_device(name: str | None) -> None:
    """Let MLX compute there; None: where it does anyway."""
    if name:
        mx.set_default_device(mx.Device({"cpu": mx.cpu, "gpu": mx.gpu}[name]))


def on_gpu() -> bool:
    """Return whether MLX computes on a GPU."""
    return mx.default_device().type == mx.gpu


def alone(*what: str, **environment: str) -> Iterator[Any]:
    """Run this program again in a process of its own, and yield what it prints: JSON, a line each.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    command = [sys.executable, *sys.argv, "--alone", *what]
    with subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True) as process:
        yield from map(json.loads, process.stdout or ())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def answer(*what: str, **environment: str) -> Any:
    """Run this program again in a process of its own, and return the one line that it prints."""
    (result,) = alone(*what, **environment)
    return result


def bars() -> Progress:
    """Return the progress display."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    return Progress(*columns, TimeElapsedColumn())
