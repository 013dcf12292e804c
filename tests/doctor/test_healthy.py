"""Healthy trainings: the examples, and configs of the recipes. None of them gets a failure or a warning.

What is slow depends on what else the machine does, and decides nothing here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.commands import faststep as command
from support.faults import diagnosed
from support.healthy import HEALTHY
from support.places import ROOT, TESTS

PROGRAM = TESTS / "support" / "programs" / "diagnosed.py"
SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "data.batch_size=4"]
CONTEXT = ["data.train.context=16", "data.validation.context=16"]
GPT = {"use": "gpt", "layers": 1, "width": 32, "heads": 2, "context": 16}
BYTES = {"use": "bytes", "context": 16}
MLP = {"use": "mlp", "sizes": [8, 32, 3], "dropout": 0.1}
ROWS = {"train": {"use": "arrays", "file": "rows.npz"}, "batch_size": 16, "shuffle": True}
ADAM = {"use": "AdamW", "learning_rate": {"use": "cosine_decay", "init": 1e-2, "warmup": 5}}
TEXTS = "import numpy as np\n\n\ndef texts():\n    return [np.arange(n % 13 + 3) % 50 for n in range(200)]\n"
CONFIGS = {
    "gpt on bytes": {"model": GPT, "loss": {"use": "next_token"}, "data": {"train": BYTES, "batch_size": 4}},
    "gpt, mixed precision": {
        "model": GPT,
        "loss": {"use": "next_token"},
        "data": {"train": BYTES, "batch_size": 4},
        "step": {"compute_dtype": "bfloat16", "ema_decay": 0.9},
    },
    "gpt, checkpointed gradients": {
        "model": GPT,
        "loss": {"use": "next_token"},
        "data": {"train": BYTES, "batch_size": 4},
        "step": {"gradient_checkpointing": ["blocks.*"], "accumulate": 2},
    },
    "gpt, padded texts": {
        "model": {**GPT, "vocabulary": 64},
        "loss": {"use": "next_token"},
        "data": {"train": {"use": "texts.py:texts"}, "batch_size": 8, "collate": {"use": "pad", "multiple": 16}},
        "step": {"weighted": True},
    },
    "gpt, 4 bits and adapters": {
        "model": {**GPT, "width": 64},
        "loss": {"use": "next_token"},
        "data": {"train": BYTES, "batch_size": 4},
        "quantize": {"bits": 4, "group_size": 32, "modules": ["blocks.*"]},
        "lora": {"rank": 4, "modules": ["blocks.*"]},
    },
    "mlp, classes": {"model": MLP, "loss": {"use": "cross_entropy"}, "data": {**ROWS, "workers": 2}},
    "mlp, Muon": {
        "model": MLP,
        "loss": {"use": "cross_entropy"},
        "data": ROWS,
        "optimizer": {"use": "Muon", "learning_rate": 0.01},
    },
}


def alarms(folder: Path, *words: str | Path) -> list[str]:
    """Diagnose, and return the failures and warnings."""
    done = subprocess.run(
        [sys.executable, PROGRAM, *words], capture_output=True, text=True, timeout=300, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each["name"] for each in found["rungs"] if each["status"] not in ("ok", "slow")] == [], found["verdict"]
    assert len(found["rungs"]) == 16
    alarming = [each for each in found["findings"] if each["level"] != "note"]
    return [each["text"] for each in alarming if each["name"] not in ("slow", "slow-data")]


def test_the_example_with_a_config(tmp_path: Path) -> None:
    assert alarms(tmp_path, ROOT / "examples" / "char_gpt.yaml", *SMALL, *CONTEXT) == []


def test_a_project_to_begin_with(tmp_path: Path) -> None:
    command("new", "mine", cwd=tmp_path)
    assert alarms(tmp_path / "mine", "config.yaml") == []


@pytest.mark.parametrize("words", [("gan", "0"), ("gan", "1"), ("dqn", "0")], ids=" ".join)
def test_the_other_examples(words: tuple[str, str], tmp_path: Path) -> None:
    assert alarms(tmp_path, *words) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_the_recipes(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((160, 8), dtype=np.float32)
    np.savez(tmp_path / "rows.npz", x=x, y=x[:, :3].argmax(axis=1).astype(np.int32))
    (tmp_path / "texts.py").write_text(TEXTS)
    config = {"optimizer": ADAM, "train": {"steps": 50}, **CONFIGS[name]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert alarms(tmp_path, "config.yaml") == []


@pytest.mark.parametrize("name", HEALTHY)
def test_a_program_that_looks_like_a_fault(name: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, HEALTHY[name], "data forward numbers own")
    alarming = [each for each in found["findings"] if each["level"] != "note"]
    assert [each for each in alarming if each["name"] not in ("slow", "slow-data")] == []
    assert not [each for each in found["rungs"] if each["status"] not in ("ok", "slow")]
