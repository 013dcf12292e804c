"""The examples run as programs, converge, and write nothing but their results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import ROOT, without_traces

EXAMPLE = ROOT / "examples" / "char_gpt.py"
SMALL = "--steps 6 --compare 3 --eval-every 3 --batch 2 --context 16 --layers 1 --width 16 --heads 2 --warm-up 2"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with a folder as its working directory."""
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=without_traces(), capture_output=True, text=True, timeout=300
    )


def test_the_example_trains_and_writes_its_results(tmp_path: Path) -> None:
    folder, out = tmp_path / "cwd", tmp_path / "results" / "run"
    folder.mkdir()
    done = run(EXAMPLE, *SMALL.split(), "--out", out, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("MB of Python", "plain MLX", "mx.compile'd", "fast_step", "the losses agree", "held-out loss", "def "):
        assert text in done.stdout, done.stdout
    assert sorted(file.name for file in out.iterdir()) == ["loss.png", "model.safetensors", "sample.txt"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (out / "loss.png").stat().st_size > 10_000
    assert (out / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    assert list(folder.iterdir()) == []


def test_the_example_says_what_to_install(tmp_path: Path) -> None:
    for missing in ("rich", "matplotlib", "faststep"):
        code = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_path({os.fspath(EXAMPLE)!r})"
        done = run("-c", f"import sys; sys.path.insert(0, {os.fspath(EXAMPLE.parent)!r}); {code}", cwd=tmp_path)
        assert done.returncode == 1
        assert "pip install 'mlx-faststep[cpu,train]'" in done.stderr
        assert missing in done.stderr
        assert "Traceback" not in done.stderr


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found is not None, text
    return [float(each) for each in found.groups()]


def finished(name: str, cwd: Path, *options: str) -> str:
    """Run an example, which takes its first rounds in plain MLX too; return what it printed."""
    done = run(EXAMPLE.with_name(name), *options, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    (gap,) = numbers(r"fast_step: .* difference (\S+)", done.stdout)
    assert gap < 1e-5
    assert "the losses agree" in done.stdout
    assert list(cwd.iterdir()) == []
    return done.stdout


@pytest.mark.slow
def test_the_gan_finds_what_one_gaussian_cannot(tmp_path: Path) -> None:
    printed = finished("gan.py", tmp_path)
    share, found = numbers(r"generator: ([\d.]+)% .* (\d) of 8 are found", printed)
    baseline, none = numbers(r"one Gaussian: ([\d.]+)% .* (\d) of 8 are found", printed)
    assert share > 3 * baseline
    assert (found, none) == (8, 0)


@pytest.mark.slow
def test_the_agent_balances_longer_than_random_actions_do(tmp_path: Path) -> None:
    printed = finished("dqn.py", tmp_path, "--compare=50")
    (lasts,) = numbers(r"the agent balances the pole for (\d+) steps of 500", printed)
    (baseline,) = numbers(r"random actions balance it for (\d+)", printed)
    assert lasts > 5 * baseline


@pytest.mark.slow
def test_preferred_answers_become_likely(tmp_path: Path) -> None:
    printed = finished("preference.py", tmp_path, "--compare=20")
    (before,) = numbers(r"taught both: yes (\d+)% of the time", printed)
    assert 40 < before < 60
    for method in ("dpo", "orpo"):
        (after,) = numbers(rf"{method}: .* yes (\d+)% of the time", printed)
        assert after > 95


@pytest.mark.slow
def test_rewarded_answers_become_more(tmp_path: Path) -> None:
    printed = finished("grpo.py", tmp_path, "--rounds=120", "--compare=20")
    for what in ("drawn answers", "the likeliest answer"):
        before, after = numbers(rf"{what}: (\d+)% right at first, (\d+)% at the end", printed)
        assert after > 2 * before


@pytest.mark.parametrize("name", ["gan.py", "dqn.py", "preference.py", "grpo.py"])
def test_these_say_what_to_install_too(tmp_path: Path, name: str) -> None:
    example = EXAMPLE.with_name(name)
    code = f"import runpy, sys; sys.modules['faststep'] = None; runpy.run_path({os.fspath(example)!r})"
    done = run("-c", f"import sys; sys.path.insert(0, {os.fspath(example.parent)!r}); {code}", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'mlx-faststep[cpu,train]'" in done.stderr
    assert "Traceback" not in done.stderr
