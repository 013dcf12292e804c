"""The trainer beside a loop written by hand: the same numbers, from wherever it goes on."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.checkpoints import CheckpointError, Checkpoints
from faststep.data import Loader
from faststep.loggers import Csv, JsonLines
from faststep.report import read_log
from faststep.training import Callback, ReduceOnPlateau, Trainer, TrainingError, reproduce, validate
from mlx.utils import tree_flatten
from support.helpers import random_key, to_numpy

ROWS = 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(16, 1)

    def __call__(self, x: mx.array) -> mx.array:
        return self.last(self.dropout(nn.relu(self.first(x))))


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return nn.losses.mse_loss(model(x), y)


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, 6), dtype=np.float32)
    return x, x.sum(axis=1, keepdims=True) + 0.1 * rng.standard_normal((rows, 1), dtype=np.float32)


def new_step(loss: Callable[..., Any] = loss_fn, **options: Any) -> Step:
    mx.random.seed(5)
    return Step(Net(), optim.AdamW(1e-2), loss, **({"max_grad_norm": 1.0} | options))


def new_loader(source: Any = None, **options: Any) -> Loader:
    source = data() if source is None else source
    return Loader(source, **({"batch_size": 8, "shuffle": True, "seed": 1} | options))


def new_trainer(run: Path, step: Step | None = None, loader: Loader | None = None, **options: Any) -> Trainer:
    parts = {"loggers": [], "checkpoint_every": 0} | options
    return Trainer(step or new_step(), loader or new_loader(), run=run, **parts)


def numbers(step: Step) -> dict[str, np.ndarray]:
    """All that training leaves, by name."""
    trees = {"model": step.model.parameters(), "optimizer": step.optimizer.state, "step": step.state}
    arrays = {name: dict(tree_flatten(tree)) for name, tree in trees.items()}
    found = {f"{name} {key}": to_numpy(mx.array(value)) for name, tree in arrays.items() for key, value in tree.items()}
    return found | {"key": to_numpy(random_key())}


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


class Stop(Callback):
    """Ends the training behind so many steps."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def on_step(self, trainer: Trainer, number: int) -> None:
        if number in self.numbers:
            trainer.stop()


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"accumulate": 3, "ema_decay": 0.9}], ids=str)
def test_it_trains_as_a_loop_by_hand(tmp_path: Path, options: dict[str, Any]) -> None:
    by_hand, losses = new_step(**options), []
    loader = new_loader()
    for _ in range(2):
        losses += [by_hand(*batch).loss.item() for batch in loader]
        by_hand.flush()
    step = new_step(**options)
    result = new_trainer(tmp_path, step, epochs=2, log_every=3).train()
    assert_same(numbers(step), numbers(by_hand))
    windows = math.ceil(5 / options.get("accumulate", 1))
    assert (result.reason, result.steps) == ("done", 2 * windows)
    log = read_log(tmp_path)
    assert list(log.steps["step"]) == list(range(1, 2 * windows + 1))
    assert sum(log.steps["batches"]) == len(losses)
    weighted = sum(np.asarray(log.steps["loss"]) * np.asarray(log.steps["batches"]))
    assert weighted == pytest.approx(sum(losses), rel=1e-6)


@pytest.mark.parametrize("stops", [(1,), (2, 5), (4, 7)])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "ema_decay": 0.9}, {"compute_dtype": mx.float16}], ids=str)
def test_it_goes_on_as_if_it_had_not_stopped(tmp_path: Path, options: dict[str, Any], stops: tuple[int, ...]) -> None:
    whole = new_step(**options)
    validation = Loader(data(), batch_size=16)
    parts: dict[str, Any] = {"epochs": 3, "validation": validation, "validate_every": 2, "checkpoint_every": 3}
    done = new_trainer(tmp_path / "whole", whole, **parts).train()
    for _ in range(len(stops) + 1):
        step = new_step(**options)
        ended = new_trainer(tmp_path / "parts", step, callbacks=[Stop(*stops)], **parts).train()
    assert (ended.reason, ended.steps, ended.best) == (done.reason, done.steps, done.best)
    assert_same(numbers(step), numbers(whole))
    logs = [read_log(tmp_path / name) for name in ("whole", "parts")]
    for column in ("step", "loss", "grad_norm", "batches"):
        np.testing.assert_array_equal(logs[0].steps[column], logs[1].steps[column], err_msg=column)


