"""`faststep new`: a project that trains at once, whose tests pass, and that is written over nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from faststep.report import read_log
from support.commands import faststep

FILES = {".gitignore", "README.md", "config.yaml", "data.py", "loss.py", "model.py", "test_project.py", "train.py"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    faststep("new", tmp_path / "my project", cwd=tmp_path)
    return tmp_path / "my project"


def run(*command: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_it_trains_at_once(project: Path) -> None:
    assert {each.name for each in project.iterdir()} == FILES
    out = faststep("train", "config.yaml", cwd=project).stdout
    assert "ended: done" in out
    log = read_log(project / "runs" / "first")
    assert log.best is not None
    name, value, _ = log.best
    assert (name, value > 0.95) == ("accuracy", True)  # guessing gives a third
    assert not [each for each in log.events if each["level"] != "info"]


def test_the_loop_of_one_s_own_trains_too(project: Path) -> None:
    out = subprocess.run(
        [sys.executable, "train.py"], cwd=project, capture_output=True, text=True, timeout=300, check=True
    )
    assert float(out.stdout.split()[-1]) > 0.95


def test_its_tests_pass(project: Path) -> None:
    assert "3 passed" in run("pytest", "-q", "-W", "error", "-p", "no:cacheprovider", folder=project)
    assert {each.name for each in project.iterdir()} - {"__pycache__"} == FILES  # the tests' run is elsewhere


def test_it_is_code_as_ours(project: Path) -> None:
    run("ruff", "check", "--isolated", "--line-length", "120", "--select", "ANN,B,D,E,F,I,UP", "--ignore",
        "D103,D105,D107,D203,D213,D413", "--config", 'lint.isort.known-third-party=["faststep"]', ".",
        folder=project)  # fmt: skip
    run("ruff", "format", "--check", "--isolated", "--line-length", "120", ".", folder=project)


def test_what_it_says_is_what_to_do(tmp_path: Path) -> None:
    out = faststep("new", "a/b c", cwd=tmp_path).stdout
    assert out.splitlines()[1:] == ["    cd 'a/b c'", "    faststep train config.yaml", "    python -m pytest"]
    (tmp_path / "here" / ".git").mkdir(parents=True)
    assert "cd " not in faststep("new", ".", cwd=tmp_path / "here").stdout


def test_a_folder_that_is_not_empty_is_left_alone(project: Path, tmp_path: Path) -> None:
    (project / "model.py").write_text("mine")
    text = faststep("new", project, status=2).stderr
    assert text.splitlines() == [
        f"faststep: {project}: expected a new or empty folder, found .gitignore, README.md, config.yaml and 5 more "
        "in it"
    ]
    assert (project / "model.py").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    assert "found a file" in faststep("new", tmp_path / "file", status=2).stderr
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert "found a file" in faststep("new", tmp_path / "link", status=2).stderr


def test_a_place_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    text = faststep("new", tmp_path / "file" / "project", status=2).stderr
    assert text == f"faststep: {tmp_path}/file/project: it cannot be made: Not a directory\n"


def test_its_help_is_complete() -> None:
    text = " ".join(faststep("new", "--help").stdout.split())
    for part in ("DIR", "The folder, new or empty", "config, model, loss, data, a loop and a test", "left alone"):
        assert part in text
    assert "Write a project to start from" in faststep("--help").stdout
