"""Write docs/benchmarks.md and its plots out of the newest samples of each device; nothing by hand.

``python benches/report.py`` takes seconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from machine import ROOT
from markdown import Machines, short, table
from report_mlx_lm import MLX_LM, mlx_lm
from report_runs import REPLAY, RUNS, replay, runs
from report_rust import RUST, rust
from report_scaling import SCALING, scaling
from report_step import (
    CLIENTS,
    MATMUL,
    OPTIMIZERS,
    QUANTIZED,
    REACH,
    STEP,
    THREADS,
    VARYING,
    clients,
    matmul,
    optimizers,
    quantized,
    reach,
    step,
    threads,
    varying,
)
from report_training import CHECKPOINTS, LOADER, TRAINER, checkpoints, loader, trainer
from samples import SAMPLES, device_slug, newest
from ways import COMPILED, COMPILED_ASYNC, FAST

DOCS = ROOT / "docs"
HEAD = """# Benchmarks

Two tables first, then a section for each part. `make bench` measures and writes this page, from the newest sample of
each device in `benches/samples`; `make bench PARTS=step` runs one part.

"""
FIRST = "{device}, {machine}; AdamW, clipped to norm 1.0; medians, in milliseconds a step. More: [below](#{anchor})."
WAYS = {"plain MLX": "plain MLX", COMPILED: "mx.compile", COMPILED_ASYNC: "mx.compile, async", FAST: FAST}


class Section(NamedTuple):
    """A part's section: its title, what it says first, and what lays out one result, given a file for its plot."""

    title: str
    text: str
    lay_out: Callable[[dict[str, Any], Path], list[str]]


SECTIONS = {
    "step": Section("The step, side by side", STEP, step),
    "optimizers": Section("The step with each optimizer", OPTIMIZERS, optimizers),
    "clients": Section("Whole programs", CLIENTS, clients),
    "reach": Section("What a loss reaches", REACH, reach),
    "varying": Section("A number that changes at every step", VARYING, varying),
    "matmul": Section("Matrix products", MATMUL, matmul),
    "threads": Section("Who shares the products", THREADS, threads),
    "quantized": Section("Quantized weights", QUANTIZED, quantized),
    "scaling": Section("How the step grows", SCALING, scaling),
    "runs": Section("Long runs", RUNS, runs),
    "replay": Section("Losses under replay", REPLAY, replay),
    "rust": Section("The Rust crate beside mlx-rs", RUST, rust),
    "trainer": Section("The trainer beside a loop by hand", TRAINER, trainer),
    "loader": Section("The loader", LOADER, loader),
    "checkpoints": Section("Checkpoints", CHECKPOINTS, checkpoints),
    "mlx_lm_trainer": Section("mlx-lm's trainer", MLX_LM, mlx_lm),
}


def write_report(samples: Path, docs: Path) -> Path:
    """Write the report of the newest samples, and its plots beside it; return its file.

    Raises:
        SystemExit: There is no sample.
    """
    found = newest(samples)
    if not found:
        raise SystemExit(f"no samples in {samples}: run `make bench` first")
    machines, lines = Machines(), [HEAD.rstrip(), ""]
    for sample in (each for each in found if each["part"] == "step"):
        lines += summary(sample, machines)
    parts = list[str]()
    for part, section in SECTIONS.items():
        measured = [sample for sample in found if sample["part"] == part]
        parts += [f"## {section.title}", "", section.text] if measured else []
        for sample in measured:
            parts += device_lines(section, sample, docs / "plots", machines)
    lines += [*machines.lines(), *parts]
    docs.mkdir(parents=True, exist_ok=True)
    file = docs / "benchmarks.md"
    file.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return file


def summary(sample: dict[str, Any], machines: Machines) -> list[str]:
    """Lay out the medians of a device's steps, a line for each case."""
    results, device = sample["results"].values(), sample["machine"]["device"]
    peers = sorted({way for each in results for way in each["ms"] if way.startswith("PyTorch")})
    rows = []
    for result in results:
        times = {way: statistics.median(values) for way, values in result["ms"].items()}
        best = [short(min(times[way] for way in peers if way in times))] if peers else []
        rows.append([result["title"], *(short(times[way]) for way in WAYS), *best])
    anchor = f"the-step-side-by-side-{device.lower().replace(' ', '-')}"
    text = FIRST.format(device=device, machine=f"machine {machines.name(sample)}", anchor=anchor)
    head = ["model", *WAYS.values(), *(["best of PyTorch"] if peers else [])]
    return [text, "", *table(head, rows)]


def device_lines(section: Section, sample: dict[str, Any], plots: Path, machines: Machines) -> list[str]:
    """Lay out what one device's sample holds; a paragraph that several results have is there once."""
    lines = [f"### {section.title}: {sample['machine']['device']}", "", *machines.measured_on(sample)]
    for name, result in sample["results"].items():
        laid = section.lay_out(result, plots / f"{sample['part']}-{name}-{device_slug(sample)}.svg")
        for line in laid:
            if not (line and line in lines and line[0] not in "|#"):
                lines.append(line)
            elif laid:
                lines.pop()  # the empty line before it
    return lines


def main() -> None:
    """Write the report of the samples asked for."""
    parser = argparse.ArgumentParser(description="Write the report out of the samples.")
    parser.add_argument("--samples", type=Path, default=SAMPLES, help="folder of the samples")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of benchmarks.md and of plots")
    args = parser.parse_args()
    print(f"wrote {write_report(args.samples, args.docs)}")


if __name__ == "__main__":
    main()