def test_a_stop_in_a_window_keeps_it_open(tmp_path: Path) -> None:
    """SIGTERM comes when the first batch of the second window has been made."""

    class Ask(Callback):
        def on_step(self, trainer: Trainer, number: int) -> None:
            asked.append(number)

    asked: list[int] = []

    def source_of(step: Step) -> Any:
        x, y = data()

        class Source:
            def __len__(self) -> int:
                return len(x)

            def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
                if index == 25 and step is first:  # in the fourth batch
                    os.kill(os.getpid(), signal.SIGTERM)
                return x[index], y[index]

        return Source()

    whole = new_step(accumulate=3)
    new_trainer(tmp_path / "whole", whole, new_loader(shuffle=False), epochs=1).train()
    first = new_step(accumulate=3)
    stopped = new_trainer(
        tmp_path / "parts", first, new_loader(source_of(first), shuffle=False), epochs=1, callbacks=[Ask()]
    )
    result = stopped.train()
    assert (result.reason, result.steps, stopped.signal, first.state["batches"]) == ("signal", 1, signal.SIGTERM, 1)
    second = new_step(accumulate=3)
    new_trainer(tmp_path / "parts", second, new_loader(source_of(second), shuffle=False), epochs=1).train()
    assert_same(numbers(second), numbers(whole))
    logs = [read_log(tmp_path / name).steps for name in ("whole", "parts")]
    assert list(logs[0]["loss"]) == list(logs[1]["loss"])


def test_validation_changes_nothing_and_gives_the_mean(tmp_path: Path) -> None:
    without = new_step()
    new_trainer(tmp_path / "a", without, epochs=2).train()
    before, step = numbers(without), new_step()
    x, y = data(20)
    parts = {"validation": Loader((x, y), batch_size=16), "validate_every": 3}
    result = new_trainer(tmp_path / "b", step, epochs=2, **parts).train()
    assert_same(numbers(step), before)
    assert step.model.training
    validations = read_log(tmp_path / "b").validations
    assert list(validations["step"]) == [3, 6, 9, 10]
    step.model.eval()
    by_hand = loss_fn(step.model, mx.array(x), mx.array(y)).item()
    assert validations["loss"][-1] == pytest.approx(by_hand, rel=1e-6)
    assert result.best == min(validations["loss"])


