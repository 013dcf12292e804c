"""Batches of items of different lengths, padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from faststep.data._by_length import ByLength, Key, Made, Piece, as_numpy, like, parts_of
from faststep.data._errors import TooLong
from faststep.data._order import IntArray, Keys, Units
from faststep.data._stack import stack
from faststep.data._tree import Tree


@dataclass(frozen=True)
class Pad(ByLength):
    """Pad items to one length, and say what is padding.

    An item is an array [length, ...], or a flat tuple or mapping of such; a list of numbers is an array. The batch has
    the arrays [items, padded length, ...] and, behind them in a tuple or as keys of a dict,

    - `mask`, bool [items, padded length]: True where there is an element of the item,
    - `lengths`, int32 [items].

    Batches get few different shapes, since `fast_step` makes a trace for each: the padded length is a multiple of
    `multiple`, or the first of `buckets` that is long enough. With `window`, so many rounds of batches are sorted by
    length together (and put in random order where the loader shuffles), so that a batch has items of similar lengths
    and less padding: which items come together is then still random, but less so. A `Loader` has to know all lengths
    for that: see its `lengths`.

    Example:
        >>> import numpy as np
        >>> from faststep.data import Loader, Pad
        >>> texts = [np.arange(n) for n in (3, 9, 2, 8)]
        >>> loader = Loader(texts, batch_size=2, collate=Pad(multiple=4, window=2))
        >>> for tokens, mask, lengths in loader:
        ...     print(tokens.shape, lengths)
        (2, 4) array([2, 3], dtype=int32)
        (2, 12) array([8, 9], dtype=int32)
        >>> f"{loader.stats.efficiency:.2f}"
        '0.69'

    Args:
        multiple: The padded length is a multiple of it.
        buckets: The padded lengths that there are, ascending, in place of `multiple`; a longer item is an error.
        window: How many rounds of batches are sorted by length together; 0 for none.
        keys: Which arrays of an item are padded, by key or position; the others are stacked. Default: all that have
            an axis. In one item they must have one length.
        value: What stands in the padding; a mapping by key or position for different ones (0 where it has none).
        mask: Whether to add the mask.
        lengths: Whether to add the lengths.

    Raises:
        ValueError: An argument is not one of the above.
    """

    multiple: int = 32
    buckets: Sequence[int] | None = None
    window: int = 0
    keys: Sequence[Key] | None = None
    value: float | Mapping[Key, float] = 0
    mask: bool = True
    lengths: bool = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        if type(self.multiple) is not int or self.multiple < 1:
            raise ValueError(f"multiple: expected a positive int, got {self.multiple!r}")
        if type(self.window) is not int or self.window < 0:
            raise ValueError(f"window: expected a number of rounds, 0 or more, got {self.window!r}")
        if self.buckets is None:
            return
        buckets = list(self.buckets)
        if not buckets or any(type(b) is not int or b < 1 for b in buckets) or buckets != sorted(set(buckets)):
            raise ValueError(f"buckets: expected positive ints, ascending, got {self.buckets!r}")
        if self.multiple != Pad.multiple:
            raise ValueError("multiple and buckets: give one of them")

    @property
    def arranges(self) -> bool:
        """True if items are sorted within a window."""
        return self.window > 0

    def __call__(self, items: Sequence[Any]) -> Tree:
        """Pad items to a batch."""
        lengths = [self.length_of(item) for item in items]
        return self.make([[Piece(item, 0, length)] for item, length in zip(items, lengths, strict=True)]).batch

    def length_of(self, item: Any) -> int:
        """Return the length that the arrays of an item have."""
        return _length_of({key: np.shape(leaf) for key, leaf in self._padded(item).items()})

    def cut(self, length: int) -> list[tuple[int, int]]:
        """Return the whole item."""
        self._bucket(length)
        return [(0, length)]

    def chunk(self, block: int) -> int:
        """Return the items of a window."""
        return block * self.window

    def units(self, lengths: IntArray, block: int, keys: Keys | None) -> Units:
        """Sort each window by length and mix its rounds; the one that is not full stays at the end."""
        order: IntArray = np.arange(len(lengths))
        size = block * self.window
        for start in range(0, len(order) if size else 0, size or 1):
            window = order[start : start + size]
            full = len(window) // block
            # Items that do not fill a round are taken from the end of the order, before the window is sorted.
            tail = window[full * block :]
            sorted_rounds: IntArray = _sorted(window[: full * block], lengths).reshape(full, block)
            if keys is not None:
                sorted_rounds = sorted_rounds[keys.permutation(full)]
            order[start : start + size] = np.concatenate([sorted_rounds.reshape(-1), _sorted(tail, lengths)])
        return order[:, None]

    def make(self, rows: Sequence[Sequence[Piece]]) -> Made:
        """Pad the items."""
        items = [piece.item for row in rows for piece in row]
        lengths = [piece.stop for row in rows for piece in row]
        size = self._bucket(max(lengths))
        padded = self._padded(items[0])
        parts = {
            key: self._fill(key, items, size) if key in padded else stack([parts_of(item)[key] for item in items])
            for key in parts_of(items[0])
        }
        more: dict[str, Any] = {}
        if self.mask:
            more["mask"] = mx.array(np.arange(size) < np.asarray(lengths)[:, None])
        if self.lengths:
            more["lengths"] = mx.array(np.asarray(lengths, dtype=np.int32))
        return Made(like(items[0], parts, more), len(items), sum(lengths), len(items) * size)

    def _padded(self, item: Any) -> dict[Key, Any]:
        """Return the arrays of an item that are padded."""
        parts = parts_of(item)
        if self.keys is None:
            return {key: leaf for key, leaf in parts.items() if np.ndim(leaf) > 0}
        missing = [key for key in self.keys if key not in parts]
        if missing:
            raise ValueError(f"Pad: expected an item with {missing[0]!r}, got one with {', '.join(map(repr, parts))}")
        return {key: parts[key] for key in self.keys}

    def _bucket(self, length: int) -> int:
        """Return the padded length for a length."""
        if self.buckets is None:
            return max(-(-length // self.multiple), 1) * self.multiple
        for size in self.buckets:
            if length <= size:
                return size
        raise TooLong(f"Pad: an item of length {length} is longer than the last of buckets={list(self.buckets)}")

    def _fill(self, key: Key, items: Sequence[Any], size: int) -> mx.array:
        """Pad one array of all items: [items, size, ...]."""
        arrays = [as_numpy(parts_of(item)[key], f"item[{key!r}]") for item in items]
        value = self.value.get(key, 0) if isinstance(self.value, Mapping) else self.value
        first = arrays[0]
        filled = np.full((len(arrays), size, *first.shape[1:]), value, dtype=np.result_type(*arrays))
        for row, array in zip(filled, arrays, strict=True):
            if array.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"item[{key!r}]: expected [length, {', '.join(map(str, first.shape[1:]))}] as in the batch's first "
                    f"item, got {list(array.shape)}"
                )
            row[: len(array)] = array
        return mx.array(filled)


def _sorted(order: IntArray, lengths: IntArray) -> IntArray:
    return order[np.argsort(lengths[order], kind="stable")]


def _length_of(shapes: Mapping[Key, tuple[int, ...]]) -> int:
    """Return the first size that all shapes have.

    Raises:
        ValueError: There is none, or more than one.
    """
    lengths = {key: shape[0] if shape else None for key, shape in shapes.items()}
    if not lengths or None in lengths.values() or len(set(lengths.values())) > 1:
        found = ", ".join(f"{key!r}: {list(shape)}" for key, shape in shapes.items()) or "none"
        raise ValueError(
            f"Pad: expected arrays of one length in an item, got {found}; `keys` says which of them are padded"
        )
    return int(next(iter(shapes.values()))[0])
