"""The moving average of the parameters: its formula, what the model shows of it, and that training does not notice."""

from __future__ import annotations

import contextlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from mlx.utils import tree_map
from support.helpers import Row, Tree, assert_close, flat, plain_step, snapshot, to_numpy
from support.models import CLASSES, WIDTH, cross_entropy

DECAY = 0.9
ROW = Row("mlp", "adamw")
BATCHES = ROW.case.batches(12)
BAD = mx.full((8, WIDTH), float("nan")), BATCHES[0][1]


def copied(tree: Tree) -> dict[str, np.ndarray]:
    """Copy the values of a tree."""
    return {name: to_numpy(array) for name, array in flat(tree).items()}


def averages(step: Step) -> dict[str, np.ndarray]:
    """Copy the average that a step keeps, and check that it is float32."""
    kept = flat(step.state["ema"])
    assert {array.dtype for array in kept.values()} == {mx.float32}
    return copied(kept)


def averaged(average: Tree, parameters: Tree) -> Tree:
    """Compute the formula of the contract in float32."""
    return tree_map(lambda a, p: DECAY * a.astype(mx.float32) + (1 - DECAY) * p.astype(mx.float32), average, parameters)


def trained(count: int = 3, name: str = "mlp", optimizer: str = "adamw", **options: Any) -> tuple[nn.Module, Step]:
    """Take steps with an average."""
    row = Row(name, optimizer)
    model, opt = row.new()
    step = Step(model, opt, row.case.loss_fn, ema_decay=DECAY, **options)
    for batch in row.case.batches(count):
        step(*batch)
    return model, step


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "user-adam", "multi"])
@pytest.mark.parametrize("name", ["mlp", "nested", "conv", "bf16", "mixed", "frozen", "lora"])
def test_it_is_the_formula(name: str, optimizer: str) -> None:
    row = Row(name, optimizer)
    model, opt = row.new()
    step = Step(model, opt, row.case.loss_fn, ema_decay=DECAY)
    wanted = model.trainable_parameters()
    for batch in row.case.batches(4):
        step(*batch)
        wanted = averaged(wanted, model.trainable_parameters())
        mx.eval(wanted)
    assert_close(averages(step), copied(wanted), 1e-6)


@pytest.mark.parametrize("name", ["mlp", "bf16"])
@pytest.mark.parametrize("compute", [mx.bfloat16, mx.float16])
def test_in_mixed_precision_it_is_of_the_masters(name: str, compute: mx.Dtype) -> None:
    model, step = trained(0, name, compute_dtype=compute)
    wanted = model.trainable_parameters()
    for batch in BATCHES[:4]:
        step(*batch)
        wanted = averaged(wanted, step.state.get("masters", model.trainable_parameters()))
    assert_close(averages(step), copied(wanted), 1e-6)


def test_large_parameters_are_averaged_in_buffers_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 20_000), nn.Linear(20_000, CLASSES))
    step = Step(model, optim.SGD(1e-3, momentum=0.9), cross_entropy, ema_decay=DECAY)
    wanted = model.trainable_parameters()
    for batch in BATCHES[:3]:
        step(*batch)
        wanted = averaged(wanted, model.trainable_parameters())
        mx.eval(wanted)
    assert_close(averages(step), copied(wanted), 1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.999])
