"""Patterns over the dotted paths of modules and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return whether a path, or a module that it lies in, matches one of the patterns.

    `*` stands for any text, dots included; `blocks.0` and `*.qkv` match a module and so all that is in it.

    Example:
        >>> from faststep.recipes import matches
        >>> matches("blocks.0.qkv.weight", ["*.qkv"]), matches("blocks.10.up.weight", ["blocks.1"])
        (True, False)

    Args:
        path: A dotted path, as `tree_flatten` gives it.
        patterns: What `fnmatch` takes, upper and lower case told apart.
    """
    keys = path.split(".")
    around = [".".join(keys[:length]) for length in range(1, len(keys) + 1)]
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in around)


def check_matched(patterns: Sequence[str], paths: Iterable[str], what: str) -> None:
    """Refuse patterns that match nothing.

    Raises:
        ValueError: One matches none of the paths; the message lists them.
    """
    paths = sorted(paths)
    for pattern in patterns:
        if not any(matches(path, [pattern]) for path in paths):
            raise ValueError(f"{pattern!r} matches no {what}; there are {listed(paths)}")


def listed(names: Iterable[str], limit: int = 40) -> str:
    """Join names, the first of many."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + more
