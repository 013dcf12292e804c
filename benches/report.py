"""Write docs/benchmarks.md, the pages of its parts and their plots out of the newest samples of each device.

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
    OWN_OPTIMIZERS,
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

The two tables show the time of a training step. Each part below has a page. `make bench` measures all of them and
writes the pages, from the newest sample of each device in `benches/samples`; `make bench PARTS=step` runs one part.
"""
FIRST = "{device}, {machine}; AdamW, clipped to norm 1.0; medians, in milliseconds a step."
MACHINES = "The letter of a machine stands for a line of [this table](../benchmarks.md#machines)."
WAYS = {"plain MLX": "plain MLX", COMPILED: "mx.compile", COMPILED_ASYNC: "mx.compile, async", FAST: FAST}


class Section(NamedTuple):
    """A part's section: its title, what it says first, and what lays out one result, given a file for its plot."""

    title: str
    text: str
    lay_out: Callable[[dict[str, Any], Path], list[str]]


SECTIONS = {
    "step": Section("The training step", STEP, step),
    "optimizers": Section("Each optimizer", OPTIMIZERS, optimizers),
    "own_optimizers": Section("Optimizers of one's own", OWN_OPTIMIZERS, optimizers),
    "clients": Section("Whole programs", CLIENTS, clients),
    "reach": Section("Losses with many objects in their closure", REACH, reach),
    "varying": Section("A number that changes at every step", VARYING, varying),
    "matmul": Section("Matrix products", MATMUL, matmul),
    "threads": Section("Threads for matrix products", THREADS, threads),
    "quantized": Section("Quantized weights", QUANTIZED, quantized),
    "scaling": Section("Steps with many tensors or parameters", SCALING, scaling),
    "runs": Section("Long runs", RUNS, runs),
    "replay": Section("Losses with CUDA graphs", REPLAY, replay),
    "rust": Section("The Rust crate and mlx-rs", RUST, rust),
    "trainer": Section("The trainer and a loop by hand", TRAINER, trainer),
    "loader": Section("The loader", LOADER, loader),
    "checkpoints": Section("Checkpoints", CHECKPOINTS, checkpoints),
    "mlx_lm_trainer": Section("mlx-lm's trainer", MLX_LM, mlx_lm),
}


def write_report(samples: Path, docs: Path) -> Path:
    """Write the report of the newest samples, a page for each part, and their plots; return the report's file.

    Raises:
        SystemExit: There is no sample.
    """
    found = newest(samples)
    if not found:
        raise SystemExit(f"no samples in {samples}: run `make bench` first")
    machines, lines = Machines(), [HEAD]
    for sample in (each for each in found if each["part"] == "step"):
        lines += summary(sample, machines)
    lines += ["## Parts", ""]
    for part, section in SECTIONS.items():
        measured = [sample for sample in found if sample["part"] == part]
        if measured:
            page = [f"# {section.title}", "", f"{section.text.rstrip()} {MACHINES}", ""]
            for sample in measured:
                page += device_lines(section, sample, docs / "plots", machines)
            write(docs / "benchmarks" / f"{part}.md", page)
            lines.append(f"- [{section.title}](benchmarks/{part}.md)")
    return write(docs / "benchmarks.md", [*lines, "", *machines.lines()])


def write(file: Path, lines: list[str]) -> Path:
    """Write the lines of a page; return its file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return file


def summary(sample: dict[str, Any], machines: Machines) -> list[str]:
    """Lay out the medians of a device's steps, a line for each case."""
    results = sample["results"].values()
    peers = sorted({way for each in results for way in each["ms"] if way.startswith("PyTorch")})
    rows = []
    for result in results:
        times = {way: statistics.median(values) for way, values in result["ms"].items()}
        best = [short(min(times[way] for way in peers if way in times))] if peers else []
        rows.append([result["title"], *(short(times[way]) for way in WAYS), *best])
    text = FIRST.format(device=sample["machine"]["device"], machine=f"machine {machines.name(sample)}")
    head = ["model", *WAYS.values(), *(["best of PyTorch"] if peers else [])]
    return [text, "", *table(head, rows)]


def device_lines(section: Section, sample: dict[str, Any], plots: Path, machines: Machines) -> list[str]:
    """Lay out what one device's sample holds; a paragraph that several results have is there once."""
    lines = [f"## {sample['machine']['device']}", "", *machines.measured_on(sample)]
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
