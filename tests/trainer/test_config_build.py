"""Objects that a config builds: the parts that it names, in the right order, with the user's own among them."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import recipes
from faststep.config import ConfigError, build, load
from faststep.report import read_log
from faststep.training import Trainer
from mlx.utils import tree_flatten
from support.configs import GPT, MLP, config, make, refusal, train, trainable
from support.places import ROOT

EXAMPLE = ROOT / "examples" / "char_gpt.yaml"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (GPT, []),
        (GPT, ["step.weighted=true", "step.accumulate=2", "step.ema_decay=0.9"]),
        (GPT, ["data.collate={use: pad, multiple: 8}", "data.workers=1", "step.compute_dtype=bfloat16"]),
        (MLP, []),
        (MLP, ["loss={use: mse}", "data.train.names=[x, y]"]),
        (MLP, ["loss={use: huber_loss, delta: 0.5}", "data.train.names=[x, y]", "model.dropout=0"]),
        (MLP, ["step.gradient_checkpointing=['layers.0']", "optimizer={use: SGD, learning_rate: 0.1, momentum: 0.9}"]),
    ],
)
def test_it_trains_the_same_each_time(tmp_path: Path, text: str, overrides: list[str]) -> None:
    first, again = (train(make(tmp_path, text, "seed=3", *overrides)) for _ in range(2))
    assert len(first) == 3
    assert all(np.isfinite(first))
    assert first == again
    assert first != train(make(tmp_path, text, "seed=4", *overrides))


def test_everything_is_seeded(tmp_path: Path) -> None:
    built = config(tmp_path, MLP, "seed=11")
    drawn = []
    for _ in range(2):
        build(built)
        drawn.append((random.random(), np.random.rand(), mx.random.uniform().item()))
    assert drawn[0] == drawn[1]


def test_the_example_is_what_its_program_does() -> None:
    built = build(load(EXAMPLE, ["train.steps=800"]))
    assert type(built.step.model) is recipes.GPT
    assert built.step.loss_fn.__module__.startswith("char_gpt")
    rate = optim.join_schedules([optim.linear_schedule(0.0, 3e-3, 50), optim.cosine_decay(3e-3, 750, 1.5e-4)], [50])
    schedule = built.step.optimizer._schedulers["learning_rate"]
    assert [schedule(mx.array(i)).item() for i in (0, 20, 49, 50, 400, 800)] == pytest.approx(
        [rate(mx.array(i)).item() for i in (0, 20, 49, 50, 400, 800)]
    )
    assert built.validation is not None
    assert train(built, 1)[0] == pytest.approx(6, abs=1)


def test_options_are_those_of_the_trainer(tmp_path: Path) -> None:
    validation = "data.validation={use: arrays, file: rows.npz, stop: 8, names: [x, label]}"
    built = make(tmp_path, MLP, validation, "train.patience=3", "run=runs/x")
    names = {"step", "loader", "validation", "metrics", "callbacks", "loggers", "config"}
    names |= {"load_best_at_end", "fast_dev_run"}  # commands take --best and --fast-dev-run
    assert set(built.options) == set(inspect.signature(Trainer).parameters) - names
    assert (built.options["run"], built.options["steps"], built.options["patience"]) == ("runs/x", 3, 3)
    assert built.logs == {"csv": False, "tensorboard": False, "wandb": None, "mlflow": None, "trackio": None}
    assert built.config == config(tmp_path, MLP, validation, "train.patience=3", "run=runs/x").resolved()
    assert len(built.validation or ()) == 2


SCHEDULES = {
    "1e-3": lambda step: 1e-3,
    "{use: cosine_decay, init: 0.1}": optim.cosine_decay(0.1, 20),
    "{use: cosine_decay, init: 0.1, decay_steps: 5, end: 0.01}": optim.cosine_decay(0.1, 5, 0.01),
    "{use: linear_schedule, init: 0.1, end: 0}": optim.linear_schedule(0.1, 0, 20),
    "{use: exponential_decay, init: 0.1, decay_rate: 0.9}": optim.exponential_decay(0.1, 0.9),
    "{use: step_decay, init: 0.1, decay_rate: 0.5, step_size: 4}": optim.step_decay(0.1, 0.5, 4),
    "{use: constant, init: 0.1, warmup: 4, warmup_init: 0.02}": optim.join_schedules(
        [optim.linear_schedule(0.02, 0.1, 4), lambda step: mx.array(0.1)], [4]
    ),
    "{use: cosine_decay, init: 0.1, warmup: 5}": optim.join_schedules(
        [optim.linear_schedule(0, 0.1, 5), optim.cosine_decay(0.1, 15)], [5]
    ),
    "{use: join_schedules, schedules: [{use: linear_schedule, init: 0, end: 0.1}, {use: cosine_decay, init: 0.1}],"
    " boundaries: [6]}": optim.join_schedules([optim.linear_schedule(0, 0.1, 6), optim.cosine_decay(0.1, 14)], [6]),
    "{use: own.py:halving}": lambda step: 0.1 * 0.5**step,
    "{use: own.py:scaled, factor: 3}": lambda step: 3 * 0.1 * 0.5**step,
    "{use: own.py:Schedule, init: 0.2}": lambda step: 0.2,
}
OWN = """
    def halving(step):
        return 0.1 * 0.5**step
    def scaled(step, factor):
        return factor * halving(step)
    class Schedule:
        def __init__(self, init): self.init = init
        def __call__(self, step): return self.init + 0 * step
