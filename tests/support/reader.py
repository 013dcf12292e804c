"""The commands of a page of the documentation, run as its reader would: in a copy of the examples."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from support.places import ROOT, without_traces


def commands(page: str) -> list[str]:
    """Return the lines behind `$` in a page's console blocks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line[2:].split("  #")[0].strip() for block in blocks for line in block.splitlines() if line[:2] == "$ "]


def copy_examples(folder: Path) -> None:
    """Put the examples into a folder, as in a clone."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))


def run(command: str, folder: Path, *more: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command of `faststep` or `python` in a folder, with more arguments."""
    program, *arguments = shlex.split(command)
    front = {"faststep": [sys.executable, "-m", "faststep"], "python": [sys.executable]}[program]
    done = subprocess.run(
        [*front, *arguments, *more], cwd=folder, env=without_traces(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, (command, done.stdout[-2000:], done.stderr[-3000:])
    return done
