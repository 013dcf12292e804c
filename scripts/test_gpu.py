"""Run the tests that need an NVIDIA GPU, then those of the step and of programs with it; write counts and failures.

Numbers are compared, so TF32 is off. The package is taken as it is installed.

Usage: test_gpu.py [--part GPU|step|programs] [--page FILE] [--commit COMMIT] [pytest's options]

--part leaves the other parts' sections of the page as they are; --commit is of a copy that git does not know. Two GPUs
share the tests with `--dist load`, `--tx 14*popen//env:CUDA_VISIBLE_DEVICES=0` and the same for 1.
"""

from __future__ import annotations

import argparse
import collections
import os
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path

import mlx.core as mx

ROOT = Path(__file__).parents[1]
HEAD = """# Tests on a GPU

The last runs of `make test-gpu`, which writes this page: tests that need a GPU, and the step's that run on any device.
"""
NEED = (
    "step/test_replay.py",
    "step/test_replay_failures.py",
    "step/test_replay_held.py",
    "step/test_replay_memory.py",
    "step/test_replay_updates.py",
    "step/test_align.py",
    "engine/test_rewrites.py",
    "step/test_profile.py",
    "step/test_errors.py::test_cuda_s_compiler_refuses_a_kernel",
    "step/test_failures.py::test_a_step_without_memory_is_completed_when_there_is_some",
    "trainer/test_tune.py::test_mlx_reads_the_settings_of_cuda",
)
OTHERS = "calls changes clients collected invariants own_optimizers ragged sequences traces trees turns"
PROGRAMS = ("reach", *(f"step/test_{name}.py" for name in OTHERS.split()))
# Each a section of the page: what runs on a GPU alone, and what runs on the CPU as well.
PARTS = {
    "GPU": [f"tests/{test}" for test in NEED],
    "step": [
        "tests/step",
        *(f"--{'deselect' if '::' in test else 'ignore'}=tests/{test}" for test in (*NEED, *PROGRAMS)),
    ],
    "programs": [f"tests/{test}" for test in PROGRAMS],
}


def main() -> int:
    """Run the parts, and write the page; the result is pytest's."""
    parser = argparse.ArgumentParser(description="Run the tests that need an NVIDIA GPU, and those of the step.")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu_tests.md")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--part", choices=PARTS, default=None)
    args, options = parser.parse_known_args()
    commit = args.commit or git("rev-parse", "--short=12", "HEAD")
    codes = []
    for part in [args.part] if args.part else PARTS:
        code, text = section(part, options, commit)
        codes.append(code)
        sections = {**sections_of(args.page), part: text}
        page = [HEAD, *(f"## {part}\n\n{sections[part]}" for part in PARTS if part in sections)]
        args.page.write_text("\n".join(page), encoding="utf-8")
        print(f"wrote {args.page}: {part}")
    return max(codes)


def section(part: str, options: list[str], commit: str) -> tuple[int, str]:
    """Run a part, and return pytest's result and what the page says of it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = ["python", "-m", "pytest", *options, *PARTS[part]]
        start = time.monotonic()
        environment = os.environ | {"MLX_ENABLE_TF32": "0"}
        run = [sys.executable, *command[1:], f"--junitxml={report}"]
        code = subprocess.run(run, cwd=ROOT, env=environment, check=False).returncode
        seconds = time.monotonic() - start
        cases = ET.parse(report).getroot().iter("testcase") if report.exists() else ()
        counts, failures = outcomes(list(cases))
    facts = {
        "command": f"`MLX_ENABLE_TF32=0 {shlex.join(command)}`",
        "commit": commit,
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "device": device(),
        "MLX": metadata.version("mlx"),
        "tests": ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none ran",
        "seconds": f"{seconds:.0f}",
    }
    lines = ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in facts.items())]
    lines += ["", "Failed:", "", *(f"- `{name}`" for name in failures)] if failures else []
    return code, "\n".join(lines) + "\n"


def sections_of(page: Path) -> dict[str, str]:
    """Return the parts that a page has, by name."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    pairs = (section.split("\n\n", 1) for section in text.split("\n## ")[1:])
    return {part: text.rstrip("\n") + "\n" for part, text in pairs}


def outcomes(cases: list[ET.Element]) -> tuple[collections.Counter[str], list[str]]:
    """Return how many tests there are of each outcome, and the names of those that failed."""
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            failures.append(str(case.get("name")))
    return counts, failures


def device() -> str:
    """Return the name of MLX's device."""
    default = mx.default_device()
    return "CPU" if default.type == mx.cpu else str(mx.device_info().get("device_name", default))


def git(*arguments: str) -> str:
    """Return what git prints in the checkout; "unknown" where it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    sys.exit(main())
