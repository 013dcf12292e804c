"""Step.state: with it a run goes on elsewhere as if nothing had happened."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from support.helpers import Tree, assert_close, copy_tree, flat, to_numpy
from support.models import WIDTH
from support.places import Child
from support.stateful import BATCHES, OPTIONS, ROW, Pair, everything, new, take

# every option that keeps something, and batches that are skipped
RUN = '''
import json, sys
from pathlib import Path
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from faststep import Step
from support.helpers import Row, flat, random_key, seed_of

def start():
    """Make the model, the optimizer and their step, equal each time."""
    row = Row(MODEL, OPTIMIZER)
    pair = row.new()
    if SHOWN != "float32":
        pair[0].set_dtype(getattr(mx, SHOWN))
    options = {"compute_dtype": getattr(mx, COMPUTE), "ema_decay": 0.9, "accumulate": 3, "max_grad_norm": 1.0}
    mx.random.seed(5)
    return *pair, Step(*pair, row.case.loss_fn, **options)

def train(step, first, last):
    """Take the batches of these numbers, two of which are not finite."""
    losses = []
    for number, (x, y) in enumerate(Row(MODEL, OPTIMIZER).case.batches(last)):
        if number >= first:
            losses.append(float(step(x * (float("nan") if number in (2, 7) else 1.0), y).loss))
    return losses

def arrays(model, optimizer, step):
    """Name all arrays that a run has."""
    tree = {"model": model.parameters(), "optimizer": optimizer.state, "step": step.state, "random": random_key()}
    return flat(tree)

def numbers(step):
    """Name all numbers that a step has."""
    return {name: value for name, value in step.state.items() if isinstance(value, int)}

def save(folder, model, optimizer, step, losses):
    """Write all to two files."""
    mx.save_safetensors(str(folder / "arrays.safetensors"), arrays(model, optimizer, step))
    (folder / "numbers.json").write_text(json.dumps({"state": numbers(step), "losses": losses}))

def load(folder, model, optimizer, step):
    """Read all from the files."""
    tree = tree_unflatten(list(mx.load(str(folder / "arrays.safetensors")).items()))
    saved = json.loads((folder / "numbers.json").read_text())
    step.load_state(tree["step"] | saved["state"])
    model.update(tree["model"])
    optimizer.state = tree["optimizer"]
    mx.random.seed(seed_of(tree["random"]))
'''
FIRST = """
folder = Path(FOLDER)
model, optimizer, step = start()
save(folder, model, optimizer, step, train(step, 0, STOP))
"""
SECOND = """
folder = Path(FOLDER)
model, optimizer, step = start()
load(folder, model, optimizer, step)
save(folder, model, optimizer, step, train(step, STOP, 10))
"""


@pytest.mark.parametrize(
    ("model", "optimizer", "shown", "compute", "stop"),
    [("conv", "adamw-halving", "bfloat16", "bfloat16", 4), ("mlp", "user-adam", "float32", "float16", 5)],
)
def test_a_run_goes_on_in_another_process(
    child: Child, tmp_path: Path, model: str, optimizer: str, shown: str, compute: str, stop: int
) -> None:
    names = {"MODEL": model, "OPTIMIZER": optimizer, "SHOWN": shown, "COMPUTE": compute, "STOP": stop}
    ends = []
    for scripts, last in (((FIRST,), 10), ((FIRST, SECOND), stop)):
        folder = tmp_path / str(last)
        folder.mkdir()
        losses = []
        for script in scripts:
            head = "".join(f"{name} = {value!r}\n" for name, value in (names | {"STOP": last}).items())
            child(f"{head}FOLDER = {str(folder)!r}\n{RUN}{script}")
            saved = json.loads((folder / "numbers.json").read_text())
            losses += saved["losses"]
        arrays: Tree = mx.load(str(folder / "arrays.safetensors"))
        ends.append((saved["state"], losses, {name: to_numpy(array) for name, array in arrays.items()}))
    (numbers, losses, values), (numbers_again, losses_again, values_again) = ends
    np.testing.assert_array_equal(losses_again, losses)
    assert numbers_again == numbers == {"steps": 10, "updates": 3, "skipped": 2, "batches": 1}
    assert_close(values_again, values, 0)
    kept = {name.split(".")[1] for name in values if name.startswith("step.")}
    assert kept == {"ema", "window", "weight"} | ({"masters"} if shown == "bfloat16" else {"loss_scale", "good_steps"})


def load_step(saved: Tree, pair: Pair, step: Step) -> None:
    step.load_state(saved["step"])


def load_model(saved: Tree, pair: Pair, step: Step) -> None:
    pair[0].update(saved["model"])


def load_optimizer(saved: Tree, pair: Pair, step: Step) -> None:
    pair[1].state = saved["optimizer"]


ORDERS = {
    "step-first": [load_step, load_model, load_optimizer],
    "step-last": [load_model, load_optimizer, load_step],
    "step-between": [load_optimizer, load_step, load_model],
}


@pytest.mark.parametrize("stop", [3, 4, 5], ids=["closed", "one-batch", "two-batches"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
def test_the_order_of_loading_does_not_matter(optimizer: str, order: str, used: bool, stop: int) -> None:
    pair, step = new("mlp", optimizer)
    take(step, BATCHES[:stop])
    tree = {"model": pair[0].parameters(), "optimizer": pair[1].state, "step": step.state}
    saved = copy_tree(tree)
    take(step, BATCHES[stop:10])
    other, again = new("mlp", optimizer)
    if used:
        take(again, BATCHES[8:12])
    for load in ORDERS[order]:
        load(copy_tree(saved), other, again)
    take(again, BATCHES[stop:10])
    assert_close(everything(other, again), everything(pair, step), 0)


@pytest.mark.parametrize("optimizer", ["adam-branching", "lion-cosine", "sgd-momentum", "multi"])
@pytest.mark.parametrize("name", ["nested", "frozen", "mixed"])
def test_every_kind_of_run_goes_on(name: str, optimizer: str) -> None:
    pair, step = new(name, optimizer, None, compute_dtype=mx.bfloat16)
    take(step, BATCHES[:4])
    saved = copy_tree({"model": pair[0].parameters(), "optimizer": pair[1].state, "step": step.state})
    take(step, BATCHES[4:8])
    other, again = new(name, optimizer, None, compute_dtype=mx.bfloat16)
    for load in ORDERS["step-first"]:
        load(saved, other, again)
    take(again, BATCHES[4:8])
    assert_close(everything(other, again), everything(pair, step), 0)


CHANGES: dict[str, Callable[[Pair, Step], object]] = {
    "state": lambda pair, step: step.load_state(step.state),
    "optimizer": lambda pair, step: setattr(pair[1], "state", copy_tree(pair[1].state)),
    "parameters": lambda pair, step: pair[0].update(copy_tree(pair[0].parameters())),
    "modes": lambda pair, step: pair[0].eval(),
    "another step": lambda pair, step: Step(*pair, ROW.case.loss_fn, **OPTIONS).gradients(*BATCHES[0]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stop", [3, 4, 5], ids=["closed", "one-batch", "two-batches"])
def test_what_changes_nothing_costs_nothing(change: str, stop: int) -> None:
    pair, step = new()
    other, straight = new()
    take(step, BATCHES[:stop])
    CHANGES[change](pair, step)
    take(step, BATCHES[stop:10])
    take(straight, BATCHES[:10])
    assert_close(everything(pair, step), everything(other, straight), 0)


def thaw(pair: Pair) -> None:
    pair[0].unfreeze()


def freeze(pair: Pair) -> None:
    pair[0].layers[0].freeze()


COURSES: dict[str, list[tuple[int, Callable[[Pair], None]]]] = {
    "frozen on the way": [(4, freeze)],
    "frozen and thawed": [(3, freeze), (6, thaw)],
    "frozen from the start": [(0, freeze), (5, thaw)],
}


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("stop", [3, 5, 6, 7], ids=str)
@pytest.mark.parametrize("course", COURSES)
def test_what_is_frozen_is_kept_saved_and_loaded(course: str, stop: int, where: str) -> None:
    changes = dict(COURSES[course])
    pair, step = new(accumulate=1)
    straight, other = new(accumulate=1)
    for number, batch in enumerate(BATCHES[:10]):
        for each in (pair, straight):
            changes.get(number, lambda _: None)(each)
        if number == stop:  # behind a change, before the step
            saved = copy_tree({"model": pair[0].parameters(), "optimizer": pair[1].state, "step": step.state})
            assert {"layers.0.weight", "layers.1.weight"} <= flat(saved["step"]["ema"]).keys() or changes.get(0)
            if where == "elsewhere":
                pair, step = new(accumulate=1)
                for earlier in range(number + 1):
                    changes.get(earlier, lambda _: None)(pair)
            for load in ORDERS["step-first"]:
                load(saved, pair, step)
        step(*batch)
        other(*batch)
    thaw(pair), thaw(straight)
    assert_close(everything(pair, step), everything(straight, other), 0)


def test_a_model_that_was_changed_after_saving_has_new_masters() -> None:
    pair, step = new(accumulate=1)
    take(step, BATCHES[:3])
    state = copy_tree(step.state)
    changed = pair[0].layers[1].weight + 1
    pair[0].layers[1].weight = changed
    step.load_state(state)
    step(mx.full((8, WIDTH), float("nan")), BATCHES[0][1])  # is skipped: what there is then is what it began with
    masters = step.state["masters"]["layers"]
    np.testing.assert_array_equal(masters[1]["weight"], changed.astype(mx.float32))
    np.testing.assert_array_equal(masters[0]["weight"], state["masters"]["layers"][0]["weight"])


def test_before_the_first_step_there_are_only_counts() -> None:
    _, step = new()
    assert step.state == {"steps": 0, "updates": 0, "skipped": 0, "batches": 0}
    step.load_state(step.state)
    take(step, BATCHES[:3])
    assert step.stats.updates == 1


def test_names_shapes_and_dtypes() -> None:
    pair, step = new("mixed", dtype=None)
    take(step, BATCHES[:4])
    state, parameters = step.state, pair[0].trainable_parameters()
    shapes = {name: (array.shape, mx.float32) for name, array in flat(parameters).items()}
    for group in ("ema", "window"):
        assert {name: (array.shape, array.dtype) for name, array in flat(state[group]).items()} == shapes
    halves = {name for name, array in flat(parameters).items() if array.dtype == mx.bfloat16}
    assert {name: (array.shape, array.dtype) for name, array in flat(state["masters"]).items()} == {
        name: shape for name, shape in shapes.items() if name in halves
    }
    scalars = {name: state[name] for name in ("weight", "loss_scale", "good_steps")}
    assert {name: (array.shape, array.dtype) for name, array in scalars.items()} == {
        "weight": ((), mx.float32),
        "loss_scale": ((), mx.float32),
        "good_steps": ((), mx.int32),
    }
    assert {name: state[name] for name in ("steps", "updates", "skipped", "batches")} == {
        "steps": 4,
        "updates": 1,
        "skipped": 0,
        "batches": 1,
    }
    assert float(state["weight"]) == 1.0
    tree_map(lambda kept, parameter: None, state["ema"], parameters)


def test_the_trees_are_like_the_parameters_whatever_the_layers_are_called() -> None:
    model = nn.Sequential()
    model.parts = {"0": nn.Linear(WIDTH, WIDTH), "1": nn.Linear(WIDTH, 4)}
    step = Step(model, optim.SGD(1e-2), lambda model, x: model.parts["1"](model.parts["0"](x)).sum(), ema_decay=0.9)
    step(BATCHES[0][0])
    step.load_state(step.state)
    model.update(step.state["ema"])


def test_a_closed_window_is_not_there() -> None:
    _, step = new()
    take(step, BATCHES[:4])
    assert step.state.keys() >= {"window", "weight"}
    assert step.flush()
    assert step.state.keys() == {"masters", "ema", "loss_scale", "good_steps", "steps", "updates", "skipped", "batches"}


def test_a_step_that_keeps_nothing_has_nothing() -> None:
    _, step = new(dtype=None, compute_dtype=None, ema_decay=None, accumulate=1)
    take(step, BATCHES[:3])
    assert step.state == {"steps": 3, "updates": 3, "skipped": 0, "batches": 0}


def test_reading_it_twice_gives_it_twice_and_changes_nothing() -> None:
    ends = []
    for reads in (False, True):
        pair, step = new()
        for batch in BATCHES[:7]:
            step(*batch)
            if reads:
                first, second = flat(step.state), flat(step.state)
                assert first.keys() == second.keys()
                assert all(mx.array_equal(first[name], second[name]) for name in first)
        ends.append(everything(pair, step))
    assert_close(ends[1], ends[0], 0)


def test_what_was_loaded_is_there_before_the_next_step() -> None:
    _, step = new()
    take(step, BATCHES[:4])
    state = copy_tree(step.state)
    _, again = new()
    again.load_state(copy_tree(state))
    wanted, got = ({name: to_numpy(array) for name, array in flat(tree).items()} for tree in (state, again.state))
    assert_close(got, wanted, 0)
    assert {name: value for name, value in again.state.items() if isinstance(value, int)} == {
        name: value for name, value in state.items() if isinstance(value, int)
    }
    stats = again.stats
    assert (stats.steps, stats.updates, stats.skipped) == (4, 1, 0)


def test_loading_twice_is_loading_once() -> None:
    pair, step = new()
    take(step, BATCHES[:4])
    state = copy_tree(step.state)
    step.load_state(copy_tree(state))
    step.load_state(copy_tree(state))
    take(step, BATCHES[4:8])
    other, straight = new()
    take(straight, BATCHES[:8])
    assert_close(everything(pair, step), everything(other, straight), 0)


def test_arrays_that_are_held_keep_their_values() -> None:
    _, step = new()
    take(step, BATCHES[:4])
    state = step.state
    wanted = {name: to_numpy(array) for name, array in flat(state).items()}
    take(step, BATCHES[4:11])
    assert_close({name: to_numpy(array) for name, array in flat(state).items()}, wanted, 0)
    step.load_state(state)
    take(step, BATCHES[:4])
    assert_close({name: to_numpy(array) for name, array in flat(state).items()}, wanted, 0)


def test_arrays_of_numpy_are_as_good() -> None:
    pair, step = new()
    take(step, BATCHES[:4])
    state = step.state
    other, again = new()
    other[0].update(copy_tree(pair[0].parameters()))
    other[1].state = copy_tree(pair[1].state)
    again.load_state(tree_map(lambda a: np.array(a) if isinstance(a, mx.array) else a, state))
    take(step, BATCHES[4:8])
    take(again, BATCHES[4:8])
    assert_close(everything(other, again), everything(pair, step), 0)


def test_another_step_of_the_same_pair_shares_it() -> None:
    pair, step = new()
    take(step, BATCHES[:4])
    other = Step(*pair, ROW.case.loss_fn, **OPTIONS)
    assert flat(other.state).keys() == flat(step.state).keys()
    assert (other.state["batches"], other.state["steps"], step.state["steps"]) == (1, 0, 4)
    take(other, BATCHES[4:6])
    assert step.state["batches"] == 0


def test_numbers_may_be_arrays_and_scalars_numbers() -> None:
    pair, step = new()
    take(step, BATCHES[:4])
    state = copy.copy(step.state)
    state["steps"] = mx.array(state["steps"])
    state["weight"], state["good_steps"] = float(state["weight"]), int(state["good_steps"])
    state["loss_scale"] = int(state["loss_scale"])  # as JSON has a float without a fraction, in some languages
    step.load_state(state)
    take(step, BATCHES[4:8])
    other, straight = new()
    take(straight, BATCHES[:8])
    assert_close(everything(pair, step), everything(other, straight), 0)
    assert step.state["loss_scale"].dtype == mx.float32


def test_an_empty_tree_begins_anew() -> None:
    _, step = new()
    take(step, BATCHES[:4])
    step.load_state({})
    assert step.state == {"steps": 0, "updates": 0, "skipped": 0, "batches": 0}
    take(step, BATCHES[:3])
    assert (step.stats.steps, step.stats.updates, step.state["batches"]) == (3, 1, 0)


def test_a_tree_goes_through_flat_names() -> None:
    _, step = new("nested")
    take(step, BATCHES[:4])
    state = step.state
    again = tree_unflatten(tree_flatten(state))
    step.load_state(again)
    assert flat(step.state).keys() == flat(state).keys()