def test_validation_takes_the_average_and_the_weights(tmp_path: Path) -> None:
    def weighted(model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        return loss_fn(model, x, y), mx.abs(x).sum()

    step = new_step(weighted, weighted=True, ema_decay=0.9)
    new_trainer(tmp_path, step, epochs=1).train()
    x, y = data(20)
    loss, batches, _ = validate(step, Loader((x, y), batch_size=16))
    with step.average() as model:
        model.eval()
        parts = [weighted(model, mx.array(x[rows]), mx.array(y[rows])) for rows in (slice(16), slice(16, 20))]
        model.train()
    total = sum(weight.item() for _, weight in parts)
    assert batches == 2
    assert loss == pytest.approx(sum(each.item() * weight.item() for each, weight in parts) / total, rel=1e-6)


def test_some_batches_of_validation_are_the_same_each_time() -> None:
    step, loader = new_step(), Loader(data(), batch_size=8)
    assert validate(step, loader, 2) == validate(step, loader, 2)
    assert loader.position == 0


def test_it_stops_early_and_stays_stopped(tmp_path: Path) -> None:
    x, y = data()
    parts = {"epochs": 50, "validation": Loader((x, -y), batch_size=8), "validate_every": 1, "patience": 3}
    result = new_trainer(tmp_path, **parts).train()
    assert result.reason == "early_stop"
    assert result.steps < 20
    validations = read_log(tmp_path).validations
    assert result.steps - validations["step"][list(validations["loss"]).index(result.best)] == 3
    again = new_trainer(tmp_path, **parts).train()
    assert (again.reason, again.steps, again.best) == (result.reason, result.steps, result.best)


class Spoiled:
    """Rows of which some are infinite."""

    def __init__(self, bad: set[int]) -> None:
        self.x, self.y = data()
        self.x[sorted(bad)] = np.inf

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.x[index], self.y[index]


def test_bad_batches_are_skipped_and_counted(tmp_path: Path) -> None:
    by_hand = new_step()
    for batch in new_loader(Spoiled({8, 30}), shuffle=False):
        by_hand(*batch)
    before, step = numbers(by_hand), new_step()
    new_trainer(tmp_path, step, new_loader(Spoiled({8, 30}), shuffle=False), epochs=1, stop_after_bad=2).train()
    assert_same(numbers(step), before)
    log = read_log(tmp_path)
    assert list(log.steps["skipped"]) == [0, 1, 0, 1, 0]
    assert [event["step"] for event in log.events if event["what"] == "skipped"]


def test_the_log_tells_of_skipped_batches_and_no_warning_does(tmp_path: Path) -> None:
    step = new_step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        new_trainer(tmp_path, step, new_loader(Spoiled({8, 30}), shuffle=False), epochs=4, stop_after_bad=0).train()
    assert [str(each.message) for each in caught if "skipped" in str(each.message)] == []
    assert "the batch of step 2 was skipped" in step.stats.warnings[0]


def test_too_many_bad_batches_end_it_with_a_bundle(tmp_path: Path) -> None:
    source = Spoiled(set(range(16, 40)))
    trainer = new_trainer(tmp_path, loader=new_loader(source, shuffle=False), epochs=1, stop_after_bad=3)
    with pytest.raises(TrainingError, match="3 bad batches in a row were skipped") as caught:
        trainer.train()
    assert (caught.value.phase, caught.value.epoch, caught.value.batch) == ("gradient", 1, 4)
    (bundle,) = (tmp_path / "bundles").iterdir()
    assert str(bundle) in str(caught.value)
    before = numbers(trainer.step)
    step = new_step()
    found = reproduce(bundle, step)
    assert not found.finite
    assert all(bad == size for _, bad, size in found.gradients.values())
    for name, value in numbers(step).items():
        if name.startswith(("model", "optimizer")):
            np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert (tmp_path / "checkpoints").is_dir()


def test_the_random_state_of_a_bundle_is_the_one_that_the_batch_met(tmp_path: Path) -> None:
    x, y = data()
    y[32:] = np.nan
    keys = []

    class Keys(Callback):
        def on_step(self, trainer: Trainer, number: int) -> None:
            keys.append(to_numpy(random_key()))

    loader = new_loader((x, y), shuffle=False)
    with pytest.raises(TrainingError, match="1 bad batches in a row"):
        new_trainer(tmp_path, loader=loader, epochs=1, stop_after_bad=1, callbacks=[Keys()]).train()
    (bundle,) = (tmp_path / "bundles").iterdir()
    Checkpoints(bundle / "checkpoint").restore(new_step())
    np.testing.assert_array_equal(to_numpy(random_key()), keys[-1])


def fails(*_: Any) -> Any:
    raise LookupError("mine")


class Failing(Callback):
    def on_step(self, trainer: Trainer, number: int) -> None:
        fails()


@pytest.mark.parametrize(
    ("phase", "parts"),
    [
        ("data", {"loader": lambda: new_loader(collate=fails)}),
        ("loss", {"step": lambda: new_step(lambda model, x, y: fails())}),
        ("validation", {"validation": lambda: Loader(data(), collate=fails), "validate_every": lambda: 1}),
        ("callback", {"callbacks": lambda: [Failing()]}),
    ],
)
def test_errors_say_where_they_happened(tmp_path: Path, phase: str, parts: dict[str, Callable[[], Any]]) -> None:
    made = {name: make() for name, make in parts.items()}
    with pytest.raises(TrainingError, match=f"^{phase}, at step .*LookupError: .*mine") as caught:
        new_trainer(tmp_path, epochs=1, **made).train()
    assert caught.value.phase == phase
    cause: BaseException | None = caught.value
    while cause is not None and not isinstance(cause, LookupError):
        cause = cause.__cause__
    assert cause is not None
    log = read_log(tmp_path)
    assert any(event["what"] == "error" and "mine" in event["text"] for event in log.events)


def test_a_wrong_shape_is_an_error_of_the_update_or_the_loss(tmp_path: Path) -> None:
    x, y = data()
    with pytest.raises(TrainingError) as caught:
        new_trainer(tmp_path, loader=new_loader((x[:, :4], y)), epochs=1).train()
    assert caught.value.phase == "loss"
    assert isinstance(caught.value.__cause__, ValueError)


def test_one_folder_is_for_one_training(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from faststep.training._run_folder import locked\n"
        "with locked(Path(sys.argv[1])): print('in', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(RuntimeError, match=f"process {other.pid} trains in it"):
            new_trainer(tmp_path, epochs=1).train()
        other.kill()
    assert new_trainer(tmp_path, epochs=1).train().reason == "done"


def test_the_ratio_of_an_update_is_that_of_the_norms(tmp_path: Path) -> None:
    kept: list[dict[str, mx.array]] = []

    class Keep(Callback):
        def on_step(self, trainer: Trainer, number: int) -> None:
            kept.append(dict(tree_flatten(trainer.step.model.trainable_parameters())))

    new_trainer(tmp_path, epochs=1, update_ratio_every=4, log_every=4, callbacks=[Keep()]).train()
    (ratio,) = [each for each in read_log(tmp_path).intervals["update_ratio"] if not math.isnan(each)]
    change = sum(mx.square(kept[3][name] - old).sum().item() for name, old in kept[2].items())
    before = sum(mx.square(old).sum().item() for old in kept[2].values())
    assert ratio == pytest.approx(math.sqrt(change / before), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None}, "steps, epochs, max_time: expected at least one"),
        ({"max_time": -1.0}, "max_time: expected a number of seconds above 0"),
        ({"steps": 0}, "steps: expected a number from 1 on, got 0"),
        ({"log_every": 0}, "log_every: expected a number from 1 on"),
        ({"patience": 2}, "patience: expected validation data"),
        ({"keep_last": 0}, "keep_last: expected a number from 1 on"),
    ],
)
def test_arguments_are_checked_before_anything_is_written(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_trainer(tmp_path / "run", **({"steps": 3} | change))
    assert not (tmp_path / "run").exists()


def test_a_callback_s_method_that_is_misspelt_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine.on_stepp: nothing calls it; did you mean on_step\?"):
        type("Mine", (Callback,), {"on_stepp": lambda self, trainer, number: None})
    type("Mine", (Callback,), {"on_step": lambda self, trainer, number: None, "on_sale": None})


def test_what_is_no_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected a faststep\.data\.Loader, got list without epoch"):
        Trainer(new_step(), [1, 2], run=tmp_path, steps=1)


def test_no_batch_at_all_is_an_error(tmp_path: Path) -> None:
    class Nothing:
        epoch, position, state = 0, 0, {}

        def load_state(self, state: Any) -> None: ...
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(TrainingError, match="the loader gave no batch"):
        Trainer(new_step(), Nothing(), run=tmp_path, epochs=1, loggers=[]).train()


def test_a_damaged_checkpoint_is_told_of_and_passed_over(tmp_path: Path) -> None:
    whole = new_step()
    new_trainer(tmp_path / "whole", whole, epochs=2).train()
    new_trainer(tmp_path / "run", epochs=1, checkpoint_every=2).train()
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    (newest / "model.safetensors").write_bytes(b"torn")
    step = new_step()
    new_trainer(tmp_path / "run", step, epochs=2).train()
    assert_same(numbers(step), numbers(whole))
    assert any(event["what"] == "torn_checkpoint" for event in read_log(tmp_path / "run").events)


@pytest.mark.parametrize(("drop_last", "count"), [(True, 2), (True, 5), (False, 2), (False, 5), (False, 6)])
def test_a_loader_goes_on_with_half_the_batch_size(drop_last: bool, count: int) -> None:
    """The items go on behind those that were taken."""
    rows = np.arange(42)
    large = Loader(rows, batch_size=8, shuffle=True, seed=4, drop_last=drop_last)
    small = Loader(rows, batch_size=4, shuffle=True, seed=4, drop_last=drop_last)
    batches = iter(large)
    taken = [np.array(batch) for batch in itertools.islice(batches, count)]
    small.load_state(large.state)
    whole = [np.array(each) for each in Loader(rows, batch_size=4, shuffle=True, seed=4, drop_last=drop_last)]
    np.testing.assert_array_equal(np.concatenate([*taken, *map(np.array, small)]), np.concatenate(whole))
    with pytest.raises(ValueError, match="batch_size"):
        Loader(rows, batch_size=3, shuffle=True, seed=4, drop_last=drop_last).load_state(large.state)


def test_it_does_not_begin_anew_where_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    new_trainer(tmp_path, epochs=1).train()
    for checkpoint in (tmp_path / "checkpoints").glob("step-*"):
        (checkpoint / "manifest.json").write_text("torn")
    before = sorted((tmp_path / "checkpoints").rglob("*"))
    with pytest.raises(CheckpointError, match="found 1 that are damaged; move the folder away"):
        new_trainer(tmp_path, epochs=2).train()
    assert sorted((tmp_path / "checkpoints").rglob("*")) == before


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
def test_buffers_that_training_turned_into_float32_come_back(tmp_path: Path) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, 1), nn.BatchNorm(1)

        def __call__(self, x: mx.array) -> mx.array:
            return self.norm(self.first(x))

    def new() -> Step:
        mx.random.seed(5)
        model = Normed()
        model.set_dtype(mx.bfloat16)
        return Step(model, optim.SGD(1e-2), loss_fn)

    first, second = new(), new()
    new_trainer(tmp_path, first, epochs=1).train()
    new_trainer(tmp_path, second, epochs=1).train()
    assert_same(numbers(second), numbers(first))


