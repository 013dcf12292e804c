"""Trees that are no state of a step are refused, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from support.helpers import assert_close, copy_tree
from support.stateful import BATCHES, everything, new, take

Change = Callable[[dict[str, Any]], object]


def put(path: str, value: Any) -> Change:
    """Put a value where the path says."""

    def change(state: dict[str, Any]) -> None:
        *rest, last = path.split(".")
        at: Any = state
        for part in rest:
            at = at[int(part)] if isinstance(at, list) else at[part]
        at[last] = value

    return change


def drop(*names: str) -> Change:
    """Take entries out."""
    return lambda state: [state.pop(name) for name in names]


def drop_bias(group: str) -> Change:
    return lambda state: state[group]["layers"][0].pop("bias")


WRONG: dict[str, tuple[Change, str]] = {
    "an unknown key": (put("momentum", mx.zeros(())), "momentum"),
    "a master is missing": (drop_bias("masters"), r"masters.*layers\.0\.bias"),
    "an average is missing": (drop_bias("ema"), r"ema.*layers\.0\.bias"),
    "a sum is missing": (drop_bias("window"), r"window.*layers\.0\.bias"),
    "a master too many": (put("masters.head", mx.zeros((3,))), "masters.*head"),
    "an average too many": (put("ema.head", mx.zeros((3,))), "ema.*head"),
    "an empty group": (put("ema", {}), "ema"),
    "a group that is none": (put("ema", None), "ema"),
    "another shape": (put("ema.layers.0.bias", mx.zeros((3,))), r"ema.*layers\.0\.bias.*\(32,\).*\(3,\)"),
    "the transpose": (put("masters.layers.0.weight", mx.zeros((16, 32))), r"masters.*layers\.0\.weight"),
    "a number for an array": (put("ema.layers.0.bias", 1.0), r"ema.*layers\.0\.bias"),
    "a window without its weight": (drop("weight"), "weight"),
    "a window without its number": (drop("batches"), "batches"),
    "a window alone": (drop("weight", "batches"), "window"),
    "a weight alone": (drop("window", "batches"), "weight"),
    "a number of batches alone": (drop("window", "weight"), "batches"),
    "a window of no batches": (put("batches", 0), "batches"),
    "fewer batches than none": (put("batches", -1), "batches"),
    "fewer steps than none": (put("steps", -1), "steps"),
    "a scale without its count": (drop("good_steps"), "good_steps"),
    "a count without its scale": (drop("loss_scale"), "loss_scale"),
    "many scales": (put("loss_scale", mx.ones((3,))), "loss_scale"),
    "many counts": (put("good_steps", mx.zeros((3,), mx.int32)), "good_steps"),
    "many weights": (put("weight", mx.ones((3,))), "weight"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("steps", [0, 4])
def test_what_is_no_state_is_refused_and_nothing_has_changed(wrong: str, steps: int) -> None:
    change, text = WRONG[wrong]
    _, source = new()
    take(source, BATCHES[:4])
    state = copy_tree(source.state)
    change(state)
    pair, step = new()
    take(step, BATCHES[4 : 4 + steps])
    before = everything(pair, step)
    with pytest.raises(ValueError, match=text):
        step.load_state(state)
    assert_close(everything(pair, step), before, 0)
    straight, other = new()
    take(other, BATCHES[4 : 4 + steps])
    take(step, BATCHES[:3])
    take(other, BATCHES[:3])
    assert_close(everything(pair, step), everything(straight, other), 0)


@pytest.mark.parametrize("name", ["nested", "conv", "frozen"])
def test_the_state_of_another_model_is_refused(name: str) -> None:
    _, source = new(name)
    take(source, BATCHES[:4])
    pair, step = new()
    take(step, BATCHES[:4])
    before = everything(pair, step)
    with pytest.raises(ValueError, match="state: "):
        step.load_state(source.state)
    assert_close(everything(pair, step), before, 0)


@pytest.mark.parametrize("given", [None, [], 3])
def test_what_is_no_dict_is_refused(given: Any) -> None:
    _, step = new()
    with pytest.raises((TypeError, ValueError), match="state"):
        step.load_state(given)
