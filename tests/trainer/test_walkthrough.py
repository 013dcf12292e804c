"""docs/walkthrough.md, docs/when_it_goes_wrong.md: their commands, as a user in an empty folder would type them."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faststep.checkpoints import Checkpoints
from faststep.report import read_log
from support.pages import Command, File, differences, parts
from support.places import ROOT, without_traces

PAGE, SESSIONS = ROOT / "docs" / "walkthrough.md", ROOT / "docs" / "when_it_goes_wrong.md"


def words_of(command: Command) -> list[str]:
    """The program of this environment for what is typed."""
    name, *rest = shlex.split(command.line)
    return [sys.executable, *(["-m", "faststep"] if name == "faststep" else []), *rest]


def run(command: Command, folder: Path) -> str:
    """Run a command to its end, by Ctrl-C where the page says so."""
    environment = {**without_traces(), "COLUMNS": "100", "PYTEST_ADDOPTS": ""}
    output: list[str] = []
    stop = command.stop
    with subprocess.Popen(
        words_of(command),
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if stop is not None and stop in line:
                process.send_signal(signal.SIGINT)
                stop = None  # a second one would not wait for the checkpoint
    assert process.returncode == command.status, "".join(output)[-3000:]
    return "".join(output)


def follow(page: Path, folder: Path) -> tuple[Path, list[list[str]]]:
    """Write the files and run the commands of a page; return its folder and the words that were typed."""
    typed = []
    for part in parts(page):
        if isinstance(part, File):
            (folder / part.name).write_text(part.text)
        elif part.line.startswith("cd "):
            folder = folder / part.line.split()[1]
        else:
            output = run(part, folder)
            assert not differences(part, output), (part.line, output[-3000:])
            typed.append(part.line.split()[:2])
    return folder, typed


@pytest.mark.slow
def test_the_page_is_what_happens(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    folder, typed = follow(PAGE, tmp_path)
    commands = {words[1] for words in typed if words[0] == "faststep"}
    assert commands >= {"new", "train", "resume", "eval", "compare", "report", "checkpoint"}
    wide, narrow = (read_log(folder / "runs" / name) for name in ("cnn", "narrow"))
    assert len(wide.resumes) == 1
    assert wide.best is not None
    assert narrow.best is not None
    assert wide.best[1] > 0.97  # the tenth part are right by guessing
    assert wide.best[1] > narrow.best[1]
    kept = {each.number: each.metric for each in Checkpoints(folder / "runs" / "cnn" / "checkpoints").list()}
    assert kept[wide.best[2]] == wide.best[1]
    assert "<svg" in (folder / "compare.html").read_text(encoding="utf-8")
    assert "<svg" in (folder / "runs" / "cnn" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_sessions_are_what_happens(tmp_path: Path) -> None:
    _, typed = follow(SESSIONS, tmp_path)
    assert {words[1] for words in typed} >= {"train", "resume", "verify-resume", "reproduce"}


def test_a_page_that_says_what_does_not_happen_is_found() -> None:
    command = Command("faststep eval runs/cnn", printed=["step 3: loss 0.1 over 2 batches", "...", "the end"])
    assert differences(command, "step 12: loss 1.25e-3 over 9 batches\nand more\nthe end\n") == []
    assert differences(command, "step 12: loss 1.25e-3 over 9 epochs\nthe end\n") == [command.printed[0], "the end"]
    assert differences(command, "the end\nstep 12: loss 1.2 over 9 batches\n") == ["the end"]
