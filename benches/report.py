"""The report: docs/benchmarks.md out of the samples, nothing by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from ways import BOUND, FAST, WAYS

HEAD = """# Benchmarks

Written by `make bench` from the samples in `benches/samples`; not by hand.

All ways take their turns in one process, in rotating order, on the same batches from the same weights: AdamW, gradients
clipped to norm 1.0, parameters, optimizer state and random state evaluated. Times are milliseconds a step: the median,
and in brackets the quartiles over the rounds. A ratio is a way's time over `fast_step`'s in the same round: above 1,
`fast_step` is faster. Peak memory is MLX's own (`mx.get_peak_memory`), each way alone in a process.
"""


def write_report(samples: Path, file: Path) -> None:
    """Write the report of all samples, the newest first.

    Raises:
        SystemExit: There is no sample.
    """
    found = sorted(samples.glob("*.json"), reverse=True)
    if not found:
        raise SystemExit(f"no samples in {samples}: run benches/step.py first")
    sections = [section(json.loads(sample.read_text(encoding="utf-8"))) for sample in found]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([HEAD, *sections]), encoding="utf-8")


def section(sample: dict[str, Any]) -> str:
    """Lay out one sample."""
    lines = [f"## {sample['date']}, commit {sample['commit']}", ""]
    lines += [f"- {', '.join(f'{name}: {value}' for name, value in sample['machine'].items())}"]
    lines += [f"- {', '.join(f'{name} {value}' for name, value in sample['versions'].items())}"]
    lines += ["", *matmul(sample["matmul"]), ""]
    for case in sample["cases"].values():
        lines += [f"### {case['title']}", "", *table(case), ""]
        lines += [notes(case), ""]
    return "\n".join(lines)


def matmul(by_setting: dict[str, dict[str, float]]) -> list[str]:
    """Lay out what our BLAS does for a matmul."""
    ours, theirs = by_setting["1"], by_setting["0"]
    return [
        "| 1024 x 1024 float32 matmul | ms | largest error, relative |",
        "|---|---:|---:|",
        f"| with `faststep` imported | {ours['ms']:.1f} | {ours['error']:.1e} |",
        f"| with `FASTSTEP_BLAS=0` | {theirs['ms']:.1f} ({theirs['ms'] / ours['ms']:.1f}x) | {theirs['error']:.1e} |",
    ]


def table(case: dict[str, Any]) -> list[str]:
    """Lay out time, ratio and memory of each way."""
    lines = ["| way | ms a step | time over fast_step's | peak memory, MB |", "|---|---:|---:|---:|"]
    for way in WAYS:
        ratios = [a / b for a, b in zip(case["ms"][way], case["ms"][FAST], strict=True)]
        ratio = "" if way == FAST else spread(ratios)
        memory = case["memory"][way]["peak"] / 1e6
        lines.append(f"| {way} | {spread(case['ms'][way])} | {ratio} | {memory:.1f} |")
    return lines


def notes(case: dict[str, Any]) -> str:
    """Say what the table's numbers rest on."""
    return (
        f"Rounds: {len(case['ms'][FAST])}, steps of each way in a round: {case['steps in a block']}; parameters "
        f"{case['memory'][FAST]['parameters'] / 1e6:.2f} MB; largest difference between the losses of the first steps "
        f"{case['largest loss difference']:.1e} ({BOUND}: compiled gradients, no update)."
    )


def spread(values: list[float]) -> str:
    """Format the median with the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"