"""


@pytest.mark.parametrize("rate", SCHEDULES)
def test_schedules(tmp_path: Path, rate: str) -> None:
    built = make(tmp_path, MLP, f"optimizer.learning_rate={rate}", "train.steps=20", own=OWN)
    schedule = built.step.optimizer._schedulers.get("learning_rate", lambda _: built.step.optimizer.learning_rate)
    for step in range(0, 25, 3):
        assert float(schedule(mx.array(step))) == pytest.approx(
            float(SCHEDULES[rate](mx.array(step))), rel=1e-5, abs=1e-9
        )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["optimizer.learning_rate={use: cosine_decay, init: 1, warmup: 0}"],
            "learning_rate.warmup: expected a whole number from 1",
        ),
        (
            ["optimizer.learning_rate={use: cosine_decay, init: 1, warmup_init: 0}"],
            "warmup_init: set, but nothing reads it",
        ),
        (
            ["optimizer.learning_rate={use: cosine_decay, init: 1}", "train.steps=null", "train.max_time=1h"],
            "decay_steps: missing: it",
        ),
        (
            ["optimizer.learning_rate={use: cosine_decay, int: 1}"],
            "learning_rate.int: unknown key 'int': did you mean 'init'?",
        ),
        (
            ["optimizer.learning_rate={use: step_decay, init: 1, decay_rate: 1, step_size: 0}"],
            "step_size must be greater than 0",
        ),
        (
            ["optimizer.learning_rate={use: join_schedules, schedules: [{use: constant, init: 1}], boundaries: [1]}"],
            "learning_rate.boundaries: expected 0 growing steps, got [1]",
        ),
        (["optimizer.betas=[2, 0.9]"], "Adam beta1 should be in [0, 1), 2.0 was provided instead"),
        (["model.sizes=[8]"], "override 'model.sizes=[8]': model.sizes: expected two or more"),
        (["data.train.file=none.npz"], "data.train.file: "),
        (["step={nonfinite: raise, compute_dtype: float16}"], "step.nonfinite: expected"),
        (["frozen=[layer]"], "frozen: 'layer' matches no module or parameter; there are layers.0.bias"),
        (["frozen=['*']"], "frozen: nothing in the model is left to train"),
        (["quantize={}"], "quantize.group_size: expected one that divides the last dimension, got 64"),
        (["lora={modules: [x]}"], "lora: 'x' matches no linear layer; there are layers.0, layers.1"),
        (["step={gradient_checkpointing: [x]}"], "step.gradient_checkpointing: 'x' matches no module"),
        (["weights=none.safetensors"], "weights: "),
        (["data.batch_size=100", "data.drop_last=true"], "data.drop_last: no batch is full"),
        (
            ["optimizer=[{use: Muon, learning_rate: 1, parameters: x}, {use: SGD, learning_rate: 1}]"],
            "optimizer.0.parameters: 'x' matches no parameter that is left to train",
        ),
        (
            ["optimizer=[{use: Muon, learning_rate: 1, parameters: ['*']}, {use: SGD, learning_rate: 1}]"],
            "optimizer.1: no parameter is left for the last optimizer",
        ),
        (
            ["optimizer=[{use: Muon, learning_rate: 1}, {use: SGD, learning_rate: 1}]"],
            "optimizer.0: parameters is missing",
        ),
    ],
)
def test_what_cannot_be_built(tmp_path: Path, overrides: list[str], expected: str) -> None:
    message = refusal(tmp_path, MLP, *overrides)
    assert expected in message
    assert "override" in message or "c.yaml:6: optimizer: Adam" in message


def test_several_optimizers_share_the_parameters_out(tmp_path: Path) -> None:
    several = "[{use: Muon, parameters: 'layers.*.weight', learning_rate: 0.1}, {use: AdamW, learning_rate: 0.1}]"
    built = make(tmp_path, MLP, f"optimizer={several}", "frozen=['layers.0.weight']")
    train(built)
    muon, adamw = built.step.optimizer.state["states"]
    assert [path for path, _ in tree_flatten(muon) if path.startswith("layers")] == ["layers.1.weight.v"]
    assert {path.rpartition(".")[0] for path, _ in tree_flatten(adamw) if path.startswith("layers")} == {
        "layers.0.bias",
        "layers.1.bias",
    }


def test_weights_then_few_bits_then_adapters(tmp_path: Path) -> None:
    mx.random.seed(9)
    model = recipes.GPT(2, 64, 4, 16)
    model.save_weights(str(tmp_path / "model.safetensors"))
    overrides = ["weights=model.safetensors", "quantize={modules: ['blocks*']}", "lora={rank: 2, trainable: [norm]}"]
    built = make(tmp_path, GPT, *overrides, "step.gradient_checkpointing=['blocks.*']")
    layer = built.step.model.blocks[0].qkv
    assert isinstance(layer, recipes.LoRALinear)
    assert mx.array_equal(layer.linear.weight, mx.quantize(model.blocks[0].qkv.weight, 64, 4)[0])
    assert trainable(built) == {"norm.weight"} | {
        f"blocks.{i}.{name}.lora_{which}" for i in (0, 1) for name in ("qkv", "out", "up", "down") for which in "ab"
    }
    base = mx.array(layer.linear.weight)
    assert len(train(built)) == 3
    assert mx.array_equal(layer.linear.weight, base)
    assert layer.lora_b.abs().sum().item() > 0


def test_what_few_bits_leave_can_be_frozen(tmp_path: Path) -> None:
    text = MLP.replace("[8, 16, 3]", "[32, 32, 3]").replace("rows.npz, names: [x, label]", "rows.npz")
    assert trainable(make(tmp_path, text, "quantize={group_size: 32}")) == {"layers.0.bias", "layers.1.bias"}
    assert trainable(make(tmp_path, text, "quantize={group_size: 32}", "frozen=['*.0.bias']")) == {"layers.1.bias"}


IN_EPOCHS = {
    "{use: cosine_decay, init: 0.1}": optim.cosine_decay(0.1, 15),
    "{use: cosine_decay, init: 0.1, warmup: 1 epoch}": optim.join_schedules(
        [optim.linear_schedule(0, 0.1, 5), optim.cosine_decay(0.1, 10)], [5]
    ),
    "{use: step_decay, init: 0.1, decay_rate: 0.5, step_size: 2 epochs}": optim.step_decay(0.1, 0.5, 10),
    "{use: join_schedules, schedules: [{use: linear_schedule, init: 0, end: 0.1}, {use: cosine_decay, init: 0.1}],"
    " boundaries: [2 epochs]}": optim.join_schedules(
        [optim.linear_schedule(0, 0.1, 10), optim.cosine_decay(0.1, 5)], [10]
    ),
}


@pytest.mark.parametrize("schedule", IN_EPOCHS)
def test_schedules_in_epochs(tmp_path: Path, schedule: str) -> None:
    """Ten batches, two of them a step: five steps an epoch."""
    parts = ["train={epochs: 3}", "step.accumulate=2", f"optimizer.learning_rate={schedule}"]
    built = make(tmp_path, MLP, *parts)
    made, wanted = built.step.optimizer._schedulers["learning_rate"], IN_EPOCHS[schedule]
    steps = range(16)
    assert [made(mx.array(i)).item() for i in steps] == pytest.approx([wanted(mx.array(i)).item() for i in steps])


STREAM = """
    def rows():
        class Stream:
            def __iter__(self):
                yield from ()
        return Stream()
