"""Metrics beside numbers by hand: where they come from, how they are averaged, and where they are seen."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.config import ConfigError, build, load
from faststep.data import Loader
from faststep.loggers import Csv, Progress, TensorBoard
from faststep.metrics import LossWithMetrics, OfAll, OfLoss, accuracy, perplexity, scikit_learn
from faststep.report import compare, read_log, report
from faststep.training import Callback, Trainer, TrainingError, predict, validate

sklearn = pytest.importorskip("sklearn.metrics")

ROWS, CLASSES = 40, 3


def data(rows: int = ROWS, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 6), dtype=np.float32)
    return x, x[:, :CLASSES].argmax(axis=1).astype(np.int32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        return self.last(self.dropout(nn.relu(self.first(x))))


def right(logits: mx.array, y: mx.array) -> mx.array:
    return (logits.argmax(axis=-1) == y).astype(mx.float32)


def with_dict(model: nn.Module, x: mx.array, y: mx.array) -> Any:
    logits = model(x)
    loss = nn.losses.cross_entropy(logits, y, reduction="mean")
    return loss, {"loss": loss, "accuracy": right(logits, y).mean(), "logits": logits}


def with_outputs(model: nn.Module, x: mx.array, y: mx.array) -> Any:
    logits = model(x)
    return nn.losses.cross_entropy(logits, y, reduction="mean"), logits


SCALE = {"scale": 1.0}


def with_scale(model: nn.Module, x: mx.array, y: mx.array) -> Any:
    loss, logits = with_outputs(model, x, y)
    return loss * SCALE["scale"], logits


def new_step(loss: Callable[..., Any], **options: Any) -> Step:
    mx.random.seed(5)
    return Step(Net(), optim.AdamW(1e-2), loss, **options)


def new_trainer(run: Path, step: Step, **options: Any) -> Trainer:
    loader = Loader(data(), batch_size=8, shuffle=True, seed=1)
    validation = Loader(data(20, seed=4), batch_size=16)
    parts = {"loggers": [], "checkpoint_every": 0, "validation": validation, "epochs": 2, "validate_every": 5}
    return Trainer(step, loader, run=run, **(parts | options))


def test_what_the_loss_returns_is_averaged_and_seen_everywhere(tmp_path: Path, capsys: Any) -> None:
    by_hand = new_step(with_dict)
    loader = Loader(data(), batch_size=8, shuffle=True, seed=1)
    found = [by_hand(*batch).aux[0]["accuracy"].item() for _ in range(2) for batch in loader]
    run, step = tmp_path / "run", new_step(with_dict)
    files = [Csv(run / "steps.csv"), Csv(run / "validations.csv", "validation"), TensorBoard(run / "tensorboard")]
    parts = {"log_every": 5, "loggers": [Progress(), *files]}
    result = new_trainer(run, step, **parts).train()
    assert step.stats.mode == "native"

    log = read_log(run)
    assert log.steps["metrics.accuracy"].tolist() == found
    assert log.metrics == ["accuracy"]
    assert log.intervals.step.tolist() == [1, 5, 10]  # the first step at once
    told = log.steps.step.searchsorted(log.intervals.step, "right")
    assert log.intervals["metrics.accuracy"][0] == found[0]
    assert log.intervals["metrics.accuracy"][1] == pytest.approx(np.mean(found[1 : told[1]]))
    x, y = map(mx.array, data(20, seed=4))
    step.model.eval()
    expected = right(step.model(x), y).mean().item()
    assert log.validations["metrics.accuracy"][-1] == pytest.approx(expected)
    assert validate(step, Loader((x, y), batch_size=16)).metrics == {"accuracy": pytest.approx(expected)}
    assert result.metrics["val/accuracy"] == pytest.approx(expected)
    assert result.metrics.keys() == {"train/loss", "train/accuracy", "val/loss", "val/accuracy"}

    rows = list(csv.DictReader((run / "steps.csv").read_text().splitlines()))
    assert [float(row["accuracy"]) for row in rows] == found
    rows = list(csv.DictReader((run / "validations.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [5, 10]
    assert float(rows[-1]["accuracy"]) == pytest.approx(expected)
    events = b"".join(each.read_bytes() for each in (run / "tensorboard").iterdir())
    assert b"train/accuracy" in events
    assert b"val/accuracy" in events
    shown = capsys.readouterr().out
    assert "step 1/10 | epoch 1/2 | loss" in shown
    assert f", accuracy {expected:.4f}, 2 batches in" in shown
    page = report(run).read_text()
    assert "<h3>Accuracy</h3>" in page
    assert "last accuracy" in page
    both = compare([run, run], tmp_path / "compare.html").read_text()
    assert both.count("<h3>Validation accuracy</h3>") == 2


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"weighted": True}, {"accumulate": 2, "weighted": True}])
def test_functions_are_traced_with_the_loss_and_weighed_like_it(tmp_path: Path, options: dict[str, Any]) -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> Any:
        loss, logits = with_outputs(model, x, y)
        return (loss, mx.abs(x).sum(), logits) if options.get("weighted") else (loss, logits)

    loader = Loader(data(), batch_size=8, shuffle=True, seed=1)
    by_hand, values = new_step(loss_fn, **options), []
    for x, y in loader:
        out = by_hand(x, y)
        weight = 1.0 if out.weight is None else out.weight.item()
        values.append((out.loss.item(), right(out.aux[0], y).mean().item(), weight))
    by_hand.flush()
    size = options.get("accumulate", 1)
    windows = [values[at : at + size] for at in range(0, len(values), size)]
    means = [np.average(np.array(each)[:, :2], axis=0, weights=np.array(each)[:, 2]) for each in windows]

    step = new_step(loss_fn, **options)
    metrics = {"accuracy": accuracy(), "bits": OfLoss(lambda loss: loss / math.log(2))}
    new_trainer(tmp_path, step, epochs=1, metrics=metrics, log_every=1000).train()
    log = read_log(tmp_path)
    assert step.stats.mode == "native"
    np.testing.assert_allclose(log.steps["loss"], [loss for loss, _ in means], rtol=1e-6)
    np.testing.assert_allclose(log.steps["metrics.accuracy"], [each for _, each in means], rtol=1e-6)
    np.testing.assert_allclose(log.steps["metrics.bits"], log.steps["loss"] / math.log(2))
    rest = values[size:]  # the first step is an interval of its own
    expected = np.average([each[1] for each in rest], weights=[each[2] for each in rest])
    assert log.intervals["metrics.accuracy"][-1] == pytest.approx(expected)


def test_a_skipped_batch_has_no_part_in_metrics(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> Any:
        loss, logits = with_outputs(model, x, y)
        return mx.where(y[0] == 0, mx.nan, loss), {"accuracy": right(logits, y).mean()}

    new_trainer(tmp_path, new_step(loss_fn), validation=None).train()
    steps = read_log(tmp_path).steps
    skipped = steps["skipped"] > 0
    assert skipped.any()
    assert np.isnan(steps["metrics.accuracy"][skipped]).all()
    assert np.isfinite(steps["metrics.accuracy"][~skipped]).all()


def test_the_best_is_by_what_is_monitored(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> Any:  # the one gets worse as the other gets better
        loss, logits = with_outputs(model, x, y)
        return (loss if model.training else -loss), {"accuracy": right(logits, y).mean()}

    parts: dict[str, Any] = {"monitor": "val/accuracy", "mode": "max", "epochs": 6, "validate_every": 3}
    result = new_trainer(tmp_path, new_step(loss_fn), **parts, patience=2).train()
    validations = read_log(tmp_path).validations
    values = validations["metrics.accuracy"]
    assert result.best == values.max()
    best = int(validations.step[values.argmax()])
    assert result.best_checkpoint == tmp_path / "checkpoints" / f"step-{best:08}"
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.name == f"step-{result.steps:08}"
    assert read_log(tmp_path).best == ("accuracy", values.max(), best)
    if result.reason == "early_stop":
        assert (values[-2:] <= result.best).all()
    again = new_trainer(tmp_path, new_step(loss_fn), epochs=7, validate_every=3)  # by the loss now: another best
    again.train()
    assert again.best == pytest.approx(read_log(tmp_path).validations["loss"][len(values) :].min())


def test_a_monitor_that_is_not_there_is_refused_at_the_first_step(tmp_path: Path) -> None:
    step = new_step(with_dict)
    with pytest.raises(ValueError, match=r'mode: expected "min" or "max" for val/accuracy, got None'):
        new_trainer(tmp_path, step, monitor="val/accuracy")
    with pytest.raises(ValueError, match=r'monitor: expected "val/loss", or "val/" and the name of a metric'):
        new_trainer(tmp_path, step, monitor="accuracy", mode="max")
    with pytest.raises(ValueError, match=r"did you mean 'val/accuracy'\?"):
        new_trainer(tmp_path, step, monitor="accuracy")
    with pytest.raises(ValueError, match=r"did you mean monitor='val/loss'\?"):
        new_trainer(tmp_path, step, monitor="val/los")
    trainer = new_trainer(tmp_path, step, monitor="val/acc", mode="max")
    with pytest.raises(TrainingError, match="monitor: expected one of val/loss, val/accuracy, got val/acc") as caught:
        trainer.train()
    assert (caught.value.step, caught.value.__cause__) == (0, None)  # no traceback of ours


def test_a_loss_without_outputs_is_named(tmp_path: Path) -> None:
    def alone(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return with_outputs(model, x, y)[0]

    trainer = new_trainer(tmp_path, new_step(alone), metrics={"accuracy": accuracy()})
    with pytest.raises(TrainingError, match=r"expected the loss function to return \(loss, outputs\) for accuracy"):
        trainer.train()
    each = {"each": lambda logits, x, y: right(logits, y)}
    with pytest.raises(TrainingError, match=r"metrics: each: expected a scalar, got an array \[8\]"):
        new_trainer(tmp_path / "b", new_step(with_outputs), metrics=each).train()
    with pytest.raises(ValueError, match="metrics: expected another name than 'loss'"):
        new_trainer(tmp_path, new_step(alone), metrics={"loss": accuracy()})


def test_accuracy_takes_what_the_losses_take() -> None:
    found, rng = accuracy(), np.random.default_rng(0)
    logits, y = mx.array(rng.standard_normal((4, 5, 7), dtype=np.float32)), mx.array(rng.integers(0, 7, (4, 5)))
    hits = np.array(logits).argmax(-1) == np.array(y)
    x, mask = mx.zeros((4, 5)), np.arange(20).reshape(4, 5) % 3 > 0
    assert found(logits, x, y).item() == pytest.approx(hits.mean())
    assert found(logits, x, y, mx.array(mask)).item() == pytest.approx(hits[mask].mean())
    assert found(logits, x, mx.where(mx.array(mask), y, -100)).item() == pytest.approx(hits[mask].mean())
    tokens, shifted = y, np.array(logits)[:, :-1].argmax(-1) == np.array(y)[:, 1:]
    assert found(logits[:, :-1], tokens).item() == pytest.approx(shifted.mean())
    assert found(logits[:, :-1], tokens, mx.array(mask)).item() == pytest.approx(shifted[mask[:, 1:]].mean())
    binary, labels = mx.array([1.0, -1.0, 2.0, -2.0]), mx.array([1, 1, 1, 0])
    assert found(binary, binary, labels).item() == 0.75
    with pytest.raises(ValueError, match=r"accuracy: expected outputs \[..., classes\] for labels \[4, 5\]"):
        found(logits[0], x, y)
    assert perplexity()(1e6) == math.inf


CONFIG = """\
model: {use: mlp, sizes: [6, 16, 3]}
loss: {use: cross_entropy}
data:
  train: {use: arrays, file: rows.npz, names: [x, y]}
  validation: {use: arrays, file: rows.npz, names: [x, y], stop: 16}
  batch_size: 8
