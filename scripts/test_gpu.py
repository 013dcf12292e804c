"""Run the tests that need an NVIDIA GPU, and write docs/gpu_tests.md: command, commit, device, counts and failures.

Numbers are compared, so TF32 is off. The package is taken as it is installed.

Usage: test_gpu.py [--page FILE] [--commit COMMIT] [pytest's options]     --commit: of a copy that git does not know
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
TESTS = (
    "step/test_replay.py",
    "step/test_replay_failures.py",
    "step/test_replay_held.py",
    "step/test_replay_memory.py",
    "step/test_align.py",
    "engine/test_rewrites.py",
    "step/test_profile.py",
    "step/test_errors.py::test_cuda_s_compiler_refuses_a_kernel",
    "step/test_failures.py::test_a_step_without_memory_is_completed_when_there_is_some",
    "trainer/test_tune.py::test_mlx_reads_the_settings_of_cuda",
)


def main() -> int:
    """Run, and write the page; the result is pytest's."""
    parser = argparse.ArgumentParser(description="Run the tests that need an NVIDIA GPU.")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu_tests.md")
    parser.add_argument("--commit", default=None)
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = ["python", "-m", "pytest", *options, *(f"tests/{test}" for test in TESTS)]
        start = time.monotonic()
        environment = os.environ | {"MLX_ENABLE_TF32": "0"}
        run = [sys.executable, *command[1:], f"--junitxml={report}"]
        code = subprocess.run(run, cwd=ROOT, env=environment, check=False).returncode
        seconds = time.monotonic() - start
        cases = ET.parse(report).getroot().iter("testcase") if report.exists() else ()
        counts, failures = outcomes(list(cases))
    facts = {
        "command": f"`MLX_ENABLE_TF32=0 {shlex.join(command)}`",
        "commit": args.commit or git("rev-parse", "--short=12", "HEAD"),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "device": device(),
        "MLX": metadata.version("mlx"),
        "tests": ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none ran",
        "seconds": f"{seconds:.0f}",
    }
    lines = [
        "# Tests on a GPU",
        "",
        "The last run of `make test-gpu`, which writes this page.",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {name} | {text} |" for name, text in facts.items()]
    lines += ["", "Failed:", "", *(f"- `{name}`" for name in failures)] if failures else []
    args.page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {args.page}")
    return code


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
