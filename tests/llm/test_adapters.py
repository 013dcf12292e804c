"""Adapters and plain weights out of runs: mlx-lm's commands take them, and what is of another model is refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

from faststep.config import build, validate
from faststep.mlx_lm import Lora, Quantize, export_adapters, export_fused, load
from mlx.utils import tree_flatten
from mlx_lm import load as theirs
from mlx_lm.tuner.utils import linear_to_lora_layers
from support.commands import CALLBACKS, checksums, faststep, set_
from support.language_models import new_folder, write_data

TOKENS = mx.array([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, `llama`, and the run of its adapters, `run`."""
    folder = tmp_path_factory.mktemp("adapters")
    write_data(folder)
    new_folder(folder / "llama")
    file = folder / "config.yaml"
    file.write_text(json.dumps(config_of(folder)))
    faststep("train", file)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    lora = {"rank": 4, "scale": 10.0, "layers": 1, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}
    return {
        "run": str(folder / "run"),
        "model": {"use": "mlx_lm", "path": "llama", "quantize": {"bits": 4, "group_size": 32}, "lora": lora},
        "loss": {"use": "next_token"},
        "data": {
            "train": {"use": "jsonl", "file": "chat.jsonl", "tokenizer": "llama"},
            "validation": {"use": "jsonl", "file": "chat.jsonl", "tokenizer": "llama"},
            "batch_size": 8,
            "collate": {"use": "pad", "multiple": 128},
        },
        "optimizer": {"use": "AdamW", "learning_rate": 1e-2},
        "step": {"weighted": True},
        "train": {"steps": 6, "validate_every": 3, "validation_batches": 1},
        "callbacks": [{"use": "adapters"}, {"use": "samples", "prompts": ["A step"], "count": 4}],
    }


def mlx_lm(*arguments: Any) -> str:
    """Run one of mlx-lm's commands."""
    command = [sys.executable, "-W", "ignore", "-m", "mlx_lm", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights_of(file: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(file)))


def test_a_run_writes_adapters_beside_its_checkpoints(trained: Path) -> None:
    (newest,) = (trained / "run" / "checkpoints").glob("step-00000006")
    whole, adapters = (
        weights_of(file) for file in (newest / "model.safetensors", trained / "run/adapters/adapters.safetensors")
    )
    assert len(adapters) == 4
    assert all(mx.array_equal(array, whole[name]) for name, array in adapters.items())
    samples = [line for line in (trained / "run" / "log.jsonl").read_text().splitlines() if '"A step|' in line]
    assert len(samples) == 2


def test_mlx_lm_reads_back_what_is_exported(trained: Path, tmp_path: Path) -> None:
    faststep("checkpoint", "export", trained / "run", "--adapters", tmp_path / "adapters")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["fine_tune_type"], config["num_layers"], config["lora_parameters"]["rank"]) == ("lora", 1, 4)
    few = tmp_path / "few"  # the same base in four bits, which is what the adapters were trained over
    mlx_lm("convert", "--hf-path", trained / "llama", "--mlx-path", few, "-q", "--q-bits", 4, "--q-group-size", 32)
    model, tokenizer = theirs(str(few), adapter_path=str(tmp_path / "adapters"))
    built = build(validate({**config_of(trained), "folder": str(trained)}))
    mine: Any = built.step.model
    mine.load_weights(list(weights_of(trained / "run/checkpoints/step-00000006/model.safetensors").items()))
    assert mx.array_equal(model(TOKENS), mine.eval()(TOKENS))
    plain, _ = theirs(str(few))
    assert not mx.allclose(plain(TOKENS), model(TOKENS), atol=1e-3)
    common = ("--model", few, "--adapter-path", tmp_path / "adapters")
    said = mlx_lm("generate", *common, "--prompt", "A step", "--max-tokens", 8, "--temp", 0, "--verbose", "False")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "A step"}], add_generation_prompt=True, tokenize=False
    )
    assert mine.complete(chat, 8).strip() == said.strip()
    mlx_lm("fuse", *common, "--save-path", tmp_path / "theirs", "--dequantize")
    faststep("checkpoint", "export", trained / "run", "--fuse", tmp_path / "ours")
    fused = [theirs(str(tmp_path / name))[0] for name in ("theirs", "ours")]
    assert mx.allclose(fused[0](TOKENS), fused[1](TOKENS), rtol=1e-4, atol=1e-5)  # of another BLAS
    assert np.allclose(np.array(fused[1](TOKENS)), np.array(mine(TOKENS)), rtol=1e-3, atol=1e-3)
    assert "quantization" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    assert load(tmp_path / "ours", lora=Lora()).origin.adapters is not None
    few_bits = ("checkpoint", "export", trained / "run", "--fuse", tmp_path / "eight", "--bits", 8, "--group-size", 32)
    assert "warning" not in faststep(*few_bits).stderr
    eight = theirs(str(tmp_path / "eight"))[0]
    assert json.loads((tmp_path / "eight" / "config.json").read_text())["quantization"]["bits"] == 8
    assert eight.layers[-1].self_attn.q_proj.bits == 8
    assert mx.allclose(eight(TOKENS), fused[1](TOKENS), rtol=0.05, atol=0.05)


