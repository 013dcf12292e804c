"""A training that makes no progress: the report, the end of the process, and the supervisor that starts it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from faststep.report import read_log
from support.commands import checksums, faststep, set_, wait_for_line, write_config

SECONDS = 20 if mx.cuda.is_available() else 2  # in which a first step is over: CUDA's compiler takes some
HANGING = """
import pathlib, threading, time

import numpy as np

from faststep.training import Callback


class Blocks:
    '''Samples, of which one waits for a lock that nobody lets go of, once.'''

    def __init__(self, file, blocked, at=70):
        with np.load(file) as data:
            self.x, self.y = data["x"][:160], data["y"][:160]
        self.blocked, self.at = pathlib.Path(blocked), at

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == self.at and not self.blocked.exists():
            self.blocked.write_text("x")
            wait_for_a_lock()
        return self.x[index], self.y[index]


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


class Waits(Callback):
    def on_step(self, trainer, number):
        if number == 3:
            time.sleep(3600)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "hanging.py").write_text(HANGING)
    return write_config(tmp_path)


def hanging(tmp_path: Path, **more: object) -> list[str]:
    data = {"use": "hanging.py:Blocks", "file": str(tmp_path / "data.npz"), "blocked": str(tmp_path / "blocked")}
    return set_(data__train=data, train__hang_timeout=SECONDS, **more)


def test_a_hanging_dataset_is_reported_and_the_run_goes_on_waiting(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "faststep", "train", str(config), *hanging(tmp_path)]
    log = tmp_path / "run" / "log.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_for_line(process, log, '"what": "hang"')
        process.kill()
        said = process.stderr.read() if process.stderr is not None else ""
    (report,) = (tmp_path / "run").glob("hang-*.txt")
    text = report.read_text()
    assert text.startswith("no progress for ")
    assert "waiting for the next batch" in text
    assert "wait_for_a_lock" in text
    assert "wait_for_a_lock" not in said  # the summary only
    assert f"all stacks: {report}" in said
    event = next(each for each in read_log(tmp_path / "run").events if each["what"] == "hang")
    assert report.name in event["text"]


def test_a_hang_ends_the_process_and_the_supervisor_starts_it_again(config: Path, tmp_path: Path) -> None:
    done = faststep("train", config, *hanging(tmp_path, train__on_hang="exit"), status=5)
    assert "exit code 5" in done.stderr
    (tmp_path / "blocked").unlink()
    (first,) = (tmp_path / "run").glob("hang-*.txt")
    told = first.read_text()
    faststep("resume", tmp_path / "run", status=5)  # at the same step again: the first report stays
    (tmp_path / "blocked").unlink()
    assert first.read_text() == told
    assert first.with_stem(f"{first.stem}-2").is_file()
    supervised = tmp_path / "supervised"
    done = faststep("train", config, "--supervise", *hanging(tmp_path, run=str(supervised)))
    assert "it made no progress, and ended itself" in done.stderr
    whole = tmp_path / "whole"  # the file is there by now: nothing blocks
    faststep("train", config, *hanging(tmp_path, run=str(whole)))
    assert checksums(supervised) == checksums(whole)


def test_a_callback_that_hangs_is_named(config: Path, tmp_path: Path) -> None:
    waits = set_(callbacks=[{"use": "hanging.py:Waits"}], train__hang_timeout=SECONDS, train__on_hang="exit")
    faststep("train", config, *waits, status=5)
    text = next((tmp_path / "run").glob("hang-*.txt")).read_text()
    assert "in callbacks, loggers or the display" in text
    assert "time.sleep(3600)" in text


def test_a_watch_that_is_off_takes_no_action(config: Path, tmp_path: Path) -> None:
    faststep("train", config, *set_(train__hang_timeout=None))
    done = faststep(
        "train", config, *set_(run=str(tmp_path / "b"), train__hang_timeout=None, train__on_hang="exit"), status=2
    )
    assert "train.hang_timeout is null" in done.stderr
