"""docs/doctor.md: its program is run, its commands too, and its table is that of the planted faults."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import faststep
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep.doctor._user_code import users_stacks
from support.commands import faststep as command
from support.faults import FAULTS, HEAD, TAIL
from support.places import ROOT

PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_table_is_that_of_the_tests() -> None:
    rows = re.findall(r"^\| (.+) \| `([\w-]+)` \| `(.+)` \|$", PAGE, re.MULTILINE)
    assert rows == [(name, each.finding, each.remedy) for name, each in FAULTS.items()]
    assert len(rows) >= 16


@pytest.mark.slow
def test_the_program_says_what_the_page_says(tmp_path: Path) -> None:
    program, said = blocks("python")[0], next(each for each in blocks("console") if each.startswith("$ python"))
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = re.sub(r"\d+ (operations|steps)", r"N \1", done.stdout)
    for line in said.splitlines()[1:]:
        assert re.sub(r"\d+ (operations|steps)", r"N \1", line) in printed
    assert "the first rung with a fault is 'your own step'" in done.stdout


def test_the_commands_of_the_page_are_there(tmp_path: Path) -> None:
    commands = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ faststep")]
    *commands, profile = commands
    assert commands == ["faststep doctor config.yaml", "faststep doctor", "faststep check examples/char_gpt.yaml"]
    small = ["--seconds", "0", "--set", "model.layers=1", "--set", "model.width=32", "--set", "data.batch_size=2"]
    _, name, config = shlex.split(commands[2])
    assert "the same numbers" in command(name, ROOT / config, *small, cwd=tmp_path).stdout
    assert "no failures" in command(*shlex.split(commands[1])[1:]).stdout
    _, name, config, *words = shlex.split(profile)
    said = command(name, ROOT / config, *words, "--steps", 2, "--warmup", 1, *small[2:], cwd=tmp_path).stdout
    assert "most in use in a step, by the memory plan" in said
    assert "<svg" in (tmp_path / "profile.html").read_text()
    assert "memory of a step" in (tmp_path / "trace.json").read_text()


def test_the_page_of_a_hang_has_its_stacks(tmp_path: Path) -> None:
    tail = TAIL.replace("CALL", "{'rungs': ['data', 'forward'], 'isolate': False}")
    code = f"{FAULTS['a loader that blocks'].code}{tail}found.html('page.html')"
    (tmp_path / "train.py").write_text(HEAD + code)
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, timeout=300, env=dict(os.environ))
    page = (tmp_path / "page.html").read_text()
    assert "Stacks of &#x27;data alone&#x27;" in page
    assert "in blocking" in page
    assert "workers=0 first" in page


def test_the_page_of_a_diagnosis_has_gradients_by_module(tmp_path: Path) -> None:
    tail = TAIL.replace("CALL", "{'rungs': ['data', 'numbers'], 'isolate': False, 'seconds': 0.3}")
    (tmp_path / "train.py").write_text(f"{HEAD}{tail}found.html('page.html')")
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, timeout=300)
    page = (tmp_path / "page.html").read_text()
    assert "Gradients by module" in page
    assert ">layers.0</td>" in page


def test_a_notebook_shows_pages() -> None:
    model, optimizer = nn.Linear(4, 1), optim.Adam(1e-2, bias_correction=True)
    batches = [(mx.random.normal((8, 4)),) for _ in range(4)]
    loss = lambda model, x: mx.square(model(x) - 1).mean()  # noqa: E731
    found = faststep.diagnose(
        model, optimizer, loss, batches, rungs=["data", "numbers"], seconds=0.1, progress=False, isolate=False
    )
    assert found._repr_html_().startswith("<iframe srcdoc=")
    assert "Gradients by module" in found._repr_html_()
    lines = str(found).splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("gradients by module"))
    assert lines[place + 1].split()[:4] == ["model", "[8,", "1]", "5"]
    assert faststep.check(model, optimizer, loss, batches, seconds=0)._repr_html_().startswith("<pre>module ")
    step = faststep.Step(model, optimizer, loss)
    with faststep.profile(step) as recorded:
        step(*batches[0])
    assert "<pre>1 steps in" in recorded._repr_html_()


def test_a_stack_begins_at_the_user_s_line_and_ends_there() -> None:
    dump = f"""Thread 0x2 (most recent call first):
  File "{threading.__file__}", line 320 in wait
Current thread 0x1 (most recent call first):
  File "{threading.__file__}", line 320 in wait
  File "/home/someone/train.py", line 7 in loss_fn
  File "{Path(faststep.__file__).parent}/_step/_step.py", line 1 in __call__
  File "/home/someone/train.py", line 20 in <module>
  File "{threading.__file__}", line 900 in run
"""
    lines = users_stacks(dump).splitlines()
    assert len(lines) == 5
    assert "line 320 in wait" in lines[1]
    assert lines[-1].strip() == 'File "/home/someone/train.py", line 20 in <module>'
