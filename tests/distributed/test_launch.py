"""`faststep launch`: signals end all ranks with one checkpoint, and ranks that die are started again together."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml
from support.commands import checksums, faststep, set_, wait_for_line, write_config
from support.ring import ended, free_ports, start

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not mx.distributed.is_available("ring"), reason="this MLX has no ring of processes"
)
CALLBACKS = """
import os, pathlib, signal, time

from faststep.training import Callback


class Killed(Callback):
    '''Kills the last of so many ranks at a step, so many times.'''

    def __init__(self, at: int, file: str, times: int = 1):
        self.at, self.file, self.times = at, pathlib.Path(file), times

    def on_step(self, trainer, number):
        last = trainer.ranks.rank == trainer.ranks.size - 1 > 0
        deaths = self.file.read_text() if self.file.exists() else ""
        if last and number == self.at and len(deaths) < self.times:
            self.file.write_text(deaths + "x")
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(Callback):
    def on_step(self, trainer, number):
        time.sleep(0.05)


class Fails(Callback):
    def on_step(self, trainer, number):
        if number == 3 and trainer.ranks.rank == 1:
            raise OSError("the disk is full")
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = write_config(tmp_path)
    (tmp_path / "ranks.py").write_text(CALLBACKS)
    values = yaml.safe_load(file.read_text())
    values["data"]["batch_size"] = 8
    file.write_text(yaml.safe_dump(values))
    return file


def launch(*arguments: Any, status: int = 0) -> str:
    return faststep("launch", "-n", 2, "-p", free_ports(2), *arguments, status=status).stderr


def callback(name: str, **arguments: Any) -> list[str]:
    return set_(callbacks=[{"use": f"ranks.py:{name}", **arguments}])


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_all_ranks_with_one_checkpoint(number: int, config: Path, tmp_path: Path) -> None:
    """And the same command with the run goes on."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "faststep", "launch", "-n", "2", "-p", str(free_ports(2)), str(config)]
    process = subprocess.Popen(
        [*command, *callback("Slow"), *set_(train__log_every=1, checkpoints__every=0)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for_line(process, run / "log.jsonl", '"step": 4')
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    (end,) = records(run, "end")
    assert end["reason"] == "signal"
    assert 4 <= end["step"] < 20
    (checkpoint,) = records(run, "checkpoint")
    assert Path(checkpoint["path"]).name == f"step-{end['step']:08}"
    launch(run)
    assert records(run, "end")[-1]["step"] == 20


def test_all_ranks_are_started_again(config: Path, tmp_path: Path) -> None:
    """A killed rank: all start from the newest checkpoint, and end with the same bits."""
    said = launch(config, "--supervise", *callback("Killed", at=12, file=str(tmp_path / "deaths")))
    assert "the training died" in said
    assert "rank 1, signal SIGKILL; the newest checkpoint is of step 10" in said
    launch(config, *set_(run=str(tmp_path / "whole")))
    assert checksums(tmp_path / "run") == checksums(tmp_path / "whole")


def test_fewer_go_on(config: Path, tmp_path: Path) -> None:
    """A rank that dies twice: half of the ranks go on, with twice as many batches a step."""
    killer = callback("Killed", at=7, file=str(tmp_path / "deaths"), times=9)
    said = launch(config, "--supervise", "--fewer", *killer)
    assert "going on with 1 rank and step.accumulate=2" in said
    assert (tmp_path / "deaths").read_text() == "xx"
    assert [each["ranks"] for each in records(tmp_path / "run", "start") if "ranks" in each] == [2, 2]
    steps = records(tmp_path / "run", "step")
    assert {each["samples"] for each in steps} == {16}
    assert steps[-1]["step"] == 20


def test_an_error_of_one_rank_is_no_reason_to_start_again(config: Path) -> None:
    said = launch(config, "--supervise", *callback("Fails"), status=1)
    assert "OSError: the disk is full" in said
    assert "rank 1 failed" in said
    assert "restarting" not in said


def test_what_cannot_be_is_refused(config: Path) -> None:
    assert "got 'mpi'" in launch(config, "--backend", "mpi", status=2)
    assert "expected --supervise" in launch(config, "--fewer", status=2)


def test_it_is_proved_that_ranks_resume(config: Path) -> None:
    options: list[Any] = ["--ranks", 2, "-p", free_ports(2), "--kills", 1, "--steps", 20]
    done = faststep("verify-resume", config, *options, *callback("Slow"))
    assert "proved: killed 1 times and resumed" in done.stdout
    assert "same   random states" in done.stdout


def test_a_check_compares_the_ranks(config: Path, tmp_path: Path) -> None:
    """Whose configs are files on their hosts: another one on one rank is told."""
    done = faststep("launch", "-n", 2, "-p", free_ports(2), "--check", config)
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *("ranks", "python", "mlx", "mlx-faststep", "device", "config", "update", "all-reduce")
    ]
    assert all(line.endswith("the same on all") for line in lines[1:6]), lines
    assert not (tmp_path / "run").exists()
    other = tmp_path / "own-$MLX_RANK.yaml"
    for rank in range(2):
        text = config.read_text().replace("0.01", f"0.0{1 + rank}")
        (tmp_path / f"own-{rank}.yaml").write_text(text)
    command = [sys.executable, "-m", "faststep", "check-ranks", str(other)]
    children = start(2, tmp_path, "-c", f"exec {' '.join(command)}", program="/bin/bash")
    said = ended(children)
    assert [child.returncode for child in children] == [3, 0], said
    assert "DIFFERENT rank 1" in next(line for line in said[0].splitlines() if line.startswith("config"))