optimizer: {use: AdamW, learning_rate: 1e-2}
train: {steps: 6}
"""


def config(folder: Path, *overrides: str) -> Any:
    x, y = data()
    np.savez(folder / "rows.npz", x=x, y=y)
    (folder / "mine.py").write_text("def second(logits, x, y, most=1):\n    return (y < most).mean()\n")
    (folder / "c.yaml").write_text(CONFIG)
    return load(folder / "c.yaml", [f"run={folder / 'run'}", *overrides])


SCORERS = {
    "f1_macro": lambda y, p: sklearn.f1_score(y, p.argmax(1), average="macro"),
    "roc_auc_ovr": lambda y, p: sklearn.roc_auc_score(y, p, multi_class="ovr"),
    "matthews_corrcoef": lambda y, p: sklearn.matthews_corrcoef(y, p.argmax(1)),
}
BINARY = {
    "f1": lambda y, p: sklearn.f1_score(y, p > 0.5),
    "roc_auc": sklearn.roc_auc_score,
    "average_precision": sklearn.average_precision_score,
}


@pytest.mark.parametrize("size", [3, 40])
def test_metrics_of_all_predictions(size: int) -> None:
    """They are those of all of a validation, not means over its batches, and there are none of training batches."""
    x, y = data()
    y = np.where(np.arange(len(y)) % 7 == 0, -100, y)
    names = dict.fromkeys(SCORERS)
    metrics: dict[str, Any] = {name: scikit_learn(name) for name in names}
    metrics["counts"] = OfAll(lambda labels, outputs: {"rows": len(labels), "classes": outputs.shape[1]})
    step = new_step(lambda model, x, y: (model(x).mean(), model(x)))
    step.loss_fn = LossWithMetrics(step.loss_fn, metrics | {"accuracy": accuracy()}, weighted=False)
    found = validate(step, Loader((x, y), batch_size=size)).metrics
    logits, kept = np.array(step.model.eval()(mx.array(x))), y != -100
    shares = np.array(mx.softmax(mx.array(logits), axis=1))
    expected = {name: function(y[kept], shares[kept]) for name, function in SCORERS.items()}
    assert {name: found[name] for name in SCORERS} == pytest.approx(expected)
    assert (found["counts/rows"], found["counts/classes"]) == (kept.sum(), 3)
    _, *aux = step.loss_fn(step.model, mx.array(x), mx.array(y))
    assert [each.keys() for each in aux] == [{"accuracy"}]

    def binary(model: nn.Module, x: mx.array, y: mx.array) -> Any:
        return mx.array(0.0), model(x)[:, :1]

    labels = (y == 1).astype(np.float32)[:, None]
    step.loss_fn = LossWithMetrics(binary, {name: scikit_learn(name) for name in BINARY}, weighted=False)
    found = validate(step, Loader((x, labels), batch_size=size)).metrics
    shares = 1 / (1 + np.exp(-logits[:, 0]))
    assert found == pytest.approx({name: function(labels[:, 0], shares) for name, function in BINARY.items()})


def test_metrics_of_all_predictions_of_a_config(tmp_path: Path) -> None:
    chosen = "metrics={f1: {use: scikit_learn, scorer: f1_macro}}"
    built = build(config(tmp_path, chosen, "train.monitor=val/f1", "train.mode=max"))
    trainer = Trainer(
        built.step, built.loader, validation=built.validation, loggers=[], **(built.options | {"steps": 4})
    )
    result = trainer.train()
    assert result.best == result.metrics["val/f1"] <= 1
    assert "train/f1" not in result.metrics
    with pytest.raises(ConfigError, match=r"scorer: expected one of accuracy, .*, got 'f2'"):
        build(config(tmp_path, chosen.replace("f1_macro", "f2")))


@pytest.mark.parametrize("weighted", ["false", "true"])
def test_metrics_of_a_config(tmp_path: Path, weighted: str) -> None:
    chosen = "metrics={accuracy: {use: accuracy}, low: {use: 'mine.py:second', most: 2}, perplexity: {use: perplexity}}"
    built = build(config(tmp_path, chosen, f"step.weighted={weighted}"))
    found = validate(built.step, built.validation or [])
    x, y = map(mx.array, data(ROWS))
    logits, y = built.step.model(x[:16]), y[:16]
    assert found.metrics == {
        "accuracy": pytest.approx(right(logits, y).mean().item()),
        "low": pytest.approx((y < 2).mean().item()),
        "perplexity": pytest.approx(math.exp(found.loss)),
    }


def test_each_loss_has_its_usual_metric(tmp_path: Path) -> None:
    built = build(config(tmp_path))
    assert validate(built.step, built.validation or []).metrics.keys() == {"accuracy"}
    none = build(config(tmp_path, "metrics={}"))
    assert validate(none.step, none.validation or []).metrics == {}
    text = ["loss.use=next_token", "model={use: gpt, vocabulary: 256, width: 16, heads: 2, layers: 1, context: 16}"]
    (tmp_path / "text.txt").write_text("to be or not to be " * 60)
    bytes_ = "{use: bytes, files: [text.txt], split: all, context: 16}"
    text += [f"data.train={bytes_}", f"data.validation={bytes_}"]
    for more in ([], ["loss.in_chunks=true"]):
        built = build(config(tmp_path, *text, *more))
        found = validate(built.step, built.validation or [])
        assert found.metrics == {"perplexity": pytest.approx(math.exp(found.loss))}
    with pytest.raises(ConfigError, match="in_chunks: expected no metrics of the outputs, which are never held"):
        build(config(tmp_path, *text, "loss.in_chunks=true", "metrics={accuracy: {use: accuracy}}"))


def test_a_config_without_a_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'train\.mode: expected "min" or "max" for val/accuracy, got None'):
        config(tmp_path, "train.monitor=val/accuracy")
    with pytest.raises(ConfigError, match="expected another name than that of the loss"):
        config(tmp_path, "metrics={loss: {use: accuracy}}")
    with pytest.raises(ConfigError, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        config(tmp_path, "metrics={accuracy: {use: acuracy}}")


class Counter(Callback):
    """Logs values, keeps a count with the checkpoints, and looks at the model's mode."""

    def __init__(self, stop: int = 0) -> None:
        self.count, self.stop = 0, stop
        self.modes: dict[str, set[bool]] = {}

    @property
    def state(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def look(self, where: str, trainer: Trainer) -> None:
        self.modes.setdefault(where, set()).add(trainer.step.model.training)

    def on_start(self, trainer: Trainer) -> None:
        self.look("start", trainer)

    def on_step(self, trainer: Trainer, number: int) -> None:
        self.look("step", trainer)
        self.count += 1
        trainer.log({"mine/weight": trainer.step.model.last.weight.mean(), "mine/count": self.count})
        if number == self.stop:
            trainer.stop()

    def on_validation(self, trainer: Trainer, loss: float, best: bool) -> None:
        self.look("validation", trainer)
        assert trainer.validated is not None
        assert trainer.validated.loss == loss
        mx.random.normal((3,)).tolist()  # what is drawn here is drawn beside the training

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        self.look("checkpoint", trainer)

    def on_end(self, trainer: Trainer, result: Any) -> None:
        self.look("end", trainer)
        trainer.log({"mine/end": 1, "word": "done"})
        with pytest.raises(TypeError, match=r"log: a: expected a number, a scalar array or a text, got \[1\]"):
            trainer.log({"a": [1]})


def test_callbacks_log_have_a_state_and_see_the_mode_of_the_phase(tmp_path: Path) -> None:
    options = {"ema_decay": 0.9}
    whole = new_step(with_dict, **options)
    new_trainer(tmp_path / "whole", whole).train()
    for stop in (4, 7, 0):
        step, callback = new_step(with_dict, **options), Counter(stop)
        files = [TensorBoard(tmp_path / "tensorboard")]
        new_trainer(tmp_path / "parts", step, callbacks=[callback], loggers=files).train()
    assert callback.count == 10
    assert callback.modes == {
        "start": {True}, "step": {True}, "validation": {False}, "checkpoint": {True}, "end": {True}
    }  # fmt: skip
    log = read_log(tmp_path / "parts")
    assert log.values["values.mine/count"][np.isfinite(log.values["values.mine/count"])].tolist() == list(range(1, 11))
    assert log.values["values.mine/weight"][-2] == pytest.approx(step.model.last.weight.mean().item())
    assert log.values["values.mine/end"][-1] == 1
    assert [each["text"] for each in log.events if each["what"] == "word"] == ["done"] * 3
    assert mx.array_equal(step.model.last.weight, whole.model.last.weight)
    assert log.steps["metrics.accuracy"].tolist() == read_log(tmp_path / "whole").steps["metrics.accuracy"].tolist()
    events = b"".join(each.read_bytes() for each in (tmp_path / "tensorboard").iterdir())
    assert b"mine/weight" in events
    assert "<h3>mine/count</h3>" in report(tmp_path / "parts").read_text()
    trainer = new_trainer(tmp_path / "other", new_step(with_dict))
    with pytest.raises(RuntimeError, match="log: expected a call while the trainer trains"):
        trainer.log({"a": 1})


def test_a_state_without_its_callback_is_told(tmp_path: Path) -> None:
    new_trainer(tmp_path, new_step(with_dict), callbacks=[Counter(4)]).train()
    new_trainer(tmp_path, new_step(with_dict)).train()
    texts = [each["text"] for each in read_log(tmp_path).events]
    assert "the checkpoint has a state of Counter, which is no callback of this training" in texts


def test_a_table_gets_the_columns_of_new_metrics(tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    for step, metrics in ((1, {}), (2, {"a": 0.5}), (3, {"b": 1, "seconds": 2})):
        table = Csv(file)
        table.log({"kind": "step", "time": 0.0, "step": step, "seconds": 9, "metrics": metrics})
        table.close()
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [(row["a"], row["b"], row["metrics.seconds"], row["seconds"]) for row in rows] == [
        ("", "", "", "9"), ("0.5", "", "", "9"), ("", "1", "2", "9")
    ]  # fmt: skip
    assert {each.name for each in tmp_path.iterdir()} == {"steps.csv"}
    with pytest.raises(ValueError, match="expected a record before close"):
        table.log({"kind": "step", "time": 0.0, "step": 4, "metrics": {"c": 1}})


def test_records_hold_plain_numbers(tmp_path: Path) -> None:
    new_trainer(tmp_path, new_step(with_dict)).train()
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert all(isinstance(value, float) for value in record.get("metrics", {}).values())
        assert record.get("epoch", 1) in (1, 2)


def test_predictions_are_the_models_outputs_in_order(tmp_path: Path) -> None:
    step = new_step(with_dict, ema_decay=0.5)
    new_trainer(tmp_path, step).train()
    x, y = data(20, seed=4)
    key = mx.random.state[0].tolist()
    found = predict(step, Loader((x, y), batch_size=8))
    both = predict(step, Loader((x, y), batch_size=8), lambda model, x, y: {"logits": model(x), "y": y})
    assert (step.model.training, mx.random.state[0].tolist()) == (True, key)
    with step.average() as model:
        model.eval()
        expected = np.array(model(mx.array(x)))
        model.train()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(both["logits"], found)
    np.testing.assert_array_equal(both["y"], y)
    with pytest.raises(ValueError, match="predict: expected batches, got none"):
        predict(step, [])


TEXT = """\
model: {use: gpt, width: 16, heads: 2, layers: 1, context: 16}
loss: {use: next_token}
data:
  train: {use: bytes, files: [text.txt], split: all, context: 16}
  validation: {use: bytes, files: [text.txt], split: all, context: 16}
optimizer: {use: AdamW, learning_rate: 3e-3}
train: {steps: 4, validate_every: 2}
callbacks: [{use: samples, prompts: ["to be"], count: 5}]
"""


def test_a_config_evaluates_predicts_and_writes_samples(tmp_path: Path, child: Callable[..., Any]) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 60)
    (tmp_path / "c.yaml").write_text(TEXT)
    run, file = tmp_path / "run", tmp_path / "found.npz"
    code = f"""
    import sys
    from faststep.cli import main
    for arguments in (
        ["train", {str(tmp_path / "c.yaml")!r}, "--set", "run={run}"],
        ["eval", {str(run)!r}, "--best"],
        ["checkpoint", "list", {str(run)!r}],
        ["predict", {str(run)!r}, {str(file)!r}, "--number", "4"],
    ):
        sys.argv = ["faststep", *arguments]
        try:
            main()
        except SystemExit as end:
            assert not end.code, end
    """
    shown = child(code).stdout
    log = read_log(run)
    samples = [each["text"] for each in log.events if each["what"] == "sample"]
    assert len(samples) == 2
    assert all(each.startswith("to be|") for each in samples)
    assert shown.count("info at step 2: to be|") == shown.count("info at step 4: to be|") == 1
    assert log.steps.known("metrics.perplexity")
    assert log.best is not None
    _, value, at = log.best
    assert f"step {at}: loss {value:.6f}, perplexity {math.exp(value):.6f} over" in shown
    assert f"val/loss {value:.6f}" in shown
    with np.load(file) as found:
        assert found["outputs"].shape == (math.ceil((1140 - 16) / 16), 16, 256)


def test_what_the_loss_beneath_the_metrics_reaches_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"accuracy": lambda logits, x, y: right(logits, y).mean() * SCALE["scale"]}
    loss = LossWithMetrics(with_scale, metrics, weighted=False)
    step, x, y = Step(nn.Linear(6, CLASSES), optim.SGD(0.0), loss), mx.ones((4, 6)), mx.array([0, 1, 2, 0])
    for number in range(6):
        monkeypatch.setitem(SCALE, "scale", 1.0 + number // 3)
        wanted, found = loss(step.model, x, y)
        out = step(x, y)
        assert out.loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        assert out.aux[0]["accuracy"].item() == pytest.approx(found["accuracy"].item(), rel=1e-5)
