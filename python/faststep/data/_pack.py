"""Several short sequences in one row."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from faststep.data._by_length import ByLength, Key, Made, Piece, as_numpy, like
from faststep.data._errors import TooLong
from faststep.data._order import IntArray, Keys, Units
from faststep.data._tree import Tree

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pack(ByLength):
    """Pack sequences into rows of a fixed length, for a language model.

    An item is an integer array [length], or a flat mapping of arrays [length, ...] of one length, the tokens first; a
    list of numbers is an array. All of them are packed alike, nothing is lost and nothing crosses from one document to
    the next. A batch is a dict, which a step gives to the loss by name, of arrays [rows, length]:

    - `tokens` (or the keys of the items): the documents of a row one after the other, then padding,
    - `targets`: the token that follows in the same document; `ignore_index` for its last token and for padding,
    - `mask`, bool: True where there is a target (without targets: where there is a token),
    - `segments`, int32: 1, 2, ... for the documents of a row, 0 for padding,
    - `positions`, int32: 0, 1, ... from each document's beginning; 0 for padding.

    Tokens may attend to tokens of their own segment only:
    `allowed = segments[:, :, None] == segments[:, None, :]` (and causal), and positions take the place of `arange` in
    the embedding of positions or in RoPE. Such a loss sees what it sees without packing.

    The documents of a window are placed longest first, each into the row where it leaves least room (best-fit
    decreasing: D. S. Johnson, "Near-optimal bin packing algorithms", 1973). `batch_size` of the `Loader` counts rows.

    Example:
        >>> import numpy as np
        >>> import mlx.core as mx
        >>> from faststep.data import Loader, Pack
        >>> texts = [np.array([5, 6, 7]), np.array([8, 9]), np.array([1, 2, 3, 4, 5])]
        >>> loader = Loader(texts, batch_size=2, collate=Pack(length=5))
        >>> (batch,) = loader
        >>> for name, array in batch.items():
        ...     print(f"{name:9}", *array.astype(mx.int32).tolist())
        tokens    [5, 6, 7, 8, 9] [1, 2, 3, 4, 5]
        targets   [6, 7, -100, 9, -100] [2, 3, 4, 5, -100]
        mask      [1, 1, 0, 1, 0] [1, 1, 1, 1, 0]
        segments  [1, 1, 1, 2, 2] [1, 1, 1, 1, 1]
        positions [0, 1, 2, 0, 1] [0, 1, 2, 3, 4]

    Args:
        length: Of the rows.
        window: How many documents are placed together. More fill the rows better and take longer.
        split: Whether a document that is longer than a row is cut into pieces, each a segment of its own with positions
            from 0; the target of a piece's last token is the next piece's first. Without, such a document is an error.
        targets: Whether to make targets; items that have `targets` of their own, shifted already, keep them.
        value: What stands in the padding of `tokens` (or all the items' arrays).
        ignore_index: The target of what has none, as `faststep.losses.linear_cross_entropy` takes it.

    Raises:
        ValueError: An argument is not one of the above.
    """

    length: int
    window: int = 1024
    split: bool = False
    targets: bool = True
    value: int = 0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name in ("length", "window"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise ValueError(f"{name}: expected a positive int, got {number!r}")

    @property
    def arranges(self) -> bool:
        """True: which documents share a row depends on their lengths."""
        return True

    def __call__(self, items: Sequence[Any]) -> Tree:
        """Pack items into as many rows as they need."""
        pieces = [Piece(item, *cut) for item in items for cut in self.cut(self.length_of(item))]
        lengths = np.array([piece.stop - piece.start for piece in pieces], dtype=np.int64)
        return self.make([[pieces[i] for i in row] for row in self.units(lengths, 1, None)]).batch

    def length_of(self, item: Any) -> int:
        """Return the length that the arrays of an item have."""
        shapes = {key: np.shape(leaf) for key, leaf in _parts(item).items()}
        tokens: tuple[int, ...] = next(iter(shapes.values()), ())
        if len(tokens) != 1 or any(shape[:1] != tokens for shape in shapes.values()):
            found = ", ".join(f"{key}: {list(shape)}" for key, shape in shapes.items())
            raise ValueError(f"Pack: expected tokens [length] first and arrays [length, ...], got {found or 'none'}")
        return int(tokens[0])

    def cut(self, length: int) -> list[tuple[int, int]]:
        """Return pieces that fit into a row; none of a document without tokens."""
        if length > self.length and not self.split:
            raise TooLong(
                f"Pack: a document of {length} tokens does not fit into a row of {self.length}: a larger length takes "
                "it whole, split=True in pieces"
            )
        return [(start, min(start + self.length, length)) for start in range(0, length, self.length)]

    def chunk(self, block: int) -> int:
        """Return the documents of a window, or one for each row."""
        return max(self.window, block)

    def units(self, lengths: IntArray, block: int, keys: Keys | None) -> Units:
        """Fill rows, window by window; in random order within each, or else in that of the rows' first documents."""
        rows: list[list[int]] = []
        for start in range(0, len(lengths), self.window):
            filled = best_fit(lengths[start : start + self.window].tolist(), self.length)
            order = range(len(filled)) if keys is None else keys.permutation(len(filled)).tolist()
            rows += [[start + i for i in filled[j]] for j in order]
        return rows

    def make(self, rows: Sequence[Sequence[Piece]]) -> Made:
        """Fill rows with pieces."""
        pieces = [piece for row in rows for piece in row]
        names = list(_parts(pieces[0].item))
        arrays = {name: [as_numpy(_parts(piece.item)[name], f"item[{name!r}]") for piece in pieces] for name in names}
        own = self.targets and "targets" in names[1:]  # the items bring them
        packed = {
            name: self._fill(
                rows,
                [a[p.start : p.stop] for a, p in zip(column, pieces, strict=True)],
                self.ignore_index if own and name == "targets" else self.value,
            )
            for name, column in arrays.items()
        }
        counts = [np.arange(piece.stop - piece.start, dtype=np.int32) for piece in pieces]
        numbers = [i + 1 for row in rows for i in range(len(row))]
        segments = self._fill(rows, [np.full_like(c, i) for c, i in zip(counts, numbers, strict=True)], 0)
        more = {"mask": segments > 0, "segments": segments, "positions": self._fill(rows, counts, 0)}
        if own:
            more["mask"] = packed["targets"] != self.ignore_index
        elif self.targets:
            _check_tokens(arrays[names[0]], names[0])
            following = [a[p.start + 1 : p.stop + 1] for a, p in zip(arrays[names[0]], pieces, strict=True)]
            targets = self._fill(rows, [f.astype(np.int32) for f in following], self.ignore_index, like=counts)
            more = {"targets": targets, **more, "mask": targets != self.ignore_index}
        batch = like({}, _as_mlx(packed), _as_mlx(more))
        return Made(batch, len(pieces), sum(map(len, counts)), segments.size)

    def _fill(
        self, rows: Sequence[Sequence[Piece]], arrays: Sequence[Array], value: int, like: Sequence[Array] | None = None
    ) -> Array:
        """Lay out the arrays of the pieces in their rows: [rows, length, ...].

        Args:
            rows: The pieces.
            arrays: What to lay out, [length of the piece or less, ...] each.
            value: What stands where nothing is laid out.
            like: Arrays as long as the pieces, where the others may be shorter.
        """
        shape = (len(rows), self.length, *arrays[0].shape[1:])
        filled = np.full(shape, value, dtype=np.result_type(*{array.dtype for array in arrays}))
        each = iter(zip(arrays, like or arrays, strict=True))
        for number, row in enumerate(rows):
            start = 0
            for array, whole in itertools.islice(each, len(row)):
                filled[number, start : start + len(array)] = array
                start += len(whole)
        return filled


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Place each length, longest first, into the row where it leaves least room.

    Returns:
        The positions of the lengths in each row, ascending; the rows by their first.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room that is left, row), ascending
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(rooms, (lengths[i], -1))
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(at)
        rows[row].append(i)
        bisect.insort(rooms, (room - lengths[i], row))
    return sorted(sorted(row) for row in rows)


def _check_tokens(arrays: Sequence[Array], name: Key) -> None:
    for array in arrays:
        if array.dtype.kind not in "iu":
            raise TypeError(f"item[{name!r}]: expected tokens, which are integers, got {array.dtype}")


def _as_mlx(arrays: dict[Any, Array]) -> dict[Any, Any]:
    return {name: mx.array(array) for name, array in arrays.items()}


def _parts(item: Any) -> dict[Key, Any]:
    """Return the arrays of an item by key; a bare array is `tokens`."""
    if isinstance(item, tuple):
        raise TypeError("Pack: expected an array of tokens or a mapping of arrays, got a tuple: name its arrays")
    return dict(item) if isinstance(item, Mapping) else {"tokens": item}
