"""Configs of mlx_lm.lora, converted: the same model, optimizer and schedule, and what is left out is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

from faststep.cli._from_mlx_lm import from_mlx_lm as command
from faststep.cli._status import Exit
from faststep.config import build, load
from faststep.mlx_lm import from_mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.lora import CONFIG_DEFAULTS
from mlx_lm.tuner.utils import build_schedule, linear_to_lora_layers
from mlx_lm.utils import load as theirs
from support.commands import faststep
from support.language_models import new_folder, write_data


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Path:
    around = tmp_path_factory.mktemp("mlx_lm")
    new_folder(around / "llama")
    write_data(around)
    (around / "data").mkdir()
    for name in ("train", "valid", "test"):
        (around / "data" / f"{name}.jsonl").write_text((around / "chat.jsonl").read_text())
    return around


def converted(around: Path, status: int = 0, **values: Any) -> tuple[Path, str]:
    """Write a config of mlx_lm.lora, and convert it; return ours, and what is told."""
    given = {"model": str(around / "llama"), "data": str(around / "data"), "train": True, **values}
    (around / "lora_config.yaml").write_text(yaml.safe_dump(given))
    (around / "ours.yaml").unlink(missing_ok=True)
    done = faststep("from-mlx-lm", around / "lora_config.yaml", around / "ours.yaml", status=status)
    return around / "ours.yaml", done.stderr


def test_it_trains_what_mlx_lm_trains(around: Path) -> None:
    schedule = {"name": "cosine_decay", "warmup": 3, "warmup_init": 1e-7, "arguments": [1e-3, 20, 1e-5]}
    lora = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.up_proj"]}
    options = {"num_layers": 1, "lora_parameters": lora, "mask_prompt": True, "iters": 6, "batch_size": 2}
    options |= {
        "grad_accumulation_steps": 2,
        "optimizer": "adamw",
        "optimizer_config": {"adamw": {"weight_decay": 0.1}},
    }
    options |= {"lr_schedule": schedule, "max_seq_length": 64, "fine_tune_type": "dora", "seed": 7, "save_every": 5}
    file, told = converted(around, **options, test=True)
    assert told == "left out: test: `faststep eval RUN --test` with data.test\n"
    config = load(file)
    assert (config.seed, config.train.steps, config.checkpoints.every) == (7, 3, 3)
    built = build(config)
    model, _ = theirs(str(around / "llama"))
    model.freeze()
    linear_to_lora_layers(model, 1, lora, use_dora=True)
    shapes = {name: each.shape for name, each in tree_flatten(model.trainable_parameters())}
    assert {name: each.shape for name, each in tree_flatten(built.step.model.trainable_parameters())} == shapes
    expected, optimizer = build_schedule(schedule), built.step.optimizer
    found = optimizer._schedulers["learning_rate"]
    steps = [mx.array(step) for step in range(30)]
    assert [found(step).item() for step in steps] == [expected(step).item() for step in steps]
    assert optimizer.weight_decay == 0.1
    assert all((sample["targets"] == -100).any() for sample in built.loader._source.source)
    done = faststep("train", file, "--set", f"run={around / 'run'}")
    assert "ended: done" in done.stdout
    assert (around / "run" / "adapters" / "adapters.safetensors").is_file()


def test_the_defaults_and_other_kinds(around: Path) -> None:
    values = {key: each for key, each in CONFIG_DEFAULTS.items() if key not in ("model", "data", "config")}
    file, told = converted(around, **{**values, "num_layers": -1})
    assert told.count("left out") == told.count("test_batches")
    assert load(file).model.arguments["lora"]["layers"] == -1
    file, told = converted(around, fine_tune_type="full", num_layers=2, hf_dataset={"path": "x"}, mine=3)
    assert "num_layers: all blocks train" in told
    assert "hf_dataset: nothing is downloaded" in told
    assert "mine: unknown here" in told
    assert "lora" not in load(file).model.arguments


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "adamx"}, "optimizer: expected adam, adamw, muon, sgd, adafactor, got 'adamx'"),
        ({"lr_schedule": {"name": "cosine", "arguments": [1]}}, "lr_schedule: name: expected a schedule"),
        ({"fine_tune_type": "qlora"}, "fine_tune_type: expected lora, dora or full, got 'qlora'"),
    ],
)
def test_what_mlx_lm_does_not_know(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_mlx_lm(values)


def test_files(around: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "adapter_config.json", tmp_path / "taken.yaml"
    file.write_text(json.dumps({"model": str(around / "llama"), "data": "none"}))
    out.write_text("mine")
    (tmp_path / "list.yaml").write_text("- 1")
    command(file)
    assert yaml.safe_load(capsys.readouterr().out)["data"]["train"]["file"] == "none"
    for arguments, message in (
        ((file, out), "taken.yaml: not written"),
        ((tmp_path / "none.yaml",), "cannot be read"),
        ((tmp_path / "list.yaml",), "a mapping, got list"),
    ):
        with pytest.raises(Exit, match=message):
            command(*arguments)
    assert out.read_text() == "mine"