"""


def test_epochs_of_data_without_a_length_are_refused(tmp_path: Path) -> None:
    parts = ["data.train={use: own.py:rows}", "optimizer.learning_rate={use: constant, init: 1, warmup: 1 epoch}"]
    with pytest.raises(ConfigError, match="warmup: expected a number of steps, got '1 epoch': the data have no length"):
        make(tmp_path, MLP, *parts, own=STREAM)


ZEROS = ["train.validate_every=0", "checkpoints.every=0", "train.stop_after_bad=0", "step.in_flight=0"]


def test_zeros_mean_never(tmp_path: Path) -> None:
    validation = "data.validation={use: arrays, file: rows.npz, stop: 8, names: [x, label]}"
    built = make(tmp_path, MLP, validation, *ZEROS, f"run={tmp_path / 'run'}")
    trainer = Trainer(built.step, built.loader, validation=built.validation, loggers=[], **built.options)
    assert trainer.train().reason == "done"
    log = read_log(tmp_path / "run")
    assert set(log.checkpoints["step"]) == set(log.validations["step"]) == {3}


NONE = """
    class Nothing:
        def on_start(self, trainer): ...
    def loss(model, x, y): return model(x).mean()
    def make_loss(): return loss
"""


@pytest.mark.parametrize("key", ["callbacks=[{use: own.py:Nothing, at: 3}]", "loss={use: own.py:make_loss, at: 3}"])
def test_arguments_of_what_takes_none_are_errors(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="at: unknown key 'at': there are none"):
        make(tmp_path, MLP, key, own=NONE)


TYPED = """
    from pathlib import Path
    from typing import Literal
    def rows(sizes: tuple[int, int], kind: Literal["a", "b"], files: list[Path], rate: float = 1.0):
        assert (sizes, kind, rate) == ((40, 8), "a", 2.0) and type(rate) is float
        assert all(file.is_absolute() for file in files)
        import numpy as np
        return np.zeros(sizes, np.float32), np.zeros(40, np.int32)
