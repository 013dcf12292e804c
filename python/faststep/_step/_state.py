"""State of a step beyond model and optimizer: to a tree for checkpoints, and back with checks."""

from __future__ import annotations

import operator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

Tree = Any
Kept = tuple[dict[str, mx.array], int]  # arrays by flat names, and the number of batches in the window
_GROUPS = ("masters", "ema", "window")
_SCALARS = {"weight": mx.float32, "losses": mx.float32, "loss_scale": mx.float32, "good_steps": mx.int32}
_COUNTS = ("steps", "updates", "skipped")
_KNOWN = {*_GROUPS, *_SCALARS, *_COUNTS, "batches"}


def tree(kept: Kept | None, counts: tuple[int, int, int], model: nn.Module) -> dict[str, Any]:
    """Build the tree of what the native step keeps for this model."""
    arrays, batches = kept or ({}, 0)
    state: dict[str, Any] = dict(zip(_COUNTS, counts, strict=True)) | {"batches": batches}
    for group in _GROUPS:
        if named := of_group(group, arrays):
            state[group] = like(model.parameters(), _beginnings(group, model) | named)
    return state | {name: arrays[name] for name in _SCALARS if name in arrays}


def of_group(group: str, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the arrays of a group by the names of their parameters."""
    prefix = f"{group}."
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _beginnings(group: str, model: nn.Module) -> dict[str, mx.array]:
    """Return what the next step begins with for parameters that no step has trained: they may be unfrozen by now."""
    wide = {
        name: array.astype(_wide(array.dtype)) for name, array in _kept_for(group, model.trainable_parameters()).items()
    }
    return {name: mx.zeros_like(array) for name, array in wide.items()} if group == "window" else wide


def _kept_for(group: str, parameters: Tree) -> dict[str, mx.array]:
    """Return those parameters for which the group has an array, by name."""
    arrays: dict[str, mx.array] = dict(tree_flatten(parameters))
    if group == "masters":
        return {name: array for name, array in arrays.items() if _wide(array.dtype) != array.dtype}
    return arrays


def _wide(dtype: mx.Dtype) -> mx.Dtype:
    return mx.float32 if dtype in (mx.float16, mx.bfloat16) else dtype


def flat(state: dict[str, Any], model: nn.Module) -> tuple[Kept, int, int, int]:
    """Read a tree of `Step.state` for this model.

    Raises:
        TypeError: It is no dict.
        ValueError: It has unknown or missing names, or values that `tree` does not give.
    """
    if not isinstance(state, dict):
        raise TypeError(f"state: expected the dict of Step.state, got {type(state).__name__}")
    if unknown := sorted(map(str, state.keys() - _KNOWN)):
        raise ValueError(f"state: expected the keys of Step.state, {sorted(_KNOWN)}, got {unknown} beside them")
    arrays: dict[str, mx.array] = {}
    for group in _GROUPS:
        if group in state:
            arrays |= {f"{group}.{name}": array for name, array in _named(group, state[group], model)}
    steps, updates, skipped, batches = (_count(name, state.get(name, 0)) for name in (*_COUNTS, "batches"))
    together = {"window": "window" in state, "weight": "weight" in state, "batches": batches > 0}
    if len(set(together.values())) > 1:
        raise ValueError(f"state: expected window, weight and batches together, got {together}")
    if ("loss_scale" in state) != ("good_steps" in state):
        raise ValueError("state: expected loss_scale and good_steps together, got one of them")
    arrays |= {name: _scalar(state, name, dtype) for name, dtype in _SCALARS.items() if name in state}
    return (arrays, batches), steps, updates, skipped


def like(parameters: Tree, named: dict[str, mx.array], path: str = "") -> Tree:
    """Return the arrays of these names as a tree like the parameters, without what has no array."""
    if isinstance(parameters, dict):
        parts = {key: like(part, named, f"{path}.{key}") for key, part in parameters.items()}
        return {key: part for key, part in parts.items() if not (isinstance(part, dict) and not part)}
    if isinstance(parameters, list | tuple):
        listed = [like(part, named, f"{path}.{index}") for index, part in enumerate(parameters)]
        return listed if any(not isinstance(part, dict) or part for part in listed) else {}
    return named.get(path[1:], {})


def _named(group: str, values: Tree, model: nn.Module) -> list[tuple[str, mx.array]]:
    found: dict[str, Any] = dict(tree_flatten(values)) if isinstance(values, dict | list) else {"": values}
    known = _kept_for(group, model.parameters())
    for name in sorted(found.keys() - known.keys()):
        raise ValueError(f"state: {group}: expected the model's parameters, got a value for {name!r}")
    for name in sorted(_kept_for(group, model.trainable_parameters()).keys() - found.keys()):
        raise ValueError(f"state: {group}: expected all of the model's trainable parameters, got nothing for {name!r}")
    return [(name, _array(f"{group}: {name}", value, known[name].shape)) for name, value in found.items()]


def _array(name: str, value: Any, shape: tuple[int, ...]) -> mx.array:
    if not isinstance(value, mx.array):
        if not hasattr(value, "__array__"):
            raise ValueError(f"state: {name}: expected an array of shape {shape}, got {type(value).__name__}")
        value = mx.array(value)
    array: mx.array = value
    if array.shape != shape:
        raise ValueError(f"state: {name}: expected shape {shape}, got {array.shape}")
    return array


def _scalar(state: dict[str, Any], name: str, dtype: mx.Dtype) -> mx.array:
    value = state[name]
    if isinstance(value, int | float):
        value = mx.array(value)
    return _array(name, value, ()).astype(dtype)


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        raise ValueError(f"state: {name}: expected a number from 0 on, got {value!r}") from None
    if count < 0:
        raise ValueError(f"state: {name}: expected a number from 0 on, got {count}")
    return count
