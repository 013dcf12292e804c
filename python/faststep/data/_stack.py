"""The plain collate: items of one shape, one upon the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from faststep.data._arrange import as_numpy
from faststep.data._tree import Tree, children, rebuilt


def stack(items: Sequence[Any]) -> Tree:
    """Stack items along a new first axis.

    An item is an array, or a tuple or mapping of them (nested as you like); a list of numbers is an array. Numpy arrays
    keep their dtype (float64 becomes float32, as everywhere in MLX); Python's numbers become int32, float32 or bool.

    Example:
        >>> import numpy as np
        >>> from faststep.data import stack
        >>> batch = stack([{"x": np.ones(3), "label": 1}, {"x": np.zeros(3), "label": 0}])
        >>> batch["x"].shape, batch["label"]
        ((2, 3), array([1, 0], dtype=int32))

    Args:
        items: At least one, all of one structure; arrays [...].

    Returns:
        The structure of an item, with arrays [items, ...].

    Raises:
        TypeError: Something in an item is no array; the message names it.
        ValueError: Items differ in structure or shape.
    """
    return _stack(items, "item")


def _stack(items: Sequence[Any], name: str) -> Tree:
    parts = children(items[0], lists=False)
    if parts is None:
        return _join(items, name)
    places = [place for place, _ in parts]
    columns = []
    for i, item in enumerate(items):
        own = children(item, lists=False) or []
        if [place for place, _ in own] != places:
            places_here = ", ".join(place for place, _ in own) or type(item).__name__
            raise ValueError(
                f"{name}: expected {', '.join(places)} as in the batch's first item, got {places_here} in its item {i}"
            )
        columns.append([part for _, part in own])
    joined = [_stack(column, name + place) for column, place in zip(zip(*columns, strict=True), places, strict=True)]
    return rebuilt(items[0], joined)


def _join(leaves: Sequence[Any], name: str) -> mx.array:
    """Stack one leaf of all items."""
    if all(isinstance(leaf, mx.array) for leaf in leaves):
        _check_shapes([leaf.shape for leaf in leaves], name)
        return mx.stack(list(leaves))
    arrays = [as_numpy(leaf, name) for leaf in leaves]
    _check_shapes([array.shape for array in arrays], name)
    return mx.array(np.stack(arrays))


def _check_shapes(shapes: Sequence[tuple[int, ...]], name: str) -> None:
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"{name}: expected {list(shapes[0])} as in the batch's first item, got {list(shape)} in its item {i}; "
                "faststep.data.Pad and Pack take items of different lengths"
            )
