"""What a step keeps beyond model and optimizer, as a tree for checkpoints, and back, checked."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from faststep._native import core

Tree = Any
_GROUPS = ("masters", "ema", "window")
_COUNTS = ("steps", "updates", "skipped")
_KNOWN = {*_GROUPS, *_COUNTS, "weight", "batches", "loss_scale", "good_steps"}


def tree(kept: core.State | None, counts: tuple[int, int, int]) -> dict[str, Any]:
    """Build the tree of what the native step keeps."""
    state: dict[str, Any] = dict(zip(_COUNTS, counts, strict=True))
    state["batches"] = kept["batches"] if kept else 0
    if kept is None:
        return state
    for group in _GROUPS:
        named = kept[group]  # type: ignore[literal-required]
        if named is not None:
            state[group] = tree_unflatten(named)
    if kept["weight"] is not None:
        state["weight"] = kept["weight"]
    if kept["loss_scale"] is not None:
        state["loss_scale"], state["good_steps"] = kept["loss_scale"]
    return state


def flat(state: dict[str, Any], parameters: Tree) -> tuple[core.State, int, int, int]:
    """Read such a tree for a model with these trainable parameters.

    Raises:
        ValueError: It has unknown or missing names, or arrays of other shapes than the parameters'.
    """
    if unknown := sorted(state.keys() - _KNOWN):
        raise ValueError(f"state: expected the keys of Step.state, {sorted(_KNOWN)}, got {unknown} beside them")
    arrays: dict[str, mx.array] = dict(tree_flatten(parameters))
    groups = {group: _named(group, state[group], arrays) if group in state else None for group in _GROUPS}
    batches = int(state.get("batches", 0))
    if (groups["window"] is not None and "weight" in state) != (batches > 0):
        raise ValueError(f"state: expected a window and its weight where there are batches, got {batches} batches")
    if ("loss_scale" in state) != ("good_steps" in state):
        raise ValueError("state: expected loss_scale and good_steps together, got one of them")
    scale = (mx.array(state["loss_scale"]), mx.array(state["good_steps"])) if "loss_scale" in state else None
    kept: core.State = {
        "masters": groups["masters"],
        "ema": groups["ema"],
        "window": groups["window"],
        "weight": mx.array(state["weight"]) if batches else None,
        "batches": batches,
        "loss_scale": scale,
    }
    steps, updates, skipped = (int(state.get(count, 0)) for count in _COUNTS)
    return kept, steps, updates, skipped


def like(parameters: Tree, named: dict[str, mx.array]) -> Tree:
    """Return the arrays of these names as a tree like the parameters, in their dtypes."""
    arrays: dict[str, mx.array] = dict(tree_flatten(parameters))
    return tree_unflatten([(name, named[name].astype(old.dtype)) for name, old in arrays.items() if name in named])


def _named(group: str, values: Tree, parameters: dict[str, mx.array]) -> list[tuple[str, mx.array]]:
    found: dict[str, mx.array] = dict(tree_flatten(values))
    wanted = parameters
    if group == "masters":
        wanted = {name: array for name, array in parameters.items() if array.dtype in (mx.float16, mx.bfloat16)}
    for name in sorted(found.keys() ^ wanted.keys()):
        what = "nothing" if name in wanted else "an array"
        raise ValueError(f"state: {group}: expected the model's trainable parameters, got {what} for {name}")
    for name, array in found.items():
        if array.shape != wanted[name].shape:
            raise ValueError(f"state: {group}: {name}: expected shape {wanted[name].shape}, got {array.shape}")
    return list(found.items())
