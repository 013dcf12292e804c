"""Measure the Rust crate by ``cargo bench``: its step beside a hand-written mlx-rs loop, and the engine's own overhead.

The programs are in ``rust/faststep/benches``; criterion leaves plots in ``target/criterion/report/index.html``::

    python benches/rust.py                # all, some three minutes
    python benches/rust.py --cases gpt24
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from machine import ROOT
from samples import Sample, arguments

MODELS = ["mlp", "gpt24", "gpt4"]
OVERHEAD = "overhead"
PACKAGES = ("criterion", "mlx-rs")
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


class Measured(NamedTuple):
    """One of criterion's benchmarks: its group, the function or None, the parameter or None, seconds by sample."""

    group: str
    function: str | None
    parameter: str | None
    seconds: list[float]


def cargo_bench(program: str, *filters: str) -> None:
    """Run one of the benchmark programs.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    subprocess.run(["cargo", "bench", "--locked", "--bench", program, "--", *filters], cwd=ROOT, check=True)


def measured(group: str) -> Iterator[Measured]:
    """Yield what criterion has written about a group."""
    for file in (TARGET / "criterion").glob("*/*/new/benchmark.json"):
        benchmark = json.loads(file.read_text(encoding="utf-8"))
        if benchmark["group_id"] == group:
            sample = json.loads(file.with_name("sample.json").read_text(encoding="utf-8"))
            seconds = [1e-9 * time / count for time, count in zip(sample["times"], sample["iters"], strict=True)]
            yield Measured(group, benchmark["function_id"], benchmark["value_str"], seconds)


def models(names: list[str]) -> dict[str, Any]:
    """Measure the step of models; return milliseconds in turns, and alone."""
    cargo_bench("turns", *names)
    cargo_bench("step", "|".join(names))
    results: dict[str, Any] = json.loads((TARGET / "tmp" / "turns.json").read_text(encoding="utf-8"))
    for name, result in results.items():
        alone = {each.function: [1e3 * time for time in each.seconds] for each in measured(f"step {name}")}
        result["ms alone"] = {way: alone[way] for way in result["ms"]}
    return {name: results[name] for name in names}


def overhead() -> dict[str, Any]:
    """Measure a step whose forward pass costs nothing; return microseconds by the number of tensors."""
    cargo_bench(OVERHEAD)
    points = {int(each.parameter or 0): [1e6 * time for time in each.seconds] for each in measured(OVERHEAD)}
    return {"points": [{"tensors": tensors, "us": points[tensors]} for tensors in sorted(points)]}


def versions() -> dict[str, str]:
    """Return the versions of what Rust brings."""
    rustc = subprocess.run(["rustc", "--version"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    found = {package["name"]: package["version"] for package in metadata["packages"]}
    return {"rustc": rustc.split()[1], **{name: found[name] for name in PACKAGES}}


def main() -> None:
    """Measure the cases asked for."""
    parser = arguments("Measure the Rust crate.", [*MODELS, OVERHEAD])
    args = parser.parse_args()
    if args.device:
        parser.error("argument --device: the Rust programs compute on MLX's default device")
    sample = Sample("rust", args)
    sample.content["versions"] |= versions()
    cases = args.cases or [*MODELS, OVERHEAD]
    if named := [name for name in MODELS if name in cases]:
        for name, result in models(named).items():
            sample.add(name, result)
    if OVERHEAD in cases:
        sample.add(OVERHEAD, overhead())
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
