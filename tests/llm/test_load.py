"""Models of mlx-lm out of folders: what is loaded, changed and trained, and what is refused with words."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

import huggingface_hub
from faststep.config import ConfigError, build, validate
from faststep.mlx_lm import Jsonl, Lora, Quantize, load
from mlx.utils import tree_flatten
from mlx_lm import load as theirs
from mlx_lm.utils import make_shards, save_model
from support.commands import faststep
from support.language_models import new_folder, write_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model, and data beside it."""
    around = tmp_path_factory.mktemp("models")
    write_data(around)
    return new_folder(around / "llama")


def config_of(folder: Path, **model: Any) -> dict[str, Any]:
    return {
        "run": str(folder.parent / "run"),
        "model": {"use": "mlx_lm", "path": str(folder), **model},
        "loss": {"use": "next_token"},
        "data": {
            "train": {"use": "jsonl", "file": str(folder.parent / "chat.jsonl"), "tokenizer": str(folder)},
            "batch_size": 2,
            "collate": {"use": "pad"},
        },
        "optimizer": {"use": "AdamW", "learning_rate": 1e-3},
        "step": {"weighted": True},
        "train": {"steps": 2},
    }


def names(tree: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(tree))


def test_it_is_the_model_that_mlx_lm_loads(folder: Path, tmp_path: Path) -> None:
    tokens = mx.array([[5, 6, 7, 8]])
    expected, _ = theirs(str(folder))
    assert mx.array_equal(load(folder)(tokens), expected(tokens))
    sharded = tmp_path / "sharded"  # in four files
    shutil.copytree(folder, sharded)
    (sharded / "model.safetensors").unlink()
    weights = sorted(names(expected.parameters()).items())
    files: dict[str, str] = {}
    for number in range(4):
        part = dict(weights[number::4])
        name = f"model-{number + 1:05}-of-00004.safetensors"
        mx.save_safetensors(str(sharded / name), part)
        files |= dict.fromkeys(part, name)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert mx.array_equal(load(sharded)(tokens), expected(tokens))
    (sharded / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(ValueError, match=r"path: .*names model-00003-of-00004.safetensors, not in the folder"):
        load(sharded)


def test_what_trains(folder: Path) -> None:
    whole = names(load(folder).parameters())
    assert names(load(folder).trainable_parameters()).keys() == whole.keys()
    model = load(folder, lora=Lora(rank=4, layers=1, keys=["self_attn.q_proj", "mlp.up_proj"]))
    assert {name: each.shape for name, each in names(model.trainable_parameters()).items()} == {
        "model.layers.1.self_attn.q_proj.lora_a": (64, 4),
        "model.layers.1.self_attn.q_proj.lora_b": (4, 64),
        "model.layers.1.mlp.up_proj.lora_a": (64, 4),
        "model.layers.1.mlp.up_proj.lora_b": (4, 192),
    }
    model = load(folder, Quantize(bits=4, group_size=32), Lora(rank=2), dora=True, checkpoint=True)
    found = names(model.trainable_parameters())
    assert {name.rpartition(".")[2] for name in found} == {"lora_a", "lora_b", "m"}
    assert len(found) == 3 * 2 * 7
    assert isinstance(model.model.layers[0].self_attn.q_proj.linear, nn.QuantizedLinear)
    assert all(module.training for _, module in model.named_modules())


def test_a_config_builds_it(folder: Path) -> None:
    lora = {"rank": 4, "scale": 10.0, "dropout": 0.1, "layers": 1, "keys": ["self_attn.q_proj"]}
    built = build(validate(config_of(folder, quantize={"bits": 8}, lora=lora, checkpoint=True)))
    batch = next(iter(built.loader))
    first, second = (float(built.step(**batch).loss) for _ in range(2))
    assert second < first
    assert built.step.stats.mode == "called"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora": {"rank": 0}}, "model.lora: rank: expected a number from 1 on, got 0"),
        ({"lora": {"rnk": 2}}, "model.lora: unknown key 'rnk': did you mean 'rank'?"),
        (
            {"lora": {"alpha": 16}},
            "model.lora: unknown key 'alpha': expected one of dropout, keys, layers, rank, scale",
        ),
        ({"lora": {"rank": "8"}}, "model.lora: rank: expected a whole number, got '8'"),
        ({"quantize": {"groupsize": 64}}, "model.quantize: unknown key 'groupsize': did you mean 'group_size'?"),
        ({"lora": {"layers": 3}}, "model.lora: layers: expected 1 to 2, as many as the model has, got 3"),
        ({"lora": {"dropout": 1.0}}, "model.lora: dropout: expected a number from 0 below 1"),
        ({"lora": {"keys": ["q_proj"]}}, "'q_proj' is no layer that takes an adapter; there are mlp.down_proj"),
        ({"dora": True}, "model.dora: expected lora beside it"),
        ({"quantize": {"bits": 7}}, "model.quantize: bits: expected 2, 3, 4, 5, 6 or 8"),
        ({"quantize": {"group_size": 128}}, "no layer has inputs that are a multiple of 128"),
        ({"quantize": {"bits": 3, "group_size": 32}, "lora": {}, "dora": True}, "dora: expected weights of 2, 4 or 8"),
        ({"path": "nowhere"}, "expected a model's folder on this machine, found none at"),
        ({"adapters": "nowhere"}, "expected adapter_config.json and adapters.safetensors in"),
    ],
)
def test_arguments_that_do_not_fit(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(validate(config_of(folder, **arguments)))
    assert message in str(error.value)
    assert str(error.value).startswith("model")


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def change_weights(change: Callable[[dict[str, mx.array]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights: Any = mx.load(str(folder / "model.safetensors"))
        mx.eval(weights)
        change(weights)
        mx.save_safetensors(str(folder / "model.safetensors"), weights)

    return apply


def less_vocabulary(folder: Path) -> None:
    edit(vocab_size=300)(folder)
    change_weights(lambda each: each.update({"model.embed_tokens.weight": each["model.embed_tokens.weight"][:300]}))(
        folder
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json, found none"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (edit(model_type="nothing"), "Model type nothing not supported"),
        (edit(hidden_size=128), "does not load as the 'llama' of its config.json: Expected shape"),
        (edit(num_hidden_layers=3), "Missing 9 parameters"),
        (edit(model_file="mine.py"), "trust_remote_code"),
        (change_weights(lambda each: each.pop("model.norm.weight")), "Missing 1 parameters: model.norm.weight"),
        (change_weights(lambda each: each.update(extra=mx.zeros(2))), "Received 1 parameters not in model: extra"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678{"), "does not load as"),
        (lambda folder: [file.unlink() for file in folder.glob("model*")], "expected weights in"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "expected a tokenizer in"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "the tokenizer in"),
        (less_vocabulary, "tokens up to number 511"),
    ],
)
def test_folders_that_do_not_fit(folder: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    copy = tmp_path / "llama"
    shutil.copytree(folder, copy)
    damage(copy)
    with pytest.raises(ValueError, match=r"^path: ") as error:
        load(copy)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_all_layers_and_other_modes_of_few_bits(folder: Path) -> None:
    assert load(folder, lora=Lora(layers=-1)).origin.adapters == load(folder, lora=Lora()).origin.adapters
    model = load(folder, Quantize(mode="mxfp4"), Lora(rank=2))
    layer = model.model.layers[0].self_attn.q_proj.linear
    assert (layer.mode, layer.bits, layer.group_size) == ("mxfp4", 4, 32)
    assert model.origin.config["quantization"]["mode"] == "mxfp4"
    with pytest.raises(ValueError, match=r"quantize: .*mxfp4 quantization requires bits to be 4 but got 8"):
        load(folder, Quantize(mode="mxfp4", bits=8))


def test_a_model_of_the_hub_is_the_one_in_its_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    inside = tmp_path / "models--mine--llama-tiny"
    with pytest.raises(ValueError, match=r"no mine/llama-tiny in the cache .* `hf download mine/llama-tiny` fetches"):
        load(Path("mine/llama-tiny"))
    with pytest.raises(ValueError, match=r"^tokenizer: .* `hf download mine/llama-tiny` fetches it"):
        Jsonl(folder.parent / "chat.jsonl", Path("mine/llama-tiny"))
    (inside / "refs").mkdir(parents=True)
    (inside / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, inside / "snapshots" / ("0" * 40))
    tokens = mx.array([[5, 6, 7, 8]])
    built = build(validate(config_of(folder, path="mine/llama-tiny")))
    assert mx.array_equal(built.step.model(tokens), load(folder)(tokens))
    assert len(Jsonl(folder.parent / "chat.jsonl", Path("mine/llama-tiny"))) == len(
        Jsonl(folder.parent / "chat.jsonl", folder)
    )


def test_few_bits_are_not_made_fewer(folder: Path, tmp_path: Path) -> None:
    model = load(folder, Quantize(bits=4, group_size=32))
    shutil.copytree(folder, tmp_path / "few", ignore=shutil.ignore_patterns("model*"))
    save_model(tmp_path / "few", model)
    edit(quantization=model.origin.config["quantization"])(tmp_path / "few")
    again = load(tmp_path / "few", lora=Lora())
    tokens = mx.array([[5, 6, 7, 8]])
    assert mx.array_equal(again.eval()(tokens), model.eval()(tokens))
    with pytest.raises(ValueError, match=r"quantize: the weights in .* are in few bits already"):
        load(tmp_path / "few", Quantize())
    assert len(make_shards(names(model.parameters()))) == 1


def test_other_sections_do_not_change_it(folder: Path) -> None:
    for key, value in {"quantize": {"bits": 4}, "lora": {"rank": 2}}.items():
        with pytest.raises(ConfigError, match=rf"{key}: a model of mlx-lm takes it as an argument: model.{key}"):
            build(validate({**config_of(folder), key: value}))


def test_commands_refuse_before_training(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.json"  # is YAML too
    config = config_of(folder, lora={"rank": 2})
    config["run"] = str(tmp_path / "run")
    file.write_text(json.dumps({**config, "model": {**config["model"], "path": str(tmp_path)}}))
    done = faststep("train", file, status=2)
    assert "model.path: " in done.stderr
    assert "names no model_type" in done.stderr
    file.write_text(json.dumps(config))
    code = (
        "import sys; sys.modules['mlx_lm'] = None; sys.argv = ['faststep', 'train', sys.argv[1]]; "
        "from faststep.cli import main; main()"
    )
    missing = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, timeout=120)
    assert missing.returncode == 2, missing.stderr
    assert "pip install 'mlx-faststep[llm]'" in missing.stderr
    assert "Traceback" not in missing.stderr
    assert not (tmp_path / "run").exists()


def test_the_tokens_of_the_end_are_those_of_the_generation_config_too(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert load(tmp_path / "model").origin.tokenizer.eos_token_ids >= {1, 7}