def test_a_trainer_trains_twice(tmp_path: Path) -> None:
    whole = new_step()
    new_trainer(tmp_path / "whole", whole, epochs=3).train()
    step = new_step()
    csv, lines = Csv(tmp_path / "steps.csv"), JsonLines(tmp_path / "lines.jsonl")
    trainer = new_trainer(tmp_path / "run", step, epochs=2, loggers=[csv, lines])
    first = trainer.train()
    again = trainer.train()
    assert (first.reason, first.steps, again.reason, again.steps) == ("done", 10, "done", 10)
    trainer.epochs = 3
    assert trainer.train().steps == 15
    assert_same(numbers(step), numbers(whole))
    assert len(csv.path.read_text().splitlines()) == 16  # with the head
    assert lines.path.read_text().count('"kind": "start"') == 3
    assert list(read_log(tmp_path / "run").steps["step"]) == list(range(1, 16))


@pytest.mark.parametrize("in_flight", [0, 1])
def test_no_step_need_be_in_flight(tmp_path: Path, in_flight: int) -> None:
    whole = new_step()
    new_trainer(tmp_path / "whole", whole, epochs=1).train()
    step = new_step(in_flight=in_flight)
    new_trainer(tmp_path / "run", step, epochs=1, log_every=1).train()
    assert_same(numbers(step), numbers(whole))


