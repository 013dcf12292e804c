"""The commands of docs/qlora.md, run as a reader runs them, for fewer steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

from support.places import ROOT

FEWER = {  # what is added to commands that take minutes
    "python examples/qlora.py": "--vocabulary 400 --layers 1 --width 64 --heads 2 --context 192",
    "faststep train examples/qlora_base.yaml": "--set train.steps=3 --set train.validation_batches=1",
    "faststep train examples/qlora.yaml": (
        "--set train.steps=3 --set train.epochs=null --set train.validation_batches=1 --set model.lora.rank=2"
    ),
}


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    page = (ROOT / "docs" / "qlora.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", page, flags=re.DOTALL)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    assert len(commands) == 9
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outputs = {}
    for command in commands:
        more = next((words for start, words in FEWER.items() if command.startswith(start)), "")
        done = subprocess.run(
            shlex.split(f"{command} {more}"),
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-3000:])
        outputs[command] = done.stdout
        for file in (tmp_path / "runs/qlora").glob("*.jsonl"):
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:80]))
    log = (tmp_path / "runs/qlora/chat/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log if '"kind": "step"' in line][-1] == 3
    assert any('"<|user|>def copy(self)<|assistant|>|' in line.replace("sample", "") for line in log)
    generated = next(text for command, text in outputs.items() if command.startswith("mlx_lm.generate"))
    assert "Generation:" in generated
    for name in ("fused", "plain"):
        assert (tmp_path / "runs/qlora" / name / "model.safetensors").stat().st_size > 10_000
