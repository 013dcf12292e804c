"""Trees of arrays as items and batches are: tuples and mappings of leaves, with the names of their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Tree = Any  # a leaf, or tuples, lists and mappings of trees


def children(tree: Tree, *, lists: bool = True) -> list[tuple[str, Tree]] | None:
    """Return the parts of a node with their places, `["x"]` or `[0]`; None for a leaf.

    Args:
        tree: A node or a leaf.
        lists: Whether lists are nodes. In a batch they are; in an item a list is an array written as a list.
    """
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", part) for key, part in tree.items()]
    if isinstance(tree, tuple) or (lists and isinstance(tree, list)):
        return [(f"[{i}]", part) for i, part in enumerate(tree)]
    return None


def named_leaves(tree: Tree, name: str, *, lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its name: `batch["x"][0]`."""
    parts = children(tree, lists=lists)
    if parts is None:
        yield name, tree
        return
    for place, part in parts:
        yield from named_leaves(part, name + place, lists=lists)


def map_leaves(function: Callable[[str, Any], Any], tree: Tree, name: str, *, lists: bool = True) -> Tree:
    """Return the tree with every leaf replaced by `function(name, leaf)`; a mapping becomes a dict."""
    parts = children(tree, lists=lists)
    if parts is None:
        return function(name, tree)
    return rebuilt(tree, [map_leaves(function, part, name + place, lists=lists) for place, part in parts])


def rebuilt(tree: Tree, parts: list[Any]) -> Tree:
    """Return a node like `tree` of other parts."""
    if isinstance(tree, Mapping):
        return dict(zip(tree, parts, strict=True))
    if isinstance(tree, list):
        return parts
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
