"""Encoders from configs: the commands of docs/encoder.md, an exact resume, and what is refused before training."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from faststep.report import read_log
from support.reader import commands, copy_examples, run

SHORT = ["--set", "train.steps=6", "--set", "train.log_every=2", "--set", "train.validate_every=3"]
SHORT += ["--set", "train.validation_batches=4"]
# what masked texts are made of after the first training, which encodes the whole library
FEW_TEXTS = [
    word
    for part in ("train", "validation")
    for word in ("--set", f"data.{part}.files={sysconfig.get_path('stdlib')}/c*.py")
]
MASKED, CLASSES = "examples/encoder/masked_lm.yaml", "examples/encoder/classify.yaml"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the page's commands one after the other, each training for six steps."""
    folder = tmp_path_factory.mktemp("reader")
    copy_examples(folder)
    wanted = [each for each in commands("encoder.md") if "minilm" not in each and "pip " not in each]
    assert len(wanted) == 5
    for command in wanted:
        options = SHORT if " train " in command else []
        few = ["--steps", "8", "--kills", "1", *FEW_TEXTS] if "verify-resume" in command else []
        run(command, folder, *options, *few)
    return folder


@pytest.mark.slow
def test_the_page_leads_to_a_run(place: Path) -> None:
    for name in ("masked_lm", "classify"):
        log = read_log(place / "runs" / "encoder" / name)
        assert all(np.isfinite(log.steps["loss"]))
        assert all(norm > 0 for norm in log.steps["grad_norm"])
        assert len(log.validations["metrics.accuracy"]) == 2
    assert (place / "runs/encoder/tiny/model.safetensors").is_file()


REFUSED = {
    "vocabulary": (
        MASKED,
        {"model.config": {"vocab_size": 100}},
        "data.train: expected tokens below 100, the model's vocabulary; the tokenizer has 2048",
    ),
    "too long": (
        MASKED,
        {"data.train.length": 600},
        "data.train: length: expected at most 512, the model's longest sequence, got 600",
    ),
    "classes": (CLASSES, {"model.classes": 4}, "data.train: expected 4 classes, as the model has, got 10"),
    "no folder": (CLASSES, {"model.path": "nowhere"}, "nowhere/config.json cannot be read"),
    "key": (MASKED, {"model.config": {"hiden_size": 8}}, "did you mean 'hidden_size'?"),
    "head": (MASKED, {"model.head": "classifier"}, "model.head: expected"),
    "line": (CLASSES, {"data.train.file": "broken.jsonl"}, "broken.jsonl:2: expected a JSON object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_training(case: str, place: Path) -> None:
    config, changes, message = REFUSED[case]
    (place / "examples/encoder/broken.jsonl").write_text('{"text": "a", "label": "xml"}\n{"text":\n')
    options = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    options += FEW_TEXTS if config == MASKED else []
    done = run(f"faststep train {config}", place, *options, "--set", "run=runs/refused", status=2)
    assert message in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "runs/refused").exists()
