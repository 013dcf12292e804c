"""The interface of collates that arrange items by their lengths: `Pad` and `Pack`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from faststep.data._order import IntArray, Keys, Units
from faststep.data._tree import Tree

Key = str | int


class Piece(NamedTuple):
    """A part of an item along its first axis."""

    item: Any
    start: int
    stop: int


class Made(NamedTuple):
    """A batch, and how much of it is padding.

    Attributes:
        batch: The arrays.
        items: How many items, or pieces of items, are in it.
        real: Elements of the items, along the axis that is padded.
        elements: The same with the padding.
    """

    batch: Tree
    items: int
    real: int
    elements: int


class ByLength(ABC):
    """A collate for items of different lengths."""

    @property
    @abstractmethod
    def arranges(self) -> bool:
        """True if items are arranged by their lengths, which must be known first then."""

    @abstractmethod
    def length_of(self, item: Any) -> int:
        """Return the length of an item.

        Raises:
            TypeError, ValueError: The item has none, or more than one.
        """

    @abstractmethod
    def cut(self, length: int) -> list[tuple[int, int]]:
        """Return the pieces that an item of this length is cut into, (start, stop) each.

        Raises:
            ValueError: It is too long.
        """

    @abstractmethod
    def chunk(self, block: int) -> int:
        """Return how many items of a stream are arranged together, where a round takes `block` units."""

    @abstractmethod
    def units(self, lengths: IntArray, block: int, keys: Keys | None) -> Units:
        """Arrange pieces, given by their lengths, to units: the rows of the batches. Each is in one unit.

        Args:
            lengths: Of the pieces in their order.
            block: The units of one round.
            keys: Random numbers, where the order of the units is to be random.
        """

    @abstractmethod
    def make(self, rows: Sequence[Sequence[Piece]]) -> Made:
        """Make a batch of units."""


def parts_of(item: Any) -> dict[Key, Any]:
    """Return the arrays of an item by key or position; a bare array is at 0."""
    if isinstance(item, Mapping):
        return dict(item)
    return dict(enumerate(item)) if isinstance(item, tuple) else {0: item}


def like(item: Any, parts: dict[Key, Any], more: dict[str, Any]) -> Tree:
    """Return parts as the item has them (a bare array as a tuple where there are more), and more behind or beside.

    Raises:
        ValueError: The item has a key of the same name as one of those that are added.
    """
    if isinstance(item, Mapping):
        both = sorted(set(map(str, parts)) & set(more))
        if both:
            raise ValueError(f"the items have a key {both[0]!r} already, which is added to the batch: rename it")
        return {**parts, **more}
    together = (*parts.values(), *more.values())
    return together if isinstance(item, tuple) or len(together) > 1 else together[0]


def as_numpy(leaf: Any, name: str) -> np.ndarray[Any, Any]:
    """Return an array, a list or a number as a numpy array.

    Python's numbers become what MLX makes of them: int32, float32 or bool.

    Raises:
        TypeError: It is neither; the message names it.
    """
    if isinstance(leaf, mx.array):
        if leaf.dtype == mx.bfloat16:
            raise TypeError(f"{name}: numpy has no bfloat16: give float32 or float16, and cast in the model")
        return np.asarray(leaf)
    array = leaf if isinstance(leaf, (np.ndarray, np.generic)) else _from_python(leaf, name)
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"{name}: expected numbers, got {type(leaf).__name__} ({array.dtype}): leave the column out, or give a "
            "collate of your own"
        )
    return np.asarray(array)


def _from_python(leaf: Any, name: str) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(leaf)
    except ValueError as error:
        raise TypeError(f"{name}: expected an array, got a list of unequal lists: {error}") from error
    if array.dtype == np.int64:
        if array.size and (array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min):
            raise TypeError(f"{name}: a Python int beyond int32: give numpy.int64")
        return array.astype(np.int32)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    return array
