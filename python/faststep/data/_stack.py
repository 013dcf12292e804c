"""The plain collate: items of one shape, one upon the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from faststep.data._by_length import as_numpy
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
    first = items[0]
    if isinstance(first, Mapping):
        _check_alike(items, name, [isinstance(item, Mapping) and item.keys() == first.keys() for item in items])
        return {key: _stack([item[key] for item in items], f"{name}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        _check_alike(items, name, [isinstance(item, tuple) and len(item) == len(first) for item in items])
        return rebuilt(first, [_stack(column, f"{name}[{i}]") for i, column in enumerate(zip(*items, strict=True))])
    return _join(items, name)


def _check_alike(items: Sequence[Any], name: str, alike: list[bool]) -> None:
    if all(alike):
        return
    i = alike.index(False)
    first, other = (", ".join(place for place, _ in children(item, lists=False) or ()) for item in (items[0], items[i]))
    raise ValueError(
        f"{name}: expected {first} as in the batch's first item, got {other or type(items[i]).__name__} in its item {i}"
    )


def _join(leaves: Sequence[Any], name: str) -> mx.array:
    """Stack one leaf of all items."""
    if all(isinstance(leaf, mx.array) for leaf in leaves):
        _check_shapes([leaf.shape for leaf in leaves], name)
        return mx.stack(list(leaves))
    kind = type(leaves[0])
    if kind in (int, float, bool) and all(type(leaf) is kind for leaf in leaves):
        return mx.array(as_numpy(list(leaves), name))
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
