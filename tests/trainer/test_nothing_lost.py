"""Refused commands leave every byte as it was and say why in one line; no file of the user's is written over."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from faststep.checkpoints import Checkpoints
from faststep.loggers._csv import COLUMNS
from faststep.report import read_log
from faststep.training._run_folder import locked
from support.commands import checksums, faststep, set_, wait_for_line, write_config

FASTSTEP = shlex.join([sys.executable, "-m", "faststep"])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    """All that is below a folder, but for the files that stand for locks."""
    files = [each for each in sorted(folder.rglob("*")) if each.is_file() and each.name != ".lock"]
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


def refused(*arguments: Any, message: str, folder: Path, **options: Any) -> None:
    """Run a command that has to be refused, and compare what is in the folder before and after."""
    before = contents(folder)
    done = faststep(*arguments, status=2, **options)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(folder) == before


def test_a_refused_change_leaves_the_run_as_it_was(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    faststep("train", config, *set_(train__steps=6))
    other = set_(model__sizes=[8, 16, 1])
    refused("resume", run, *other, message="found differences", folder=run)
    refused("resume", run, *other, "--supervise", message="found differences", folder=run)
    refused("resume", run, "--number", 3, message="there are: 5, 6", folder=run)
    refused("train", config, *other, message="faststep resume", folder=run)
    with locked(run):
        for name, line in {"log.jsonl": '{"kind": "st', "steps.csv": ",".join(COLUMNS) + "\n1,"}.items():
            with (run / name).open("a") as file:  # what the other process is about to write
                file.write(line)
        changed = set_(train__steps=9, logs__csv=True)
        for command in (["resume", run], ["resume", run, "--supervise"]):
            refused(*command, *changed, message=f"process {os.getpid()} trains in it", folder=run)
    begun = tmp_path / "begun"
    with locked(begun):
        (begun / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
        changed += set_(run=str(begun))
        refused("train", config, *changed, message=f"process {os.getpid()} trains in it", folder=begun)
    faststep("resume", run, *set_(train__steps=8))
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["steps"] == 8
    assert [each.number for each in Checkpoints(run / "checkpoints").list()][-1] == 8


def test_files_of_the_users_are_never_written_over(config: Path, tmp_path: Path) -> None:
    here = {"message": "a file of yours", "folder": tmp_path, "cwd": tmp_path}
    refused("train", "config.yaml", *set_(run="."), **here)
    refused("train", "config.yaml", *set_(run="."), "--supervise", **here)
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    (run / "log.jsonl").write_text("dear diary")
    refused("train", config, message="expected the log of a run or nothing", folder=tmp_path)
    (run / "log.jsonl").unlink()
    (run / "steps.csv").write_text("a,b\n1,2\n")
    refused("train", config, *set_(logs__csv=True), message="steps.csv:1: expected the columns", folder=tmp_path)
    refused("train", config, *set_(logs__wandb={}), message="pip install wandb", folder=tmp_path)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "thesis.txt").write_text("mine")
    refused("train", config, message="got 'thesis.txt' in it: choose another folder", folder=tmp_path)
    (run / "checkpoints" / "thesis.txt").unlink()
    faststep("train", config)
    (run / "report.html").write_text("my report")
    refused("report", run, message="expected a page of faststep", folder=tmp_path)
    refused("compare", run, run, "--out", run / "notes.txt", message="expected a page of faststep", folder=tmp_path)
    page = tmp_path / "compare.html"
    for _ in range(2):  # our own is replaced
        faststep("compare", run, run, "--out", page)
    assert (run / "notes.txt").read_text() == "mine"


def test_commands_that_read_change_nothing(config: Path, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    faststep("train", config)
    outside.mkdir()
    before = contents(run)
    commands: list[list[Any]] = [
        ["eval", run, "--best", *set_(data__batch_size=8, train__validation_batches=2)],
        ["predict", run, outside / "outputs.npz", "--number", 10],
        ["checkpoint", "list", run],
        ["checkpoint", "verify", run],
        ["checkpoint", "export", run, outside / "weights.safetensors", "--best"],
        ["compare", run, run, "--out", outside / "compare.html"],
    ]
    for command in commands:
        faststep(*command)
        assert contents(run) == before, command
    assert {each.name for each in outside.iterdir()} == {"outputs.npz", "weights.safetensors", "compare.html"}
    other = set_(model__sizes=[8, 16, 1])
    refused("eval", run, *other, message="found differences", folder=tmp_path)
    refused("predict", run, outside / "more.npz", *other, message="found differences", folder=tmp_path)
    for command in (commands[1], commands[4]):  # their files are there already
        refused(*command, message="there is such a file already", folder=tmp_path)
    refused("checkpoint", "export", tmp_path / "none", outside / "a", message="found none", folder=tmp_path)


def test_a_config_that_was_edited_by_hand_is_kept(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    faststep("train", config, *set_(train__steps=6))
    saved = run / "config.yaml"
    edited = saved.read_text().replace("steps: 6", "steps: 8  # more")
    saved.write_text(edited)
    faststep("resume", run)
    assert saved.read_text() == edited
    faststep("resume", run, *set_(train__steps=9))
    assert (run / "config.edited-1.yaml").read_text() == edited
    assert yaml.safe_load(saved.read_text())["train"]["steps"] == 9


def test_a_run_that_cannot_be_a_folder_is_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    refused("train", config, message="got a file", folder=tmp_path)
    refused("train", config, *set_(run=str(tmp_path / "run" / "inside")), message="got a file", folder=tmp_path)


def test_a_disk_that_is_full_or_read_only_is_told_of_at_the_start(config: Path, tmp_path: Path) -> None:
    """On file systems of their own, in a namespace of its own."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no user and mount namespaces here")
    run = set_(run=str(small / "run"), train__steps=3)
    large = shlex.join(["--set", "model.sizes=[8, 512, 512, 1]"])
    script = f"""
        mount -t tmpfs -o size=400k tmpfs {small}
        {FASTSTEP} train {config} {shlex.join(run)} {large}; echo "large $?"
        ls {small}/run; {FASTSTEP} train {config} {shlex.join(run)} > /dev/null; echo "small $?"
        mount -o remount,ro {small}
        {FASTSTEP} resume {small}/run --set train.steps=9; echo "read-only $?"
        grep steps: {small}/run/config.yaml
    """
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n") == ["large 2", "small 0", "read-only 2", "  steps: 3", ""], done.stderr
    assert "expected room for a checkpoint" in done.stderr
    assert "expected a folder that can be written to: Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


