"""The command line, as processes: what it prints, what it writes, how it ends, and what survives a kill."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import yaml
from faststep.checkpoints import Checkpoints
from faststep.cli._saved import save
from faststep.cli._verify import _next_batch
from faststep.config import build, load
from faststep.recipes import MLP
from faststep.report import read_log
from support.commands import checksums, faststep, set_, wait_for_line, write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def test_from_training_to_exported_weights(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = faststep("train", config)
    assert "ended: done" in done.stdout
    log = read_log(run)
    assert log.starts[0]["command"] == f"faststep train {config}"
    assert list(log.steps["step"]) == list(range(1, 21))
    assert log.steps["loss"][-1] < log.steps["loss"][0]
    assert {each.name for each in run.iterdir()} >= {"config.yaml", "log.jsonl", "checkpoints"}

    listed = faststep("checkpoint", "list", run).stdout.splitlines()
    assert [line.split(":")[0] for line in listed][-1] == "step-00000020"
    assert "val/loss" in listed[-1]
    assert faststep("checkpoint", "verify", run).stdout.count("as it was written") == len(listed)

    weights = tmp_path / "weights.safetensors"
    faststep("checkpoint", "export", run, weights)
    model = MLP([8, 32, 1])
    model.load_weights(str(weights))
    model.eval()
    data = np.load(tmp_path / "data.npz")
    loss = mx.square(model(mx.array(data["x"][160:])) - mx.array(data["y"][160:])).mean().item()
    assert f"step 20: loss {loss:.6f}"[:-2] in faststep("eval", run).stdout
    faststep("checkpoint", "export", run, weights, status=2)

    page = Path(faststep("report", run).stdout.strip())
    assert "<svg" in page.read_text(encoding="utf-8")
    faststep("train", config, *set_(run=str(tmp_path / "other"), optimizer__learning_rate=0.001))
    page = tmp_path / "compare.html"
    lines = faststep("compare", run, tmp_path / "other", "--out", page).stdout.splitlines()
    assert "learning_rate" in page.read_text(encoding="utf-8")
    assert [line.split()[0] for line in lines] == ["run", "run", "other", str(page)]


def test_a_comparison_fits_into_the_terminal(config: Path, tmp_path: Path) -> None:
    """The middle of long names is left out, their end tells most; then the last columns."""
    runs = [tmp_path / f"{'a name that says what it is about' * 3} {number}" for number in (1, 2)]
    for run in runs:
        faststep("train", config, *set_(run=str(run), train__steps=4))
    for columns in (60, 80, 100):
        environment = {**os.environ, "COLUMNS": str(columns)}
        done = faststep("compare", *runs, env=environment, cwd=tmp_path)
        lines = done.stdout.splitlines()[:3]
        assert max(map(len, lines)) <= columns
        assert [line[:3] for line in lines] == ["run", "a n", "a n"]
        assert all(f" {number} " in line and "..." in line for number, line in enumerate(lines[1:], 1))
        assert "last loss" in lines[0]


def test_it_goes_on_where_it_was_and_further(config: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    faststep("train", config, *set_(run=str(whole)))
    faststep("train", config, *set_(train__steps=12))
    assert "faststep resume" in faststep("train", config, status=2).stderr
    faststep("resume", run, *set_(train__steps=20), cwd=tmp_path)
    assert checksums(run) == checksums(whole)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_before_it_ends(config: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    slow = set_(callbacks=[{"use": "mine.py:Slow"}], checkpoints__every=1000, train__validate_every=1000)
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "faststep", "train", str(config), *slow], stdout=subprocess.DEVNULL
    )
    wait_for_line(process, run / "log.jsonl", '"kind": "step"')
    process.send_signal(number)
    assert process.wait(60) == status
    reached = max(read_log(run).steps["step"])
    (saved,) = Checkpoints(run / "checkpoints").list()
    assert saved.number == reached
    faststep("resume", run, *set_(callbacks=[]))
    whole = tmp_path / "whole"
    faststep("train", config, *set_(run=str(whole)))
    assert checksums(run) == checksums(whole)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_wait_for_data_that_hang(
    config: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Without workers, in the middle of the user's code; no batch is lost."""
    run, hanging = tmp_path / "run", tmp_path / "hanging"
    data = set_(data__train={"use": "mine.py:Hanging", "file": str(tmp_path / "data.npz"), "until": str(hanging)})
    command = [sys.executable, "-m", "faststep", "train", str(config), *data, *set_(checkpoints__every=1000)]
    hanging.touch()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_for_line(process, hanging, "reached")
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == status
    assert f"{number.name}: waiting for data for " in out
    assert "left in the middle of a batch, which a resume takes again" in out.replace("\n    ", " ")
    hanging.unlink()
    faststep("resume", run)
    whole = tmp_path / "whole"
    faststep("train", config, *data, *set_(run=str(whole)))
    assert checksums(run) == checksums(whole)


