"""A config is read strictly: each mistake is named, with its line, and all of them at once."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from faststep.config import Component, Config, ConfigError, load, validate
from support.configs import GOOD

# Replacements of a line of GOOD, and the error for each.
MISTAKES = {
    "unknown section": (
        "  steps: 10",
        "  steps: 10\nlorra: {rank: 4}",
        "c.yaml:11: lorra: unknown key 'lorra': did you",
    ),
    "unknown key": (
        "  batch_size: 4",
        "  batch_sise: 4",
        "c.yaml:5: data.batch_sise: unknown key 'batch_sise': did you",
    ),
    "unlike any key": (
        "  steps: 10",
        "  steps: 10\n  xyz: 1",
        "c.yaml:11: train.xyz: unknown key 'xyz': expected one of e",
    ),
    "text": ("  batch_size: 4", "  batch_size: four", "c.yaml:5: data.batch_size: expected a whole number, got 'four'"),
    "fraction": ("  batch_size: 4", "  batch_size: 4.5", "c.yaml:5: data.batch_size: expected a whole number, got 4.5"),
    "truth": ("  batch_size: 4", "  batch_size: true", "c.yaml:5: data.batch_size: expected a whole number, got true"),
    "nothing": ("  batch_size: 4", "  batch_size:", "c.yaml:5: data.batch_size: expected a whole number, got null"),
    "range": ("  batch_size: 4", "  batch_size: 0", "c.yaml:5: data.batch_size: expected a number from 1 on, got 0"),
    "infinite": (
        "  steps: 10",
        "  steps: 10\nstep: {max_grad_norm: .inf}",
        "step.max_grad_norm: expected a finite number",
    ),
    "below": ("  steps: 10", "  steps: 10\nstep: {ema_decay: 1}", "step.ema_decay: expected a number below 1"),
    "yes": ("  batch_size: 4", "  shuffle: yes", "c.yaml:5: data.shuffle: expected true or false, got 'yes'"),
    "choice": ("  steps: 10", "  steps: 10\nstep: {nonfinite: skp}", "expected 'skip', 'raise' or 'allow', got 'skp'"),
    "list": ("  steps: 10", "  steps: 10\nfrozen: blocks", "c.yaml:11: frozen: expected a list, got 'blocks'"),
    "empty text": ("  steps: 10", '  steps: 10\nfrozen: [""]', "c.yaml:11: frozen.0: expected text that is not empty"),
    "empty list": (
        "optimizer:\n  use: AdamW\n  learning_rate: 1e-3",
        "optimizer: []",
        "optimizer: expected a list that is",
    ),
    "no mapping": (
        "loss: {use: mse}",
        "loss: mse",
        "c.yaml:2: loss: expected a mapping such as {use: 'mse'}, got 'mse'",
    ),
    "missing": ("loss: {use: mse}\n", "", "c.yaml:1: loss: missing"),
    "no use": ("loss: {use: mse}", "loss: {a: 1}", "c.yaml:2: loss.use: missing"),
    "twice": (
        "  batch_size: 4",
        "  batch_size: 4\n  batch_size: 4",
        "c.yaml:6: data.batch_size: set twice, the first time",
    ),
    "no end": ("train:\n  steps: 10\n", "", "train: expected steps, epochs or max_time, got none"),
    "recipe": ("use: mlp", "use: mpl", "c.yaml:1: model.use: unknown model 'mpl': did you mean 'mlp'?"),
    "argument": ("sizes:", "size:", "c.yaml:1: model.size: unknown key 'size': did you mean 'sizes'?"),
    "no argument": (", sizes: [8, 4]", "", "c.yaml:1: model.sizes: missing"),
    "argument's type": ("[8, 4]", "[8, four]", "model.sizes: expected a whole number, got 'four'"),
    "optimizer": (
        "use: AdamW",
        "use: adamw",
        "c.yaml:7: optimizer.use: unknown optimizer 'adamw': did you mean 'AdamW'?",
    ),
    "quoted rate": ("1e-3", "'1e-3'", "c.yaml:8: optimizer.learning_rate: expected a number or {use: ...}, got '1e-3'"),
    "schedule": (
        "1e-3",
        "{use: cosine}",
        "c.yaml:8: optimizer.learning_rate.use: unknown schedule 'cosine': did you mean",
    ),
    "schedule's argument": ("1e-3", "{use: cosine_decay}", "c.yaml:8: optimizer.learning_rate.init: missing"),
    "loss's argument": ("{use: mse}", "{use: huber_loss, d: 1}", "c.yaml:2: loss.d: unknown key 'd': expected one of"),
    "collate's argument": ("  batch_size: 4", "  collate: {use: pack}", "c.yaml:5: data.collate.length: missing"),
    "options": ("  steps: 10", "  steps: 10\nlogs: {wandb: x}", "c.yaml:11: logs.wandb: expected a mapping, got 'x'"),
    "callback": (
        "  steps: 10",
        "  steps: 10\ncallbacks: [{use: X}]",
        "unknown callback 'X': expected one of adapters, gradient_norms, reduce_on_plateau, samples (the user's",
    ),
    "patterns alone": (
        "  learning_rate: 1e-3",
        "  learning_rate: 1\n  parameters: a",
        "c.yaml:9: optimizer.parameters: the only",
    ),
    "no weight": (
        "  steps: 10",
        "  steps: 10\nstep: {weighted: true}",
        "c.yaml:11: step.weighted: expected a loss that gives",
    ),
    "tag": (
        "loss: {use: mse}",
        "loss: !!python/object:os.system {}",
        "c.yaml:2: loss: expected plain values, got the tag",
    ),
    "binary": ("  batch_size: 4", "  batch_size: !!binary aGk=", "data.batch_size: expected plain values, got the tag"),
    "no YAML": ("loss: {use: mse}", "loss: {use: mse", "c.yaml:3: expected YAML: "),
    "no key": ("loss: {use: mse}", "3: {use: mse}", "c.yaml:2: expected text for a key, got '3'"),
}
# Settings that nothing reads, and why.
UNREAD = {
    "train: {steps: 1, validate_every: 100}": "train.validate_every: set, but nothing reads it: there is no",
    "train: {steps: 1, validation_batches: 3}": "train.validation_batches: set, but nothing reads it",
    "train: {steps: 1, patience: 3}": "train.patience: set, but nothing reads it: there is no data.validation",
    "train: {steps: 1, min_delta: 0.1}": "train.min_delta: set, but nothing reads it: train.patience is not set",
    "checkpoints: {keep_best: 1}": "checkpoints.keep_best: set, but nothing reads it: there is no data.validation",
    "step: {nonfinite: allow, max_loss: 5}": "step.max_loss: set, but nothing reads it: nonfinite: allow takes",
    "step: {compile: false, max_traces: 5}": "step.max_traces: set, but nothing reads it: without compile",
    "lora: {rank: 2}\nfrozen: ['*']": "frozen: set, but nothing reads it: lora freezes all",
}


def written(folder: Path, text: str) -> Path:
    """Write a config."""
    file = folder / "c.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(folder: Path, text: str, *overrides: str) -> str:
    """Return what is said of a config that cannot be used."""
    with pytest.raises(ConfigError) as caught:
        load(written(folder, text), overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    old, new, expected = MISTAKES[name]
    assert old in GOOD
    message = refusal(tmp_path, GOOD.replace(old, new))
    assert expected in message
    assert str(tmp_path) in message


@pytest.mark.parametrize("setting", UNREAD)
def test_what_is_set_and_not_read_is_an_error(tmp_path: Path, setting: str) -> None:
    text = setting if "train:" in setting else f"{setting}\ntrain: {{steps: 1}}"
    message = refusal(tmp_path, GOOD.replace("train:\n  steps: 10\n", text))
    assert UNREAD[setting] in message
    assert "errors" not in message


def test_what_is_not_read_where_it_could_be_is_read_where_it_can_be(tmp_path: Path) -> None:
    validation = GOOD.replace(
        "  batch_size: 4", "  validation: {use: arrays, file: data.npz}\n  workers: 1\n  prefetch: 3"
    )
    config = load(written(tmp_path, validation), ["train.patience=3", "train.min_delta=0.1", "checkpoints.keep_best=2"])
    assert (config.train.patience, config.train.min_delta, config.checkpoints.keep_best) == (3, 0.1, 2)
    assert "prefetch: set, but nothing reads it" in refusal(tmp_path, validation, "data.workers=0")


def test_all_mistakes_are_listed_in_the_order_of_lines(tmp_path: Path) -> None:
    text = GOOD.replace("mse", "mes").replace("batch_size: 4", "batch_sise: 4").replace("[8, 4]", "8")
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert [problem.path for problem in caught.value.problems] == [
        ("model", "sizes"),
        ("loss", "use"),
        ("data", "batch_sise"),
    ]
    assert str(caught.value).startswith("3 errors in the config:\n")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(path)
    (tmp_path / "latin.yaml").write_bytes("run: \xe9".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: expected YAML"):
        load(tmp_path / "latin.yaml")
    for text in ("", "# nothing", "[1, 2]", "text"):
        assert refusal(tmp_path, text)


def test_overrides(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD)
    lists = "optimizer=[{use: Muon, parameters: '*.weight', learning_rate: 0.1}, {use: SGD, learning_rate: 0.1}]"
    overrides = [
        "train.steps=20",
        "lora.rank=2",
        "model.sizes.0=16",
        "step={accumulate: 2}",
        lists,
        "optimizer.1.learning_rate=1e-4",
    ]
    config = load(file, overrides)
    assert (config.train.steps, config.step.accumulate, config.model.arguments["sizes"]) == (20, 2, [16, 4])
    assert config.lora is not None
    assert config.lora.rank == 2
    assert isinstance(config.optimizer, list)
    assert config.optimizer[1].arguments["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=x", "override 'train.steps=x': train.steps: expected a whole number, got 'x'"),
        ("train.stepz=1", "override 'train.stepz=1': train.stepz: unknown key 'stepz': did you mean 'steps'?"),
        ("train.steps", "override 'train.steps': expected key=value"),
        ("=3", "override '=3': expected key=value"),
        ("train..steps=3", "expected key=value"),
        ("seed.a=3", "override 'seed.a=3'"),
        ("train.steps.a=3", "override 'train.steps.a=3': train.steps: expected something with the key 'a', got 10"),
        ("model.sizes.7=3", "expected something with the key '7', got a list of 2"),
        ("model.sizes.x=3", "expected something with the key 'x', got a list of 2"),
        ("model={use: [", "override 'model={use: [':1: expected YAML"),
        ("optimizer.beta=1", "override 'optimizer.beta=1': optimizer.beta: unknown key 'beta': did you mean 'betas'?"),
    ],
)
def test_errors_of_overrides_name_the_override(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in refusal(tmp_path, GOOD, override)


def test_defaults_and_where_it_is(tmp_path: Path) -> None:
    config = load(written(tmp_path, GOOD))
    assert (config.run, config.folder, config.seed) == ("runs/c", str(tmp_path), 0)
    assert config.data.collate == Component(use="stack")
    assert (config.step.max_grad_norm, config.step.max_loss, config.step.nonfinite) == (1.0, 1e6, "skip")
    assert load(written(tmp_path, GOOD + "folder: data\n")).folder == str(tmp_path / "data")


def test_what_is_resolved_loads_to_the_same_config(tmp_path: Path) -> None:
    for override in ("step.nonfinite=allow", "lora.rank=3", "quantize={}", "frozen=['*.bias']"):
        config = load(written(tmp_path, GOOD), [override])
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        again = load(written(elsewhere, config.text()))
        assert again == config
        assert again.resolved() == config.resolved() == json.loads(json.dumps(config.resolved()))
    assert "max_loss" not in load(written(tmp_path, GOOD), ["step.nonfinite=allow"]).resolved()["step"]


def test_a_config_from_python() -> None:
    values = {
        "model": {"use": "mlp", "sizes": [8, 4]},
        "loss": {"use": "mse"},
        "data": {"train": {"use": "arrays", "file": "data.npz"}},
        "optimizer": {"use": "SGD", "learning_rate": 0.1},
        "train": {"steps": 1},
    }
    kept = copy.deepcopy(values)
    assert validate(values).resolved() == validate(validate(values).resolved()).resolved()
    assert values == kept
    with pytest.raises(ConfigError, match=r"(?m)^data\.train\.files: unknown key"):
        validate({**values, "data": {"train": {"use": "arrays", "files": "data.npz"}}})


def test_editors_get_a_schema() -> None:
    schema = Config.model_json_schema()
    assert set(schema["required"]) == {"model", "loss", "data", "optimizer"}
    assert schema["additionalProperties"] is False
    json.dumps(schema)


def test_the_package_needs_no_extra_but_says_so_where_it_does() -> None:
    code = "import sys; sys.modules['pydantic'] = None; import faststep; import faststep.config"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'mlx-faststep[train]'" in done.stderr.splitlines()[-1]
    code = "import sys, faststep.config; print([m for m in ('matplotlib', 'rich', 'tensorboardX') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
