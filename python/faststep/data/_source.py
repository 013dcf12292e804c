"""Sources of a loader: sequences, columns of arrays, and streams of items."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from faststep.data._errors import about
from faststep.data._evaluate import evaluate
from faststep.data._tree import Tree, map_leaves, named_leaves

ARRAYS = (mx.array, np.ndarray)


class Items:
    """A sequence: anything with `__len__` and `__getitem__`."""

    def __init__(self, source: Any) -> None:
        """Keep the sequence."""
        self.source = source

    def __len__(self) -> int:
        """Return how many items there are now."""
        return len(self.source)

    def get(self, index: int) -> Any:
        """Read one item; its arrays are evaluated here, by the thread that may have made them."""
        with about("item", index):
            item = self.source[index]
            evaluate(item, "item", index, lists=False)
            return item

    def read(self, indices: Sequence[int], go_on: Callable[[], None]) -> list[Any]:
        """Read items, all at once where the source can (`__getitems__`, as PyTorch and Hugging Face call it).

        Args:
            indices: Of the items.
            go_on: Called before each item; raises where the loop was left.
        """
        if not hasattr(self.source, "__getitems__"):
            return [self._next(index, go_on) for index in indices]
        with about(f"items {shown(indices)}"):
            items = list(self.source.__getitems__(list(indices)))
            if len(items) != len(indices):
                raise ValueError(f"__getitems__: expected {len(indices)} items, got {len(items)}")
            for index, item in zip(indices, items, strict=True):
                evaluate(item, "item", index, lists=False)
            return items

    def _next(self, index: int, go_on: Callable[[], None]) -> Any:
        go_on()
        return self.get(index)


class Columns(Items):
    """An array, or a tuple or mapping of arrays whose first axes are the items."""

    def __init__(self, source: Any) -> None:
        """Evaluate the arrays, in the thread that made them.

        Raises:
            ValueError: The arrays are not of one length.
        """
        super().__init__(source)
        evaluate(source, "source")
        shapes = {name: leaf.shape for name, leaf in named_leaves(source, "source")}
        if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) != 1:
            found = ", ".join(f"{name}: {list(shape)}" for name, shape in shapes.items())
            raise ValueError(
                f"source: expected arrays with one first size, the number of items, got {found}; items that are arrays "
                "of different shapes go into a list"
            )

    def __len__(self) -> int:
        """Return the size of the first axis."""
        _, leaf = next(named_leaves(self.source, "source"))
        return int(leaf.shape[0])

    def get(self, index: int) -> Any:
        """Return one item."""
        item = map_leaves(lambda _, leaf: leaf[index], self.source, "source")
        evaluate(item, "item", index, lists=False)
        return item

    def take(self, indices: Sequence[int]) -> Tree:
        """Return items stacked: arrays [items, ...]."""
        rows = np.asarray(indices)
        return map_leaves(lambda _, leaf: _rows(leaf, rows), self.source, "source")


def _rows(leaf: Any, rows: np.ndarray[Any, Any]) -> mx.array:
    if isinstance(leaf, mx.array):
        return leaf[mx.array(rows)]
    return mx.array(leaf[rows])


class Stream:
    """An iterable, read in its own order.

    One that has a state of its own (`state` and `load_state(state)`, or `state_dict()` and `load_state_dict(state)`)
    is asked for it and goes on from there; another is iterated again up to the place.
    """

    def __init__(self, source: Any) -> None:
        """Keep the iterable."""
        self.source = source
        self.one_shot = hasattr(source, "__next__")
        self.stateful = (hasattr(source, "state") and hasattr(source, "load_state")) or (
            hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        )

    def state(self) -> Any:
        """Return the source's own state, before its next item."""
        source = self.source
        return copy.deepcopy(source.state if hasattr(source, "load_state") else source.state_dict())

    def start(self, state: Any) -> Iterator[Any]:
        """Start reading at the state, or at the beginning (None)."""
        if state is not None:
            load = getattr(self.source, "load_state", None) or self.source.load_state_dict
            load(copy.deepcopy(state))
        return iter(self.source)


def open_source(source: Any) -> Items | Stream:
    """Return how a source is read.

    Raises:
        TypeError: It is nothing that can be read.
        ValueError: It is columns of different lengths.
    """
    if hasattr(source, "columns") and hasattr(source, "to_numpy"):
        source = _of_frame(source)
    if _is_columns(source) and not (isinstance(source, np.ndarray) and source.dtype == object):
        return Columns(source)
    if isinstance(source, (str, bytes, Mapping)):
        raise TypeError(
            f"source: expected a sequence or iterable of items, or arrays, or a tuple or dict of arrays, got "
            f"{type(source).__name__}"
            + (" with other values than arrays" if isinstance(source, Mapping) else "; a list of it is a sequence")
        )
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return Items(source)
    if hasattr(source, "__iter__"):
        return Stream(source)
    raise TypeError(
        f"source: expected something with __len__ and __getitem__, or with __iter__, got {type(source).__name__}"
    )


def _of_frame(frame: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns of a DataFrame of pandas or polars by name, as a batch has them."""
    columns = {str(name): np.asarray(frame[name].to_numpy()) for name in frame.columns}
    odd = [name for name, column in columns.items() if column.dtype.kind not in "biuf"]
    if odd or not columns:
        raise TypeError(
            f"source: expected a DataFrame with columns of numbers, got {', '.join(odd) or 'none'}; choose columns "
            "(frame[[...]]), or encode them"
        )
    return columns


def _is_columns(source: Any) -> bool:
    if isinstance(source, ARRAYS):
        return True
    nodes = isinstance(source, (tuple, Mapping)) and len(source) > 0
    return nodes and all(isinstance(leaf, ARRAYS) for _, leaf in named_leaves(source, "source", lists=False))


def shown(indices: Sequence[int]) -> str:
    """Format indices for a message, not more than sixteen."""
    head = ", ".join(str(index) for index in indices[:16])
    return f"{head}, ... ({len(indices)} in all)" if len(indices) > 16 else head