def test_going_back_sets_aside_what_is_behind(config: Path, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    faststep("train", config, *set_(train__validate_every=1000))
    faststep("train", config, *set_(run=str(whole), train__validate_every=1000, checkpoints__keep_last=9))
    faststep("resume", run, "--number", 15)
    assert checksums(run) == checksums(whole)
    aside = run / "checkpoints_set_aside" / "1"
    assert [each.number for each in Checkpoints(aside).list()] == [20]
    assert "step-00000020: as it was written" in faststep("checkpoint", "verify", aside).stdout
    assert list(read_log(run).steps["step"]) == list(range(1, 21))
    faststep("resume", run, "--best", *set_(train__steps=21))
    assert Checkpoints(run / "checkpoints").list()[-1].number == 21


FAULT = """
import ctypes, os, pathlib, time
from faststep.training import Callback


class Fault(Callback):
    '''Reads where there is no memory, once, as soon as the checkpoint before is written.'''

    def __init__(self, file: str):
        self.file = pathlib.Path(file)

    def on_step(self, trainer, number):
        if number == 12 and not self.file.exists():
            self.file.touch()
            trainer.checkpoints.wait()
            ctypes.string_at(0)
"""


def test_the_supervisor_passes_over_checkpoints_before_a_memory_fault(config: Path, tmp_path: Path) -> None:
    (tmp_path / "fault.py").write_text(FAULT)
    fault = {"use": "fault.py:Fault", "file": str(tmp_path / "died")}
    faststep("train", config, *set_(train__steps=4))
    run = tmp_path / "run"
    for each in Checkpoints(run / "checkpoints").list():  # as if it had been written long ago
        manifest = json.loads((each.path / "manifest.json").read_text())
        manifest["time"] -= 1000.0
        del manifest["sha256"]
        from faststep.checkpoints._manifest import manifest_text

        (each.path / "manifest.json").write_bytes(manifest_text(manifest))
    done = faststep("resume", run, "--supervise", *set_(callbacks=[fault], train__steps=20))
    assert "signal SIGSEGV; the newest checkpoint is of step 4" in done.stderr
    assert "are passed over" in done.stderr
    assert "Segmentation fault" in done.stderr  # where it was, by faulthandler
    assert "string_at" in done.stderr
    assert [each.number for each in Checkpoints(run / "checkpoints_set_aside" / "1").list()] == [5, 10]
    faststep("train", config, *set_(run=str(tmp_path / "whole")))
    assert checksums(run) == checksums(tmp_path / "whole")


def test_one_signal_to_the_supervisor_alone_is_enough(config: Path, tmp_path: Path) -> None:
    slow = set_(callbacks=[{"use": "mine.py:Slow"}], checkpoints__every=1000, train__validate_every=1000)
    command = [sys.executable, "-m", "faststep", "train", str(config), "--supervise", *slow]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for_line(process, tmp_path / "run" / "log.jsonl", '"kind": "step"')
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    (saved,) = Checkpoints(tmp_path / "run" / "checkpoints").list()
    assert saved.number == max(read_log(tmp_path / "run").steps["step"]) < 20


def test_the_supervisor_pauses_with_its_training(config: Path, tmp_path: Path) -> None:
    slow = set_(callbacks=[{"use": "mine.py:Slow"}], train__steps=60)
    command = [sys.executable, "-m", "faststep", "train", str(config), "--supervise", *slow]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    log = tmp_path / "run" / "log.jsonl"
    wait_for_line(process, log, '"kind": "step"')
    process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    time.sleep(0.3)  # what was under way
    size = log.stat().st_size
    time.sleep(0.5)
    assert log.stat().st_size == size
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0


def test_every_validated_checkpoint_carries_its_metric(config: Path, tmp_path: Path) -> None:
    """A learning rate that is far too high, so that the loss goes up and down."""
    keys = set_(optimizer__learning_rate=0.05, train__steps=16, train__validate_every=2, checkpoints__every=1)
    faststep("train", config, *keys, *set_(checkpoints__keep_last=2, checkpoints__keep_best=3))
    losses = read_log(tmp_path / "run").validations
    by_step = dict(zip(losses["step"], losses["loss"], strict=True))
    found = {each.number: each.metric for each in Checkpoints(tmp_path / "run" / "checkpoints").list()}
    best = sorted(by_step, key=lambda step: by_step[step])[:3]
    assert set(found) == {15, 16, *best}
    assert found == {number: by_step.get(number) for number in found}
    so_far = [step for step in best if by_step[step] > min(loss for other, loss in by_step.items() if other <= step)]
    assert so_far, "none was kept that was not the best so far"


HUNG = """
import pathlib, threading, numpy as np


class Rows:
    '''Rows of which one never comes.'''

    def __len__(self):
        return 160

    def __getitem__(self, index):
        if index == 90:
            pathlib.Path("hangs").write_text("now")
            threading.Event().wait()
        x = np.full(8, index / 160, np.float32)
        return x, x[:1]
"""


def test_a_signal_ends_a_training_whose_worker_hangs(config: Path, tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text(HUNG)
    hung = set_(data__train={"use": "hung.py:Rows"}, data__shuffle=False, data__workers=2, checkpoints__every=100)
    process = subprocess.Popen([sys.executable, "-m", "faststep", "train", str(config), *hung], cwd=tmp_path)
    wait_for_line(process, tmp_path / "hangs", "now")
    time.sleep(1)  # until the sixth batch is waited for
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    (saved,) = Checkpoints(tmp_path / "run" / "checkpoints").list()
    assert 0 <= saved.number <= 5


DRAWS = """
import numpy as np, random


class Rows:
    def __init__(self, own: bool = False):
        self.own, self.epoch = own, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 160

    def __getitem__(self, index):
        if self.own:
            x = np.random.default_rng([7, self.epoch, index]).standard_normal(8, dtype=np.float32)
        else:
            x = (np.random.standard_normal(8) + random.random()).astype(np.float32)
        return x, x[:1]
"""


@pytest.mark.slow
def test_data_that_draw_random_numbers_resume_exactly_or_are_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    ours, own = {"use": "draws.py:Rows"}, {"use": "draws.py:Rows", "own": True}
    prove = ["verify-resume", config, "--kills", 2, "--steps", 40, *set_(callbacks=[{"use": "mine.py:Slow"}])]
    assert "proved" in faststep(*prove, *set_(data__train=ours)).stdout
    assert "proved" in faststep(*prove, *set_(data__train=own, data__workers=2)).stdout
    done = faststep("train", config, *set_(data__train=ours, data__workers=2), status=1)
    assert "draws from random and numpy.random" in done.stderr
    assert "or make batches without threads: workers=0" in done.stderr
