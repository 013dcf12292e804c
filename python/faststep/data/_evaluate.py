"""Evaluation of batches in the thread that made them; an array that cannot be evaluated there is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from faststep.data._tree import Tree, map_leaves, named_leaves

FOREIGN = "There is no Stream"  # MLX's error for an array that waits for work on a stream of another thread


def evaluate(tree: Tree, *name: object, lists: bool = True) -> None:
    """Evaluate all arrays of a tree, in the thread that calls.

    Args:
        tree: Arrays and anything else in tuples, lists and mappings.
        *name: What the tree is, for the error: words.
        lists: Whether to look into lists, which in an item are numbers, mostly very many.

    Raises:
        ValueError: An array waits to be computed on another thread; the message names its place.
    """
    arrays = _arrays(tree, lists)
    if not arrays:
        return
    try:
        mx.eval(arrays)
    except RuntimeError as error:
        if not str(error).startswith(FOREIGN):
            raise
        leaves = named_leaves(tree, " ".join(map(str, name)), lists=lists)
        raise ValueError(_complaint([each for each in leaves if isinstance(each[1], mx.array)])) from error


def batch_of(made: Tree, maker: str) -> Tree:
    """Return what a collate made as the loader hands it out: MLX arrays, all evaluated.

    Numpy arrays and PyTorch's tensors become MLX arrays, and a list becomes a tuple; what is no array stays as it is.

    Args:
        made: An array, or a tuple, list or mapping of arrays and other values.
        maker: The collate, for the error.

    Raises:
        TypeError: It is nothing that a step takes.
        ValueError: An array waits to be computed on another thread; the message names its place.
    """
    made = tuple(made) if type(made) is list else made
    batch = map_leaves(lambda _, leaf: _as_mlx(leaf), made, "batch")
    if not isinstance(batch, (mx.array, tuple, dict)):
        raise TypeError(f"{maker}: expected an array, or a tuple or dict of arrays, got {type(made).__name__}")
    evaluate(batch, "batch")
    return batch


def _arrays(tree: Tree, lists: bool) -> list[mx.array]:
    """Return the arrays of a tree; it is asked for every item."""
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, Mapping):
        return [array for part in tree.values() for array in _arrays(part, lists)]
    if isinstance(tree, tuple) or (lists and isinstance(tree, list)):
        return [array for part in tree for array in _arrays(part, lists)]
    return []


def _as_mlx(leaf: Any) -> Any:
    if isinstance(leaf, mx.array) or not hasattr(leaf, "__array__"):
        return leaf
    return mx.array(np.asarray(leaf))  # PyTorch's tensors too


def _complaint(leaves: list[tuple[str, mx.array]]) -> str:
    """Name the arrays that this thread cannot evaluate."""
    names = []
    for name, leaf in leaves:
        try:
            mx.eval(leaf)
        except RuntimeError:
            names.append(name)
    return (
        f"{', '.join(names) or leaves[0][0]}: expected an array that can be evaluated here, got one that still waits "
        "to be computed on another thread: call mx.eval() on what it is made of in the thread that makes that (the "
        "arrays that your dataset or collate holds), or make it with numpy"
    )