def test_what_a_signal_waits_for_is_told_and_a_second_one_does_not(config: Path, tmp_path: Path) -> None:
    """Validation is not left in the middle: what it would have found belongs to the run."""
    hanging = tmp_path / "hanging"
    hanging.touch()
    data = {"use": "mine.py:Hanging", "file": str(tmp_path / "data.npz"), "until": str(hanging)}
    command = [sys.executable, "-m", "faststep", "train", str(config), *set_(data__validation=data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_for_line(process, hanging, "reached")
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        line = next(each for each in lines if "SIGTERM: validating for " in each)
        assert line.endswith("; a second signal does not wait for it\n")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    hanging.unlink()
    faststep("resume", tmp_path / "run")
    whole = tmp_path / "whole"
    faststep("train", config, *set_(data__validation=data, run=str(whole)))
    assert checksums(tmp_path / "run") == checksums(whole)


def test_killed_again_and_again_it_ends_as_if_nothing_had_happened(config: Path, tmp_path: Path) -> None:
    parts = ["--kills", 4, "--steps", 200, "--seed", random.randrange(1000), "--keep", tmp_path / "runs"]
    done = faststep("verify-resume", config, *set_(step__accumulate=3, step__ema_decay=0.9), *parts)
    assert "proved" in done.stdout
    assert checksums(tmp_path / "runs" / "whole") == checksums(tmp_path / "runs" / "killed")
    assert (tmp_path / "runs" / "killed" / "log.jsonl").read_text().count('"kind": "start"') > 1


def test_a_resume_that_is_none_is_found(config: Path, tmp_path: Path) -> None:
    """A dataset that changes from process to process cannot give the same training."""
    (tmp_path / "other.py").write_text(
        "import os, numpy as np\n"
        "def rows():\n"
        "    rng = np.random.default_rng(os.getpid())\n"
        "    return rng.standard_normal((160, 8), dtype=np.float32), np.ones((160, 1), np.float32)\n"
    )
    change = set_(data__train={"use": "other.py:rows"})
    done = faststep("verify-resume", config, *change, "--kills", 1, "--steps", 20, status=3)
    assert "DIFFER model.safetensors" in done.stdout


def test_the_supervisor_starts_it_again(config: Path, tmp_path: Path) -> None:
    killer = {"use": "mine.py:KillOnce", "at": 12, "file": str(tmp_path / "deaths")}
    done = faststep("train", config, "--supervise", *set_(callbacks=[killer]))
    assert "signal SIGKILL" in done.stderr
    whole = tmp_path / "whole"
    faststep("train", config, *set_(run=str(whole)))
    assert checksums(tmp_path / "run") == checksums(whole)


def test_a_logger_of_the_users_gets_every_record(config: Path, tmp_path: Path) -> None:
    lines = tmp_path / "mine.txt"
    faststep("train", config, *set_(loggers=[{"use": "mine.py:Lines", "file": str(lines)}]))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert lines.read_text().split() == [*kinds, "closed"]
    config_of_run = tmp_path / "run" / "config.yaml"
    assert yaml.safe_load(config_of_run.read_text())["loggers"] == [{"use": "mine.py:Lines", "file": str(lines)}]


def test_the_supervisor_gives_up(config: Path, tmp_path: Path) -> None:
    killer = {"use": "mine.py:KillOnce", "at": 3, "file": str(tmp_path / "deaths"), "times": 100}
    done = faststep("train", config, "--supervise", *set_(callbacks=[killer]), status=4)
    assert "giving up: 3 deaths in a row without a new checkpoint" in done.stderr
    assert (tmp_path / "deaths").read_text() == "xxx"


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Make a control group with 300 MB of memory (Linux, as root)."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (second, "memory.max")
    group = parent / f"faststep-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(300 << 20))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield group
    group.rmdir()


def half_the_batch(config: Path, tmp_path: Path, callback: dict[str, Any]) -> str:
    done = faststep("train", config, "--supervise", *set_(callbacks=[callback]))
    assert "data.batch_size=8 and step.accumulate=2" in done.stderr
    log = read_log(tmp_path / "run")
    assert list(log.steps["step"]) == list(range(1, 21))
    batches = list(
        log.steps["batches"]
    )  # the first ones by one batch each, if a checkpoint of them was written in time
    assert batches == [1] * batches.count(1) + [2] * batches.count(2)
    assert batches.count(2) >= 15
    assert set(log.steps["samples"]) == {16}
    return done.stderr


def test_the_supervisor_halves_the_batch_when_the_kernel_kills_for_memory(
    config: Path, tmp_path: Path, small_group: Path
) -> None:
    said = half_the_batch(config, tmp_path, {"use": "mine.py:Starve", "group": str(small_group)})
    assert "signal SIGKILL (the kernel's count of processes killed for memory has grown)" in said


def test_the_supervisor_halves_the_batch_when_an_allocator_says_so(config: Path, tmp_path: Path) -> None:
    assert "it said: " in half_the_batch(config, tmp_path, {"use": "mine.py:Refused"})


def test_a_bad_batch_can_be_run_again(config: Path, tmp_path: Path) -> None:
    data = dict(np.load(tmp_path / "data.npz"))
    data["y"][:160] = np.nan
    np.savez(tmp_path / "bad.npz", **data)
    change = set_(data__train={"use": "arrays", "file": "bad.npz", "stop": 160})
    done = faststep("train", config, *change, status=1)
    assert "10 bad batches in a row" in done.stderr
    (bundle,) = (tmp_path / "run" / "bundles").iterdir()
    shown = faststep("reproduce", bundle).stdout
    assert "loss nan" in shown
    assert "elements are not finite" in shown
    assert "expected the description of a bundle" in faststep("reproduce", tmp_path, status=2).stderr


def test_the_users_error_keeps_its_traceback(config: Path) -> None:
    done = faststep("train", config, *set_(loss={"use": "mine.py:broken"}), status=1)
    assert "no_such_thing" in done.stderr
    assert "mine.py" in done.stderr
    assert re.search(r"faststep: .*: loss, at step 0 \(epoch 1, batch 0\): ", done.stderr)
    done = faststep("train", config, *set_(loss={"use": "mine.py:not_made"}), status=2)
    assert re.search(r"faststep: .*: loss: ZeroDivisionError: division by zero", done.stderr)
    assert done.stderr.startswith('Traceback (most recent call last):\n  File "')
    assert "faststep/config" not in done.stderr


def test_a_warning_of_the_step_is_printed_without_its_place(config: Path) -> None:
    done = faststep("train", config, *set_(loss={"use": "mine.py:without_gradient"}, train__steps=20))
    assert re.search(r"^faststep: the loss of the first 16 steps does not depend on model\.", done.stderr, re.MULTILINE)
    assert "RuntimeWarning" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "{tmp}/none.yaml"], "none.yaml"),
        (["train", "{config}", "--set", "train.stepz=3"], "did you mean 'steps'"),
        (["resume", "{tmp}/none"], "expected the folder of a run"),
        (["report", "{tmp}"], "log.jsonl"),
        (["checkpoint", "list", "{tmp}/none"], "expected the folder of a run"),
        (["checkpoint", "export", "{tmp}", "{tmp}/out"], "expected checkpoints in it"),
        (["compare", "{tmp}"], "two runs or more"),
        (["tune", "nothing"], "target"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(config: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = faststep(*(each.format(tmp=tmp_path, config=config) for each in arguments), status=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_the_whole_config_loads_again(config: Path, tmp_path: Path) -> None:
    shown = faststep("train", config, "--print-config").stdout
    (tmp_path / "again.yaml").write_text(shown)
    assert faststep("train", tmp_path / "again.yaml", "--print-config").stdout == shown
    assert not (tmp_path / "run").exists()


def test_a_config_is_tried_out(config: Path, tmp_path: Path) -> None:
    shown = faststep("train", config, "--fast-dev-run").stdout
    assert "ended: done" in shown
    assert "Nothing is kept" in shown
    assert not (tmp_path / "run").exists()
    faststep("train", config, *set_(run=str(tmp_path / "run-{n}"), train__overfit_one_batch=True))
    assert read_log(tmp_path / "run-1").steps["step"][-1] == 20


def test_tune_takes_a_config(config: Path) -> None:
    done = faststep(
        "tune",
        config,
        "--env",
        "MLX_MAX_OPS_PER_BUFFER=50",
        "--set",
        "data.batch_size=4",
        "--seconds",
        0.05,
        "--rounds",
        3,
        cwd=config.parent,
    )
    assert "MLX_MAX_OPS_PER_BUFFER=50" in done.stdout


def test_help_and_version() -> None:
    shown = faststep("--help").stdout
    for command in ("train", "resume", "eval", "report", "compare", "verify-resume", "reproduce", "checkpoint", "tune"):
        assert command in shown
        faststep(command, "--help")
    assert "..." not in shown.partition("Commands:")[2]
    assert f"mlx {mx.__version__}" in faststep("version").stdout
    assert faststep("--version").stdout == faststep("version").stdout


def test_a_full_disk_loses_nothing(config: Path, tmp_path: Path) -> None:
    """On a small filesystem of its own, in a namespace of its own."""
    small = tmp_path / "small"
    small.mkdir()
    probe = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(small)], capture_output=True)
    if probe.returncode:
        pytest.skip("no user and mount namespaces here")
    sizes = set_(run=str(small / "run"), model__sizes=[8, 64, 64, 1], train__steps=400)
    command = shlex.join([sys.executable, "-m", "faststep"])
    script = (
        f"mount -t tmpfs -o size=400k tmpfs {small}; {command} train {config} {shlex.join(sizes)}; status=$?; "
        f"{command} checkpoint verify {small}/run; exit $status"
    )
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]  # something was changed
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    told = re.search(r"checkpoint:[^:]*?(step-\d+)", re.sub(r"\s", "", done.stdout))  # a long path has line breaks
    assert told is not None, done.stdout[-2000:]
    assert f"{told[1]}: as it was written" in done.stdout
    assert "damaged" not in done.stdout
    assert "as it was written" in done.stdout