@pytest.mark.parametrize("stops", [(), (3, 10), (5, 14, 15)])
def test_intervals_in_epochs(tmp_path: Path, stops: tuple[int, ...]) -> None:
    """Five steps are an epoch; the same whether it stops on the way or not."""
    parts = {"epochs": 4, "validate_every": "1 epoch", "checkpoint_every": "2 epochs", "keep_best": 0}
    for _ in range(len(stops) + 1):
        validation = Loader(data(), batch_size=16)
        step = new_step()
        new_trainer(tmp_path, step, validation=validation, callbacks=[Stop(*stops)], **parts).train()
    log = read_log(tmp_path)
    validated = {5, 10, 15, 20, *stops}  # a stop validates too, and nothing is validated twice
    assert list(log.validations["step"]) == sorted(validated)
    assert {10, 20} <= set(log.checkpoints["step"])
    whole = new_step()
    new_trainer(tmp_path / "whole", whole, epochs=4).train()
    assert_same(numbers(step), numbers(whole))


def test_it_ends_when_the_time_is_up(tmp_path: Path) -> None:
    result = new_trainer(tmp_path, max_time=0.5).train()
    assert result.reason == "max_time"
    trainer = new_trainer(tmp_path, max_time=1e9, steps=result.steps + 1)
    assert trainer.train().steps == result.steps + 1
    assert trainer.seconds > 0.5  # of both


def test_validation_at_the_start(tmp_path: Path) -> None:
    parts = {"validation": Loader(data(), batch_size=16), "validate_every": 0, "validate_at_start": True}
    new_trainer(tmp_path, steps=3, **parts).train()
    new_trainer(tmp_path, steps=4, **parts).train()
    assert list(read_log(tmp_path).validations["step"]) == [0, 3, 4]


def test_checkpoints_of_bad_steps_leave_the_last_healthy_one(tmp_path: Path) -> None:
    """From batch 13 on all are bad; of the two newest checkpoints none is healthy, and the one before them stays."""
    x, y = data(160)
    x[96:] = np.nan
    loader = new_loader((x, y), shuffle=False)
    options = {"steps": 20, "checkpoint_every": 2, "keep_last": 2, "stop_after_bad": 0}
    trainer = new_trainer(tmp_path / "run", loader=loader, **options)
    trainer.train()
    assert trainer.skipped == 8
    assert [each.number for each in trainer.checkpoints.list()] == [12, 18, 20]