def test_adapters_go_on(trained: Path, tmp_path: Path) -> None:
    first = load(trained / "llama", lora=Lora(rank=2, keys=["mlp.up_proj"]), dora=True)
    for name, each in first.named_modules():
        if "lora_b" in each:
            each.lora_b = mx.random.normal(each.lora_b.shape, key=mx.random.key(len(name)))
    export_adapters(first, tmp_path / "adapters")
    second = load(trained / "llama", adapters=tmp_path / "adapters")
    assert mx.array_equal(first.eval()(TOKENS), second.eval()(TOKENS))
    assert first.origin.adapters == second.origin.adapters
    assert mx.array_equal(
        theirs(str(trained / "llama"), adapter_path=str(tmp_path / "adapters"))[0](TOKENS), second(TOKENS)
    )
    assert (
        dict(tree_flatten(first.trainable_parameters())).keys()
        == dict(tree_flatten(second.trainable_parameters())).keys()
    )


def test_adapters_of_mlx_lm_are_taken(trained: Path, tmp_path: Path) -> None:
    model, _ = theirs(str(trained / "llama"))
    model.freeze()
    parameters = {"rank": 3, "scale": 5.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, parameters)
    adapters = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), adapters)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    taken = load(trained / "llama", adapters=tmp_path).trainable_parameters()
    assert all(mx.array_equal(array, adapters[name]) for name, array in tree_flatten(taken))