def test_profile_shows_stages_and_operations_and_saves_nothing(config: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    trace = tmp_path / "trace.json"
    done = faststep("profile", config, "--steps", 5, "--trace", trace)
    assert "5 steps in " in done.stdout
    assert "waiting for the next batch" in done.stdout
    assert "operations of one step, each alone" in done.stdout
    assert sorted(tmp_path.iterdir()) == sorted([*before, trace])
    done = faststep("profile", config, "--trace", trace, status=2)
    assert "there is such a file already" in done.stderr


def test_a_run_that_is_killed_in_its_last_validation_validates_after_all(config: Path, tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(
        "import os, pathlib, signal\n"
        "from faststep.training import Callback\n"
        "class KillInValidation(Callback):\n"
        "    def on_validation(self, trainer, loss, best):\n"
        "        file = pathlib.Path(__file__).with_name('killed')\n"
        "        if not file.exists():\n"
        "            file.write_text('x')\n"
        "            trainer.checkpoints.wait()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    change = set_(callbacks=[{"use": "killer.py:KillInValidation"}], train__validate_every=0)
    faststep("train", config, *change, status=-signal.SIGKILL)
    faststep("resume", tmp_path / "run")
    (newest,) = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1:]
    assert json.loads((newest / "training.json").read_text())["numbers"]["best"] is not None


STREAM = """
import numpy as np


class Documents:
    '''Documents of many lengths, without an end, that know where they are.'''

    def __init__(self):
        self.number = 0

    @property
    def state(self):
        return self.number

    def load_state(self, state):
        self.number = state

    def __iter__(self):
        while True:
            number, self.number = self.number, self.number + 1
            yield np.arange(2 + number * 7 % 13, dtype=np.int32)
"""


def test_places_in_a_stream_are_compared_by_what_comes_next(tmp_path: Path) -> None:
    """The same place of a packed stream is written otherwise behind a resume."""
    (tmp_path / "stream.py").write_text(STREAM)
    config = {
        "run": str(tmp_path / "run"),
        "model": {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16},
        "loss": {"use": "next_token"},
        "data": {
            "train": {"use": "stream.py:Documents"},
            "batch_size": 2,
            "collate": {"use": "pack", "length": 16, "window": 4},
        },
        "optimizer": {"use": "SGD", "learning_rate": 0.1},
        "train": {"steps": 40},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    loaded = load(tmp_path / "c.yaml")
    save(loaded)

    def after(batches: int, place: Any = None) -> Any:
        loader = build(loaded).loader
        if place is not None:
            loader.load_state(place)
        for _ in zip(range(batches), loader, strict=False):
            pass
        return loader.state

    whole, stopped = after(5), after(1, after(4))
    assert whole != stopped
    assert whole["position"] == stopped["position"] == 5
    assert _next_batch(tmp_path / "run", whole) == _next_batch(tmp_path / "run", stopped)
    assert _next_batch(tmp_path / "run", whole) != _next_batch(tmp_path / "run", after(6))
