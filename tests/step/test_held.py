"""Objects that the user holds: arrays keep their values, containers of state stay current."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import Row, Tree, assert_close, flat, plain_step, save_and_load, snapshot
from support.models import cross_entropy

Pair = tuple[nn.Module, optim.Optimizer]
WAYS = ["adamw", "sgd-momentum", "user-adam", "multi", "multi-flat", "adafactor"]


def take(pair: Pair, count: int = 3, model: str = "mlp") -> Step:
    """Take steps with a new Step."""
    step = Step(*pair, cross_entropy)
    for batch in Row(model, "adamw").case.batches(count):
        step(*batch)
    return step


def more(step: Step, count: int = 3) -> None:
    """Take more steps."""
    for batch in Row("mlp", "adamw").case.batches(count):
        step(*batch)


def copied(tree: Tree) -> dict[str, np.ndarray]:
    """Copy the values of a tree."""
    return {name: np.array(array) for name, array in flat(tree).items()}


@pytest.mark.parametrize("optimizer", WAYS)
def test_held_arrays_keep_their_values(optimizer: str) -> None:
    pair = Row("mlp", optimizer).new()
    first = flat(pair[0].parameters())
    first_values = copied(first)
    step = take(pair)
    held = flat({"model": pair[0].parameters(), "optimizer": pair[1].state})
    values = copied(held)
    more(step)
    for name, value in (first_values | values).items():
        np.testing.assert_array_equal((first | held)[name], value, err_msg=name)
    now = copied({"model": pair[0].parameters()})
    assert all(not np.array_equal(now[name], values[name]) for name in now)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_one_held_array_among_many_keeps_its_value(steps_before: int) -> None:
    pair = Row("mlp", "adamw").new()
    step = take(pair, steps_before)
    weight = pair[0].layers[0].weight
    value = np.array(weight)
    bias = pair[0].layers[0].bias
    more(step, 1)
    again = pair[0].layers[0].weight
    middle = np.array(again)
    more(step, 2)
    np.testing.assert_array_equal(weight, value)
    np.testing.assert_array_equal(again, middle)
    assert not np.array_equal(value, middle)
    assert not np.array_equal(bias, pair[0].layers[0].bias)


VIEWS: dict[str, Callable[[mx.array], Tree]] = {
    "memoryview": lambda array: memoryview(array),  # type: ignore[arg-type]
    "asarray": np.asarray,
    "no-copy": lambda array: np.array(array, copy=False),
    "lazy-slice": lambda array: array[:2],
    "lazy-sum": lambda array: array.sum(axis=0),
    "reshape": lambda array: array.reshape(-1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_views_of_a_parameter_keep_their_values(view: str, steps_before: int) -> None:
    pair = Row("mlp", "adamw").new()
    step = take(pair, steps_before)
    expected = np.array(VIEWS[view](mx.array(np.array(pair[0].layers[0].weight))))
    held = VIEWS[view](pair[0].layers[0].weight)
    more(step)
    junk = [mx.full((32, 16), 7.0) for _ in range(20)]  # would show up in memory that was given back too early
    mx.eval(junk)
    np.testing.assert_array_equal(np.array(held), expected)


def test_a_lazy_output_made_before_a_step_has_the_old_weights() -> None:
    pair = Row("mlp", "adamw").new()
    step = take(pair)
    x = Row("mlp", "adamw").case.batches(1)[0][0]
    expected = np.array(pair[0](x))
    output = pair[0](x)
    more(step)
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("optimizer", WAYS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_containers_of_state_stay_current(optimizer: str, steps_before: int) -> None:
    reference, ours = Row("mlp", optimizer).new(), Row("mlp", optimizer).new()
    reference[1].init(reference[0].trainable_parameters())
    ours[1].init(ours[0].trainable_parameters())
    step = take(ours, steps_before)
    plain = plain_step(*reference, cross_entropy)
    for batch in Row("mlp", "adamw").case.batches(steps_before):
        plain(*batch)
    held, wanted = [[model.state, opt.state] for model, opt in (ours, reference)]
    for batch in Row("mlp", "adamw").case.batches(3):
        plain(*batch)
        step(*batch)
        mx.eval(held)
        compare(held, wanted)


def compare(got: Tree, wanted: Tree) -> None:
    """Compare two trees of arrays."""
    ours, theirs = copied(got), copied(wanted)
    assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "user-adam"])
def test_a_part_of_the_state_stays_current(optimizer: str) -> None:
    reference, ours = Row("mlp", optimizer).new(), Row("mlp", optimizer).new()
    step, plain = take(ours, 1), plain_step(*reference, cross_entropy)
    plain(*Row("mlp", "adamw").case.batches(1)[0])
    held, wanted = [opt.state["layers"][1]["weight"] for _, opt in (ours, reference)]
    for batch in Row("mlp", "adamw").case.batches(3):
        plain(*batch)
        step(*batch)
        compare(held, wanted)


def test_the_state_is_an_ordinary_dict_that_stays_the_same() -> None:
    pair = Row("mlp", "adamw").new()
    step = take(pair)
    state = pair[1].state
    assert type(state) is dict
    assert set(state) == {"step", "learning_rate", "layers"}
    assert type(state["layers"][0]["weight"]) is dict
    more(step)
    assert pair[1].state is state
    assert int(state["step"]) == 6
    assert float(pair[1].learning_rate) == pytest.approx(1e-2)
    assert int(pair[1].step) == 6


@pytest.mark.parametrize("optimizer", WAYS)
def test_copies_have_current_values(optimizer: str, tmp_path: Path) -> None:
    pair = Row("conv", optimizer).new()
    step = take(pair, 3, "conv")
    weights = tmp_path / "model.safetensors"
    pair[0].save_weights(str(weights))
    copies = {
        "pickle": pickle.loads(pickle.dumps(pair[1].state)),
        "deepcopy": copy.deepcopy(pair[1].state),
        "safetensors": save_and_load(pair[1].state, str(tmp_path / "optimizer.safetensors")),
    }
    model, loaded = copy.deepcopy(pair[0]), mx.load(str(weights))
    wanted = {"model": copied(pair[0].parameters()), "state": copied(pair[1].state)}
    for batch in Row("conv", "adamw").case.batches(2):
        step(*batch)
    for name, tree in copies.items():
        got = copied(tree)
        assert got.keys() == wanted["state"].keys(), name
        assert all(np.array_equal(got[path], value) for path, value in wanted["state"].items()), name
    for got in (copied(model.parameters()), copied(loaded)):
        assert all(np.array_equal(got[path], value) for path, value in wanted["model"].items())


def test_a_saved_part_is_no_larger_than_it_is(tmp_path: Path) -> None:
    pair = Row("mlp", "adamw").new()
    take(pair)
    mx.save_safetensors(str(tmp_path / "bias.safetensors"), {"bias": pair[0].layers[1].bias})
    assert (tmp_path / "bias.safetensors").stat().st_size < 200
    assert len(pickle.dumps(pair[0].layers[1].bias)) < 500


def test_a_model_goes_on_after_its_step_is_gone() -> None:
    reference, ours = Row("mlp", "adamw").new(), Row("mlp", "adamw").new()
    take(ours)
    plain = plain_step(*reference, cross_entropy)
    for batch in Row("mlp", "adamw").case.batches(3):
        plain(*batch)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    take(ours, 2)
    for batch in Row("mlp", "adamw").case.batches(2):
        plain(*batch)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def test_two_models_of_one_array() -> None:
    ours = Row("mlp", "adamw").new()
    twin = Row("mlp", "adamw").new()[0]
    twin.update(ours[0].parameters())
    values = copied(twin.parameters())
    take(ours)
    for name, value in values.items():
        np.testing.assert_array_equal(flat(twin.parameters())[name], value, err_msg=name)


def test_a_state_that_nobody_holds_is_shown_to_nobody_until_it_is_read() -> None:
    row = Row("mlp", "adamw")
    model, optimizer = row.new()
    step = Step(model, optimizer, row.case.loss_fn)
    batch, *_ = row.case.batches(1)
    for _ in range(3):
        step(*batch)
    entry = vars(optimizer)["_state"]["layers"][0]["weight"]
    with pytest.raises(RuntimeError):
        np.array(entry["m"])
    del entry
    assert float(mx.abs(optimizer.state["layers"][0]["weight"]["m"]).max()) > 0