def test_a_learning_rate_that_was_set_anew_counts_behind_a_resume(tmp_path: Path) -> None:
    def train(rate: Any, steps: int) -> tuple[float, list[str]]:
        mx.random.seed(5)
        step = Step(Net(), optim.AdamW(rate), loss_fn)
        trainer = new_trainer(tmp_path / "run", step, steps=steps)
        trainer.train()
        events = [each["text"] for each in read_log(tmp_path / "run").events if each["what"] == "learning_rate"]
        return step.optimizer.learning_rate.item(), events

    assert train(1e-2, 3) == (pytest.approx(1e-2), [])
    assert train(1e-2, 5) == (pytest.approx(1e-2), [])
    rate, events = train(3e-3, 7)
    assert rate == pytest.approx(3e-3)
    assert events == ["the learning rate is 0.0030 from now on, as you set it; it was 0.0100"]
    assert train(3e-3, 9) == (pytest.approx(3e-3), events)
    _, events = train(optim.cosine_decay(1e-3, 20), 11)
    assert len(events) == 2
    assert events[1].startswith("the schedule is another one than before: it says a learning rate of ")
    assert len(train(optim.cosine_decay(1e-3, 20), 13)[1]) == 2
    assert len(train(optim.cosine_decay(1e-3, 200), 15)[1]) == 3
    assert train(1e-4, 17)[0] == pytest.approx(1e-4)


def test_an_interval_is_of_the_steps_up_to_its_own(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path / "run", steps=12, log_every=1)
    trainer.train()
    log = read_log(tmp_path / "run")
    assert log.intervals.step.tolist() == [*range(1, 11), 12]  # the last two are read together, at the end
    for name in ("loss", "learning_rate", "grad_norm"):
        assert log.intervals[name][:10].tolist() == log.steps[name][:10].tolist()
    assert log.intervals["loss"][-1] == pytest.approx(log.steps["loss"][-2:].mean())


class Epochs(Callback):
    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        self.told.append(("start", epoch, trainer.number))

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self.told.append(("end", epoch, trainer.number))


def test_epochs_are_told_once_across_a_stop(tmp_path: Path) -> None:
    told = []
    for stops in ((7,), ()):
        epochs = Epochs()
        new_trainer(tmp_path / "run", epochs=2, callbacks=[epochs, Stop(*stops)]).train()
        told += epochs.told
    assert told == [("start", 1, 0), ("end", 1, 5), ("start", 2, 5), ("end", 2, 10)]


def test_the_best_weights_at_the_end(tmp_path: Path) -> None:
    """A rate that is too high: the loss is best at first."""
    mx.random.seed(5)
    step = Step(Net(), optim.SGD(0.9), loss_fn)
    options = {"validation": new_loader(shuffle=False), "validate_every": 1, "steps": 8, "load_best_at_end": True}
    result = new_trainer(tmp_path / "run", step, **options).train()
    assert result.best_checkpoint is not None
    assert result.best_checkpoint != result.last_checkpoint
    assert validate(step, new_loader(shuffle=False)).loss == result.best


@pytest.mark.parametrize("stops", [(), (4, 9)])
def test_a_rate_that_is_lowered_on_a_plateau(tmp_path: Path, stops: tuple[int, ...]) -> None:
    """No validation is better than the first by 1e6: the rate is halved behind each two others, to its least."""
    options: dict[str, Any] = {"validation": new_loader(shuffle=False), "validate_every": 1, "steps": 12}
    for number in range(len(stops) + 1):
        step = new_step()
        callbacks = [ReduceOnPlateau(0.5, 2, 2e-3), Stop(*stops[number:])]
        trainer = new_trainer(tmp_path / "run", step, callbacks=callbacks, min_delta=1e6, **options)
        trainer.train()
    rates = read_log(tmp_path / "run").steps["learning_rate"].tolist()
    halved = [1e-2] * 3 + [5e-3] * 2 + [2.5e-3] * 2 + [2e-3] * 5
    assert rates == pytest.approx(halved)


