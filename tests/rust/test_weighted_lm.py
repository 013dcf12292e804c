"""The Rust example as a program: it trains, goes on after a kill in the same bits, stays flat, refuses bad input."""

from __future__ import annotations

import math
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.places import ROOT, RustExample
from support.weighted_lm import environment, mix, read_log, run

TEXT = ["--text", ROOT / "LICENSE-MIT", ROOT / "LICENSE-APACHE"]  # they do not change: the first loss is of one batch
SMALL = "--layers 2 --width 32 --seq 32 --batch 4 --warm-up 10".split()
STEPS = 150
RUN = [*SMALL, "--steps", str(STEPS), "--dropout", "0.1", "--every", "10", *TEXT]
Program = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo on this machine")


@pytest.fixture(scope="module")
def binary(rust_example: RustExample) -> Path:
    """Build the Rust program."""
    return rust_example("weighted_lm")


@pytest.fixture(scope="module")
def program(binary: Path) -> Program:
    """Return the program as a function of its arguments."""
    return partial(run, binary)


@pytest.fixture(scope="module")
def whole(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the run without an interruption; its log is beside its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    program(*RUN, "--log", folder / "log", "--checkpoints", folder / "run", "--save-every", "40", "--keep", "2")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Return all files below a directory."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def naive_memory(lines: str) -> dict[int, float]:
    """Return the process's MiB by the number of steps."""
    found = re.findall(r"naive step +(\d+):.* process ([\d.]+) MiB", lines)
    return {int(steps): float(mib) for steps, mib in found}


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until a running process has made a path."""
    end = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, "the program ended before it was killed"
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.002)


def test_the_loss_falls_and_memory_stays(whole: Path) -> None:
    steps = read_log(whole / "log")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    losses = [step["loss"] for step in steps]
    assert losses[0] == pytest.approx(math.log(256), rel=0.1)
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:10])
    shown = {step["step"]: step for step in steps if "process" in step}
    assert list(shown) == list(range(10, STEPS + 1, 10))
    assert abs(shown[STEPS]["active"] - shown[30]["active"]) < 50_000  # a window of batches and losses
    assert shown[STEPS]["process"] - shown[30]["process"] < 4 << 20


def test_the_naive_order_grows_where_the_step_does_not(program: Program, whole: Path) -> None:
    done = program(*RUN, "--naive", "--steps", "60", "--every", "20", "--graph-limit", "1000000")
    memory = naive_memory(done.stdout)
    shown = {step["step"]: step["process"] for step in read_log(whole / "log") if "process" in step}
    growth = memory[60] - memory[20]
    assert growth > 10, done.stdout
    assert growth > 5 * (shown[60] - shown[20]) / (1 << 20)
    assert "waits for all steps" in done.stdout


def test_the_naive_order_stops_before_anybody_waits_for_it(program: Program) -> None:
    done = program(*TEXT, "--naive")
    assert "stopped: the loss waits for more than --graph-limit 20000 operations" in done.stdout
    assert "waits for all steps" not in done.stdout
    ((steps, operations),) = re.findall(r"naive step +(\d+): (\d+) operations put off", done.stdout)
    assert int(operations) > 20_000
    assert int(steps) < 50  # of 400


def test_a_killed_run_goes_on_in_the_same_bits(binary: Path, program: Program, whole: Path, tmp_path: Path) -> None:
    command = [*RUN, "--log", tmp_path / "log", "--checkpoints", tmp_path / "run", "--save-every", "7"]
    process = subprocess.Popen([binary, *command], env=environment(), stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "run/step-000021", process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert len((tmp_path / "log").read_text().splitlines()) < STEPS
    (tmp_path / "run/step-000028.new.partial").mkdir(exist_ok=True)  # as a kill in the middle of a save leaves it
    program(*command, "--resume")
    assert all(re.fullmatch(r"step-\d{6}", path.name) for path in (tmp_path / "run").iterdir())
    wanted, got = read_log(whole / "log"), read_log(tmp_path / "log")
    for key in ("step", "loss", "grad_norm"):
        assert [step[key] for step in got] == [step[key] for step in wanted]
    last = f"run/step-{STEPS:06}"
    for name in ("model", "optimizer", "step"):
        arrays: list[Any] = [mx.load(str(folder / last / f"{name}.safetensors")) for folder in (whole, tmp_path)]
        assert arrays[0].keys() == arrays[1].keys()
        assert all(mx.array_equal(arrays[0][key], arrays[1][key]) for key in arrays[0])


def test_the_last_checkpoints_are_kept(whole: Path) -> None:
    kept = sorted(path.name for path in (whole / "run").iterdir())
    assert kept == ["step-000120", "step-000150"]


def test_gradients_only_changes_nothing(program: Program, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "run/step-000120", tmp_path / "run/step-000120")
    before = files(tmp_path)
    done = program(*RUN, "--gradients-only", "--checkpoints", tmp_path / "run", "--resume")
    assert files(tmp_path) == before
    norms = dict(re.findall(r"^(\S+) +\d+ tensors, gradient norm ([\d.]+)$", done.stdout, re.MULTILINE))
    assert list(norms) == ["blocks.0", "blocks.1", "bytes", "norm", "positions", "all"]
    parts = [float(norm) for name, norm in norms.items() if name != "all"]
    assert math.hypot(*parts) == pytest.approx(float(norms["all"]), rel=1e-4)
    following = read_log(whole / "log")[120]
    loss = re.search(r"^after 120 steps: loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert loss is not None
    assert float(loss[1]) == pytest.approx(following["loss"], rel=1e-6)  # without an update other operations are fused
    assert float(norms["all"]) == pytest.approx(following["grad_norm"], rel=1e-4)


def test_the_text_is_the_standard_library_unless_told_otherwise(program: Program, tmp_path: Path) -> None:
    done = program(*SMALL, "--gradients-only", "--checkpoints", tmp_path / "run")
    count, size = re.findall(r"^(\d+) files, (\d+) bytes of text$", done.stdout, re.MULTILINE)[0]
    assert int(count) > 100
    assert int(size) > 1_000_000
    assert list(tmp_path.iterdir()) == []


BAD = {
    "no steps": (["--steps", "0"], "'0' for '--steps <STEPS>'"),
    "unknown option": (["--stepz", "3"], "--stepz"),
    "resume from nowhere": (["--resume"], "--checkpoints <DIR>"),
    "two ways": (["--naive", "--gradients-only"], "cannot be used with"),
    "heads": (["--heads", "5"], "--width: expected a multiple of --heads 5, got 32"),
    "dropout": (["--dropout", "1"], "--dropout: expected a number from 0 to below 1, got 1"),
    "rate": (["--learning-rate", "0"], "--learning-rate: expected a number above 0, got 0"),
    "missing text": (["--text", "missing.txt"], "missing.txt: No such file"),
    "short text": (["--text", "short.txt"], "--text short.txt: expected a text of --seq 32 bytes or more, found none"),
    "empty directory": (["--checkpoints", "empty", "--resume"], "empty: expected a checkpoint to resume from"),
    "log": (["--log", "nowhere/log"], "nowhere/log: No such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_and_exit_code_2(
    case: str, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty").mkdir()
    arguments, message = BAD[case]
    text = [] if "--text" in arguments else TEXT
    done = program(*SMALL, *text, *arguments, code=2)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("error: ") == 1
    assert "step " not in done.stdout


def test_a_checkpoint_of_another_run_is_refused(program: Program, whole: Path, tmp_path: Path) -> None:
    def refusal(*arguments: str | Path) -> str:
        return program(*arguments, "--checkpoints", tmp_path / "run", code=2).stderr

    shutil.copytree(whole / "run", tmp_path / "run")
    before = files(tmp_path)
    others = {"width": "64", "seed": "1", "learning-rate": "0.001", "steps": "151"}
    for option, value in others.items():
        message = f"run.json: is of another run: --{option} was "
        assert message in refusal(*RUN, f"--{option}", value, "--resume")
    assert "--text was " in refusal(*RUN[:-1], "--resume")
    assert "has the checkpoints of a run: --resume goes on with it" in refusal(*RUN)
    assert files(tmp_path) == before
    (tmp_path / "run/step-000150/model.safetensors").write_bytes(b"torn")
    assert "step-000150/model.safetensors: " in refusal(*RUN, "--resume")


def logits(weights: dict[str, mx.array], tokens: mx.array, heads: int) -> mx.array:
    """Compute the model of the example in plain MLX."""
    batch, seq = tokens.shape
    x = weights["bytes.weight"][tokens] + weights["positions.weight"][:seq]
    for number in range(sum(name.endswith("up.weight") for name in weights)):
        block = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"blocks.{number}.")}
        normed = mx.fast.rms_norm(x, block["attention_norm.weight"], 1e-5)
        qkv = (normed @ block["attention.qkv.weight"].T).reshape(batch, seq, 3, heads, -1)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        scores = mx.where(mx.tril(mx.ones((seq, seq), dtype=mx.bool_)), scores, -math.inf)
        mixed = (mx.softmax(scores, axis=-1) @ v).transpose(0, 2, 1, 3).reshape(batch, seq, -1)
        x = x + mixed @ block["attention.out.weight"].T
        normed = mx.fast.rms_norm(x, block["network_norm.weight"], 1e-5)
        x = x + nn.gelu_approx(normed @ block["up.weight"].T) @ block["down.weight"].T
    return mx.fast.rms_norm(x, weights["norm.weight"], 1e-5) @ weights["bytes.weight"].T


def test_the_weighted_loss_is_what_plain_mlx_computes(program: Program, tmp_path: Path) -> None:
    seq, batch, steps = 48, 12, 3
    # each file is one sequence: of which kind, and of how much authority, is in its name
    texts = {
        "a.md": (b"Certain, and of good authority; " * 2, 1.0),
        "b.py": (bytes(range(65, 65 + seq)), 0.5),
        "test_c.py": (b"assert 1 == 1\n" * 4, 0.25),
    }
    (tmp_path / "text").mkdir()
    for name, (content, _) in texts.items():
        (tmp_path / "text" / name).write_bytes(content[:seq])
    sizes = f"--layers 2 --width 32 --heads 2 --seq {seq} --batch {batch} --steps {steps} --seed 5".split()
    run = [*sizes, "--text", tmp_path / "text", "--checkpoints", tmp_path / "run"]
    program(*run)
    loss = float(re.findall(r"loss ([\d.]+)", program(*run, "--resume", "--gradients-only").stdout)[0])

    tokens, weights = [], []
    for row in range(batch):
        content, authority = list(texts.values())[mix(mix(5) ^ (steps << 32 | row)) % len(texts)]
        tokens.append(list(content[:seq]))
        shares = [count / seq for count in Counter(content[:seq]).values()]
        weights.append(authority / 2 ** -sum(share * math.log2(share) for share in shares))
    assert len(set(weights)) == 3
    ids: Any = mx.array(tokens)
    arrays: Any = mx.load(str(tmp_path / f"run/step-{steps:06}/model.safetensors"))
    losses = nn.losses.cross_entropy(logits(arrays, ids[:, :-1], heads=2), ids[:, 1:]).mean(axis=1)
    weight = mx.array(weights)
    assert loss == pytest.approx(((weight * losses).sum() / weight.sum()).item(), rel=1e-5)
    assert loss != pytest.approx(losses.mean().item(), rel=1e-3)