def test_decays_from_zero_to_almost_one(decay: float) -> None:
    model, optimizer = ROW.new()
    start = copied(model.trainable_parameters())
    step = Step(model, optimizer, cross_entropy, ema_decay=decay)
    step(*BATCHES[0])
    now = copied(model.trainable_parameters())
    wanted = {name: decay * start[name] + (1 - decay) * now[name] for name in now}
    assert_close(averages(step), wanted, 1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
def test_the_average_changes_nothing_about_training(optimizer: str) -> None:
    row = Row("mlp", optimizer)
    with_average, without = row.new(), row.new()
    steps = Step(*with_average, cross_entropy, ema_decay=DECAY), Step(*without, cross_entropy)
    for batch in BATCHES[:5]:
        assert float(steps[0](*batch).loss) == float(steps[1](*batch).loss)
    assert_close(snapshot(*with_average), snapshot(*without), 0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
def test_steps_that_are_skipped_leave_it(optimizer: str, accumulate: int) -> None:
    _, step = trained(3, "mlp", optimizer, accumulate=accumulate)
    before = averages(step)
    for _ in range(accumulate):
        assert step(*BAD).skipped
    assert_close(averages(step), before, 0)
    for batch in BATCHES[3 : 3 + accumulate]:
        step(*batch)
    assert any((averages(step)[name] != value).any() for name, value in before.items())


def test_it_is_updated_once_a_window() -> None:
    model, step = trained(0, accumulate=3)
    wanted = model.trainable_parameters()
    for number, batch in enumerate(BATCHES[:8]):
        out = step(*batch)
        if number % 3 == 2:
            assert out.updated
            wanted = averaged(wanted, model.trainable_parameters())
        assert_close(averages(step), copied(wanted), 1e-6)
    assert step.flush()
    assert_close(averages(step), copied(averaged(wanted, model.trainable_parameters())), 1e-6)


def test_weights_that_are_loaded_are_averaged_in() -> None:
    model, step = trained(3)
    wanted = averages(step)
    loaded = mx.array(np.random.default_rng(2).standard_normal((CLASSES, 2 * WIDTH), dtype=np.float32))
    model.load_weights([("layers.1.weight", loaded)], strict=False)
    step(*BATCHES[3])
    now = copied(model.trainable_parameters())
    assert_close(averages(step), {name: DECAY * wanted[name] + (1 - DECAY) * now[name] for name in now}, 1e-6)


def test_plain_steps_in_between_leave_it() -> None:
    model, step = trained(3)
    before = averages(step)
    fast_step(model, step.optimizer, cross_entropy, *BATCHES[3])
    plain_step(model, step.optimizer, cross_entropy)(*BATCHES[4])
    assert_close(averages(step), before, 0)
    step(*BATCHES[5])
    now = copied(model.trainable_parameters())
    assert_close(averages(step), {name: DECAY * before[name] + (1 - DECAY) * now[name] for name in now}, 1e-6)


@pytest.mark.parametrize("name", ["mlp", "bf16", "nested", "frozen", "conv", "lora"])
def test_the_model_shows_it_and_has_its_parameters_back(name: str) -> None:
    model, step = trained(3, name)
    before, objects = copied(model.parameters()), flat(model.parameters())
    dtypes = {path: array.dtype for path, array in objects.items()}
    wanted = dict(before)
    for path, average in flat(step.state["ema"]).items():
        wanted[path] = to_numpy(average.astype(dtypes[path]))
    with step.average() as shown:
        assert shown is model
        assert {path: array.dtype for path, array in flat(model.parameters()).items()} == dtypes
        assert_close(copied(model.parameters()), wanted, 0)
    assert_close(copied(model.parameters()), before, 0)
    assert all(array is objects[path] for path, array in flat(model.parameters()).items())
    assert any((before[path] != value).any() for path, value in wanted.items())


def test_evaluation_sees_it() -> None:
    model, step = trained(3)
    x = BATCHES[0][0]
    other = ROW.new()[0]
    other.update(step.state["ema"])
    with step.average():
        np.testing.assert_array_equal(model(x), other(x))
    assert not np.array_equal(model(x), other(x))


def test_it_is_put_back_when_the_block_raises() -> None:
    model, step = trained(3)
    before = copied(model.parameters())
    with pytest.raises(KeyError, match="evaluation"), step.average():
        raise KeyError("evaluation")
    assert_close(copied(model.parameters()), before, 0)
    assert step(*BATCHES[3]).updated


def test_arrays_that_are_held_keep_their_values() -> None:
    model, step = trained(3)
    parameters = flat(model.parameters())
    with step.average():
        shown = flat(model.parameters())
        kept = flat(step.state["ema"])
    values = copied(parameters), copied(shown), copied(kept)
    for batch in BATCHES[3:6]:
        step(*batch)
    for held, value in zip((parameters, shown, kept), values, strict=True):
        assert_close(copied(held), value, 0)


def test_one_that_was_loaded_is_shown_before_any_step() -> None:
    model, step = trained(3)
    kept = averages(step)
    other, again = trained(0)
    again.load_state(step.state)
    other.update(model.parameters())
    with again.average():
        assert_close(copied(other.parameters()), kept, 0)
    assert_close(copied(other.parameters()), copied(model.parameters()), 0)


@pytest.mark.parametrize(("name", "compute"), [("mlp", None), ("conv", mx.bfloat16), ("bf16", mx.bfloat16)])
@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
def test_training_goes_on_as_if_nothing_had_been_shown(name: str, optimizer: str, compute: mx.Dtype | None) -> None:
    ends = []
    for shows in (False, True):
        model, step = trained(0, name, optimizer, compute_dtype=compute, accumulate=2)
        for batch in BATCHES[:7]:
            step(*batch)
            if shows:
                model.eval()
                with step.average():
                    mx.eval(model(batch[0]), step.state["ema"])
                model.train()
        ends.append(snapshot(model, step.optimizer) | averages(step) | copied(step.state.get("masters", {})))
        # a batch and an update; of an optimizer of one's own, the batch again as its arrays are taken over
        assert len(step.stats.traces) == (3 if optimizer == "user-adam" else 2)
    assert_close(ends[1], ends[0], 0)


def test_before_the_first_step_it_is_the_parameters() -> None:
    model, step = trained(0)
    before = copied(model.parameters())
    with step.average():
        assert_close(copied(model.parameters()), before, 0)
    step(*BATCHES[0])
    wanted = averaged({name: mx.array(value) for name, value in before.items()}, flat(model.trainable_parameters()))
    assert_close(averages(step), copied(wanted), 1e-6)


@pytest.mark.parametrize("call", ["gradients", "error", "refused", "plan"])
def test_a_call_that_takes_no_step_does_not_begin_it(call: str) -> None:
    model, optimizer = ROW.new()
    plain = Step(model, optimizer, cross_entropy)
    step = Step(model, optimizer, cross_entropy, ema_decay=DECAY, nonfinite="raise")
    plain(*BATCHES[0])
    if call == "gradients":
        step.gradients(*BATCHES[0])
    elif call == "plan":
        step.memory_plan(*BATCHES[0])
    else:
        with pytest.raises((ValueError, FloatingPointError)):
            step(*(BAD if call == "refused" else (BATCHES[0][0][:, :3], BATCHES[0][1])))
    assert "ema" not in step.state
    plain(*BATCHES[1])
    wanted = model.trainable_parameters()
    step(*BATCHES[2])
    assert_close(averages(step), copied(averaged(wanted, model.trainable_parameters())), 1e-6)


def test_blocks_may_be_nested() -> None:
    model, step = trained(3)
    before = copied(model.parameters())
    with step.average():
        outer = copied(model.parameters())
        with step.average():
            assert_close(copied(model.parameters()), outer, 0)
        assert_close(copied(model.parameters()), outer, 0)
        with pytest.raises(RuntimeError, match="average"):
            step(*BATCHES[3])
    assert_close(copied(model.parameters()), before, 0)
    assert step(*BATCHES[3]).updated


@pytest.mark.parametrize("call", ["step", "flush"])
def test_nothing_is_trained_while_it_is_shown(call: str) -> None:
    model, step = trained(4, accumulate=3)
    before, kept = snapshot(model, step.optimizer), averages(step)
    with step.average(), pytest.raises(RuntimeError, match="average"):
        step.flush() if call == "flush" else step(*BATCHES[4])
    assert_close(snapshot(model, step.optimizer), before, 0)
    assert_close(averages(step), kept, 0)
    assert step.stats.steps == 4
    assert step.flush()


@pytest.mark.parametrize("way", ["another step", "fast_step"])
def test_no_other_step_of_the_model_trains_the_average(way: str) -> None:
    model, step = trained(3)
    other = Step(model, step.optimizer, cross_entropy)
    before = snapshot(model, step.optimizer)
    with step.average(), pytest.raises(RuntimeError, match="average"):
        other(*BATCHES[3]) if way == "another step" else fast_step(model, step.optimizer, cross_entropy, *BATCHES[3])
    assert_close(snapshot(model, step.optimizer), before, 0)


@pytest.mark.parametrize("name", ["mlp", "bf16"])
def test_gradients_of_what_is_shown_cost_no_master(name: str) -> None:
    model, step = trained(4, name, compute_dtype=mx.bfloat16)
    before = snapshot(model, step.optimizer) | averages(step) | copied(step.state.get("masters", {}))
    with step.average(), contextlib.suppress(RuntimeError):  # to refuse is as good
        step.gradients(*BATCHES[4])
    assert_close(snapshot(model, step.optimizer) | averages(step) | copied(step.state.get("masters", {})), before, 0)


def test_a_step_without_one_has_none_to_show() -> None:
    model, optimizer = ROW.new()
    step = Step(model, optimizer, cross_entropy)
    step(*BATCHES[0])
    assert "ema" not in step.state
    with pytest.raises(ValueError, match="ema_decay"), step.average():
        pass


def chained(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return the loss of layers in a dict."""
    first, second = model.parts.values()
    return nn.losses.cross_entropy(second(nn.relu(first(x))), y, reduction="mean")


@pytest.mark.parametrize("keys", [("0", "1"), ("enc.in", "enc.out"), ("first", "last")], ids=str)
def test_it_is_shown_whatever_the_layers_are_called(keys: tuple[str, str]) -> None:
    model = nn.Sequential()
    model.parts = dict(zip(keys, (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)), strict=True))
    step = Step(model, optim.AdamW(1e-2), chained, ema_decay=DECAY)
    for batch in BATCHES[:3]:
        step(*batch)
    before, kept = copied(model.parameters()), averages(step)
    with step.average():
        assert_close(copied(model.parameters()), kept, 0)
    assert_close(copied(model.parameters()), before, 0)
    step.load_state(step.state)
    with step.average():
        assert_close(copied(model.parameters()), kept, 0)


def test_layers_that_are_frozen_and_thawed_go_on_by_themselves() -> None:
    model, step = trained(3)
    before = averages(step)
    model.layers[0].freeze()
    step(*BATCHES[3])
    now = copied(model.trainable_parameters())
    kept = averages(step)
    assert_close(kept, before | {name: DECAY * before[name] + (1 - DECAY) * now[name] for name in now}, 1e-6)
    frozen = copied(model.layers[0].parameters())
    with step.average():
        assert_close(copied(model.layers[0].parameters()), frozen, 0)
    model.unfreeze()
    with step.average():
        assert_close(copied(model.parameters()), kept, 0)
    step.load_state(step.state)
    step(*BATCHES[4])
    now = copied(model.parameters())
    assert_close(averages(step), {name: DECAY * kept[name] + (1 - DECAY) * now[name] for name in now}, 1e-6)


def test_fast_step_keeps_one_that_a_step_shows() -> None:
    model, optimizer = ROW.new()
    wanted = model.trainable_parameters()
    for batch in BATCHES[:3]:
        fast_step(model, optimizer, cross_entropy, *batch, ema_decay=DECAY)
        wanted = averaged(wanted, model.trainable_parameters())
        mx.eval(wanted)
    step = Step(model, optimizer, cross_entropy, ema_decay=DECAY)
    with step.average():
        assert_close(copied(model.parameters()), copied(wanted), 1e-6)


def test_a_step_that_is_not_compiled_keeps_one() -> None:
    model, step = trained(0, "conv", compile=False)
    wanted = model.trainable_parameters()
    for batch in BATCHES[:3]:
        step(*batch)
        wanted = averaged(wanted, model.trainable_parameters())
    assert_close(averages(step), copied(wanted), 1e-6)