def test_a_plateau_needs_a_rate_and_validations(tmp_path: Path) -> None:
    step = Step(Net(), optim.SGD(optim.cosine_decay(0.1, 10)), loss_fn)
    for parts, message in (
        ({"step": step, "validation": new_loader()}, "expected a learning rate, got a schedule"),
        ({}, "expected validation data, got none"),
    ):
        with pytest.raises(TrainingError, match=message):
            new_trainer(tmp_path / "run", steps=2, callbacks=[ReduceOnPlateau()], **parts).train()
    for arguments in ((1.0, 1), (0.5, 0)):
        with pytest.raises(ValueError, match="expected a number"):
            ReduceOnPlateau(*arguments)


def events(run: Path, what: str) -> list[str]:
    return [each["text"] for each in read_log(run).events if each["what"] == what]


def other_loss(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return 2 * nn.losses.mse_loss(model(x), y)


def test_a_resume_says_what_is_another_than_before(tmp_path: Path) -> None:
    new_trainer(tmp_path, steps=3).train()
    new_trainer(tmp_path, steps=4).train(True)
    assert events(tmp_path, "resume") == []
    step = new_step(other_loss, max_grad_norm=0.5, accumulate=2)
    step.optimizer.betas = [0.8, 0.99]
    new_trainer(tmp_path, step, steps=6).train()
    found = [text.partition(";")[0] for text in events(tmp_path, "resume")]
    assert sorted(found) == [
        "accumulate of the step is 2, and was 1",
        "betas of the optimizer is [0.8, 0.99], and was [0.9, 0.999]",
        "max_grad_norm of the step is 0.5, and was 1.0",
        f"the loss function is {__name__}.other_loss, and was {__name__}.loss_fn",
    ]
    result = new_trainer(tmp_path, step, steps=6).train()
    assert result.steps == 6
    text = "nothing is left to train: the checkpoint of step 6 is the end of this training (steps=6)"
    assert events(tmp_path, "resume")[-1].startswith(text)
    with pytest.raises(CheckpointError, match="there are checkpoints of another training"):
        new_trainer(tmp_path, steps=6).train(resume=False)
    with pytest.raises(CheckpointError, match="expected a checkpoint to go on from, found none"):
        new_trainer(tmp_path / "other", steps=6).train(resume=True)
    with pytest.raises(ValueError, match='resume: expected "auto", "best", True, False or the number of a step'):
        new_trainer(tmp_path, steps=6).train(resume="yes")  # type: ignore[arg-type]


def test_a_function_among_the_options_is_the_same_in_another_process(tmp_path: Path) -> None:
    for steps in (2, 3):  # it lies at another address each time
        new_trainer(tmp_path, new_step(transform=lambda model, gradients: gradients), steps=steps).train()
    assert events(tmp_path, "resume") == []


def test_numbered_folders(tmp_path: Path) -> None:
    (tmp_path / "cnn-7x").mkdir()
    for number in (8, 9):
        trainer = new_trainer(tmp_path / "cnn-{n}", steps=1)
        assert trainer.run == tmp_path / f"cnn-{number}"
        trainer.train()
    assert new_trainer(tmp_path / "{n}" / "a", steps=1).run == tmp_path / "1" / "a"


def test_a_fast_dev_run_tries_everything_out_and_keeps_nothing(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path / "run", epochs=50, validation=new_loader(), patience=1, fast_dev_run=True)
    result = trainer.train()
    assert (result.reason, result.steps, trainer.validated.batches) == ("done", 4, 2)
    folder = trainer.run
    assert result.last_checkpoint.is_relative_to(folder)
    del trainer
    gc.collect()
    assert not folder.exists()
    assert not (tmp_path / "run").exists()


def test_one_batch_is_learned_by_heart(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return nn.losses.mse_loss(model.last(model.first(x)), y)

    options: dict[str, Any] = {"epochs": 20, "validation": new_loader(), "overfit_one_batch": True}
    for run, stops in {"a": (), "b": (3, 7)}.items():
        for _ in range(len(stops) + 1):
            trainer = new_trainer(tmp_path / run, new_step(loss), new_loader(), callbacks=[Stop(*stops)], **options)
            result = trainer.train()
        assert (result.steps, trainer.loader.epoch, result.best) == (100, 20, None)
    losses = [list(read_log(tmp_path / run).steps["loss"]) for run in "ab"]
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.1 * losses[0][0]