def test_adapters_of_another_model_are_refused(trained: Path, tmp_path: Path) -> None:
    other = new_folder(tmp_path / "other")
    adapters = trained / "run" / "adapters"
    load(other, adapters=adapters)  # an equal model has equal weights
    weights = weights_of(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    mx.save_safetensors(str(other / "model.safetensors"), weights)
    with pytest.raises(
        ValueError, match=r"adapters: .* was trained on another model: on that in .*llama, whose weights"
    ):
        load(other, adapters=adapters)
    theirs_, config = tmp_path / "theirs", json.loads((adapters / "adapter_config.json").read_text())
    theirs_.mkdir()
    del config["faststep"]  # as mlx-lm writes it
    (theirs_ / "adapter_config.json").write_text(json.dumps(config))
    wrong = {
        name.replace("layers.1", "layers.0"): array
        for name, array in weights_of(adapters / "adapters.safetensors").items()
    }
    mx.save_safetensors(str(theirs_ / "adapters.safetensors"), wrong)
    with pytest.raises(ValueError, match=r"adapters: .* is of another model: only one of both has model.layers.0"):
        load(other, adapters=theirs_)
    wrong = {name: array[:, :2] for name, array in weights_of(adapters / "adapters.safetensors").items()}
    mx.save_safetensors(str(theirs_ / "adapters.safetensors"), wrong)
    with pytest.raises(ValueError, match=r"is of another model: model.layers.1.* is \[64, 2\], expected \[64, 4\]"):
        load(other, adapters=theirs_)
    config["lora_parameters"] = {"r": 4}
    (theirs_ / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="expected lora or dora with num_layers, rank, scale and dropout"):
        load(other, adapters=theirs_)


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(trained: Path) -> None:
    config = config_of(trained)
    config["model"]["checkpoint"], config["model"]["lora"]["dropout"] = True, 0.1
    config["step"]["accumulate"], config["checkpoints"] = 2, {"every": 2}
    config["callbacks"] = [{"use": "adapters"}, {"use": "mine.py:KillOnce", "at": 5, "file": str(trained / "killed")}]
    (trained / "mine.py").write_text(CALLBACKS)
    (trained / "killed.yaml").write_text(json.dumps(config))
    runs = [trained / "killed_once", trained / "left_alone"]
    faststep("train", trained / "killed.yaml", *set_(run=str(runs[0])), status=-signal.SIGKILL)
    faststep("resume", runs[0])
    faststep("train", trained / "killed.yaml", *set_(run=str(runs[1])))
    assert checksums(runs[0]) == checksums(runs[1])
    adapters = [weights_of(run / "adapters" / "adapters.safetensors") for run in runs]
    assert all(mx.array_equal(array, adapters[1][name]) for name, array in adapters[0].items())


def test_a_base_that_has_moved_and_the_layers_old_name(trained: Path, tmp_path: Path) -> None:
    moved, out = tmp_path / "moved", tmp_path / "adapters"
    shutil.copytree(trained / "llama", moved)
    faststep("checkpoint", "export", trained / "run", "--adapters", out, "--set", f"model.path={moved}")
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["model"] == str(moved)
    before = load(moved, adapters=out)
    config["lora_layers"] = config.pop("num_layers")  # as mlx-lm's first releases wrote it
    (out / "adapter_config.json").write_text(json.dumps(config))
    assert mx.array_equal(load(moved, adapters=out)(TOKENS), before(TOKENS))


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_peft(trained: Path, tmp_path: Path, dora: bool) -> None:
    """What is written is read again; the product is PEFT's: W x + lora_alpha / r * B A x."""
    lora = Lora(rank=4, scale=3.0, layers=1, keys=["self_attn.q_proj", "mlp.up_proj"])
    model: Any = load(trained / "llama", lora=lora, dora=dora)
    layer = model.model.layers[-1].self_attn.q_proj
    layer.lora_b, layer.lora_a = (mx.random.normal(each.shape, scale=0.1) for each in (layer.lora_b, layer.lora_a))
    export_adapters(model, tmp_path / "peft", new=True, peft=True)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_dora"]) == ("LORA", 4, 12.0, dora)
    assert "model.layers.1.self_attn.q_proj" in config["target_modules"]
    arrays = weights_of(tmp_path / "peft" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    a, b = arrays[f"{name}.lora_A.weight"], arrays[f"{name}.lora_B.weight"]
    x = mx.random.normal((3, 64))
    if not dora:
        expected = layer.linear(x) + config["lora_alpha"] / config["r"] * (x @ a.T @ b.T)
        assert mx.allclose(layer(x), expected, rtol=1e-4, atol=1e-5)
    again = load(trained / "llama", adapters=tmp_path / "peft")
    assert again.origin.adapters is not None
    assert again.origin.adapters["num_layers"] == 1
    assert mx.array_equal(again(TOKENS), model(TOKENS))
    config |= {"use_rslora": True, "lora_alpha": 6.0}  # over the root of the rank: the same factor
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    assert mx.array_equal(load(trained / "llama", adapters=tmp_path / "peft")(TOKENS), model(TOKENS))
    for change, message in (
        ({"peft_type": "IA3"}, "expected adapters of the type LORA, got 'IA3'"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern: mlx-lm has one rank and scale"),
        ({"bias": "all"}, "bias: mlx-lm has one rank"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' has changed the base's weights"),
    ):
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            load(trained / "llama", adapters=tmp_path / "peft")


def test_exports_write_over_nothing(trained: Path, tmp_path: Path) -> None:
    done = faststep("checkpoint", "export", trained / "run", "--adapters", tmp_path / "x", "--bits", 4, status=2)
    assert "--bits: expected with --fuse" in done.stderr
    done = faststep("checkpoint", "export", trained / "run", "--fuse", tmp_path / "x", "--bits", 7, status=2)
    assert "quantize: " in done.stderr
    (tmp_path / "adapters.safetensors").write_text("mine")
    assert (
        "there is such a file"
        in faststep("checkpoint", "export", trained / "run", "--adapters", tmp_path, status=2).stderr
    )
    assert (
        "there is such a file" in faststep("checkpoint", "export", trained / "run", "--fuse", tmp_path, status=2).stderr
    )
    assert [each.name for each in tmp_path.iterdir()] == ["adapters.safetensors"]
    with pytest.raises(FileExistsError):
        export_fused(load(trained / "llama"), tmp_path)
    with pytest.raises(ValueError, match="was trained without lora"):
        export_adapters(load(trained / "llama"), tmp_path / "new")
    assert (
        "expected one of FILE, --adapters DIR, --peft DIR and --fuse DIR, got 0"
        in faststep("checkpoint", "export", "run", status=2).stderr
    )


def test_the_callback_leaves_what_is_not_its_own(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "adapters").mkdir(parents=True)
    (tmp_path / "run" / "adapters" / "adapters.safetensors").write_text("mine")
    done = faststep("train", trained / "config.yaml", "--set", f"run={tmp_path / 'run'}", status=1)
    assert "found files of yours: choose another run" in done.stderr
    assert (tmp_path / "run" / "adapters" / "adapters.safetensors").read_text() == "mine"


def test_what_rounding_takes_back_is_told(trained: Path, tmp_path: Path) -> None:
    """A change below half a step of the few bits is gone where they are the base's own."""
    model = load(trained / "llama", Quantize(bits=4, group_size=32), Lora(rank=2))
    expected = model.eval()(TOKENS)
    for name, array in tree_flatten(model.trainable_parameters()):
        model.load_weights([(name, mx.full(array.shape, 1e-3))], strict=False)
    assert not mx.array_equal(model(TOKENS), expected)
    with pytest.warns(UserWarning, match=r"^-?\d+% of what the adapters have changed is left in 4 bits"):
        export_fused(model, tmp_path / "four", quantize=Quantize(bits=4, group_size=32))
    again = load(trained / "llama", Quantize(mode="mxfp4"), Lora(rank=2))
    expected = again.eval()(TOKENS)
    plain, _ = theirs(str(export_fused(again, tmp_path / "plain")))
    assert mx.allclose(plain(TOKENS), expected, rtol=1e-3, atol=1e-3)


def test_a_fused_model_in_few_bits_is_plain(trained: Path, tmp_path: Path) -> None:
    model = load(trained / "llama", Quantize(bits=8, group_size=32))
    expected = model.eval()(TOKENS)
    fused, tokenizer = theirs(str(export_fused(model, tmp_path / "plain")))
    assert mx.allclose(fused(TOKENS), expected, rtol=1e-3, atol=1e-3)
    assert tokenizer.decode(tokenizer.encode("A step")) == "A step"
