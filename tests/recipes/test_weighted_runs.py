"""The weighted language model from its config: the commands of docs/weighted_lm.md, and texts with their numbers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from faststep import recipes
from faststep.report import read_log
from support.reader import commands, copy_examples, run

SHORT = ["--set", "train.steps=8", "--set", "train.log_every=2", "--set", "train.validation_batches=2"]
TEXTS = {"docs/a.md": b"certain words " * 20, "b.py": b"x = 1\n" * 40, "tests/c.py": bytes(range(64)) * 4}


@pytest.mark.slow
def test_the_page_leads_to_a_run(tmp_path: Path) -> None:
    copy_examples(tmp_path)
    found = commands("weighted_lm.md")
    assert len(found) == 4
    for command in found:
        options = SHORT if " train " in command else ["--steps", "24", "--kills", "2"] if "verify" in command else []
        if "verify" in command:
            command = command.replace("--steps 40", "--set train.validation_batches=2")
        done = run(command, tmp_path, *options)
        assert "nats a byte" in done.stdout or "baseline" not in command
    log = read_log(tmp_path / "runs" / "weighted_lm")
    assert log.steps["loss"][0] == pytest.approx(math.log(256), rel=0.1)
    assert (tmp_path / "runs/weighted_lm/report.html").stat().st_size > 10_000


def write(folder: Path) -> Path:
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


def test_authority_and_entropy_follow_from_the_file(tmp_path: Path) -> None:
    found = {}
    for item in recipes.Sources(write(tmp_path), context=32, split="all"):
        found[float(item["auth_weights"])] = float(item["prov_entropies"])
        assert item["input_ids"].shape == (32,)
    assert found.keys() == {1.0, 0.5, 0.25}
    shares = np.bincount(np.frombuffer(TEXTS["docs/a.md"], np.uint8)) / len(TEXTS["docs/a.md"])
    assert found[1.0] == pytest.approx(-sum(p * math.log2(p) for p in shares if p), rel=1e-6)
    assert found[0.25] == pytest.approx(6.0, rel=1e-6)  # 64 bytes, all as often


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"context: expected a number from 2 on, got 1"):
        recipes.Sources(write(tmp_path), context=1)
    with pytest.raises(ValueError, match=r"context: expected a file of 9000 bytes or more, found none"):
        recipes.Sources(write(tmp_path), context=9000, split="all")
    with pytest.raises(ValueError, match=r"in_chunks: expected no metrics of the outputs"):
        recipes.weighted_lm(in_chunks=True, outputs=True)