"""


def test_arguments_have_the_types_of_their_hints(tmp_path: Path) -> None:
    rows = "data.train={use: own.py:rows, sizes: [40, 8], kind: a, files: [rows.npz], rate: 2}"
    assert len(make(tmp_path, MLP, rows, own=TYPED).loader) == 10
    wrong = "data.train={use: own.py:rows, sizes: [40, x], kind: c, files: [3], rate: fast}"
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, MLP, wrong, own=TYPED)
    text = str(caught.value)
    for expected in (
        "sizes: expected a whole number, got 'x'",
        "kind: expected 'a' or 'b', got 'c'",
        "rate: expected a number",
    ):
        assert expected in text
    assert len(caught.value.problems) == 4


def test_a_training_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    first = make(tmp_path, MLP, f"run={tmp_path / 'first'}")
    Trainer(first.step, first.loader, loggers=[], **first.options).train()
    wanted = dict(tree_flatten(first.step.model.parameters()))
    for weights in ("first", "first/checkpoints", "first/checkpoints/step-00000003"):
        second = make(tmp_path, MLP, f"weights={weights}", f"run={tmp_path / 'second'}", "seed=5")
        for name, array in tree_flatten(second.step.model.parameters()):
            assert mx.array_equal(array, wanted[name]).item()
        assert second.step.optimizer.state["step"].item() == 0
    with pytest.raises(ConfigError, match="weights: expected a run or a checkpoint, found none"):
        make(tmp_path, MLP, "weights=.")
    with pytest.raises(ConfigError, match=r"weights: .* has other weights than the model"):
        make(tmp_path, MLP, "weights=first", "model.sizes=[8, 4, 3]")


def test_names_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` and variables stand for what they do in a shell, in every path of a config."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DATA", "sets")
    (tmp_path / "home" / "sets").mkdir(parents=True)
    np.savez(tmp_path / "home" / "sets" / "mine.npz", x=np.ones((8, 4), np.float32), y=np.zeros(8, np.int32))
    (tmp_path / "home" / "model.py").write_text("import mlx.nn as nn\n\ndef make():\n    return nn.Linear(4, 2)\n")
    text = """
model: {use: "~/model.py:make"}
loss: {use: cross_entropy}
data: {train: {use: arrays, file: "~/${DATA}/mine.npz"}}
optimizer: {use: SGD, learning_rate: 0.1}
train: {steps: 1}
run: ~/runs/$DATA
"""
    loaded = config(tmp_path, text)
    assert loaded.run == str(tmp_path / "home" / "runs" / "sets")
    assert train(build(loaded))
    assert "c.yaml:7: run: expected a path, '~/runs/$NOPE' names the variable NOPE, which is not set" in refusal(
        tmp_path, text.replace("DATA", "NOPE")
    )
    assert "data.train.file: expected a path, '~/${NOPE}/mine.npz' names the variable NOPE" in refusal(
        tmp_path, text.replace("${DATA}", "${NOPE}").replace("runs/$DATA", "runs")
    )


def test_an_item_too_long_for_its_row_is_told_before_training(tmp_path: Path) -> None:
    code = "import numpy as np\n\ndef rows():\n    return [np.arange(3), np.arange(9)]\n"
    options = ["data.train={use: 'rows.py:rows'}", "data.collate={use: pack, length: 4}"]
    told = refusal(tmp_path, GPT, *options, rows=code)
    assert "data.collate: train: Pack: a document of 9 tokens does not fit into a row of 4" in told
    assert told.endswith("(faststep.data: item 1)")
    assert len(make(tmp_path, GPT, *options, "data.collate.split=true", rows=code).loader) == 1
