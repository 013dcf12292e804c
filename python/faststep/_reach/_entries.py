"""Entries of a watch list, and the result of a search."""

from __future__ import annotations

import types
from typing import Any, NamedTuple


class _Absent:
    """Nothing is there."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


class Refused(Exception):
    """The reason why there is no watch list."""


class Entry(NamedTuple):
    """One place that is compared before a call is left out.

    Attributes:
        parent: The object in which is looked; None for the loss function of the current call.
        way: "item" (of a dict), "index" (of a list or tuple), "attribute" (of the instance dict), "class" (of a class's
            own dict), "cell", "default", "kwdefault", "global" (of a function: its globals, then the builtins), "code";
            "part" (`__self__` or `__func__` of a method) and "itself" (for None as the parent only); "keys" (of a dict,
            in their order: the value is a tuple), "length" (of a list or of a class's dict), "type", "dict" (the
            instance dict itself), "mro" (of a class).
        key: A name, a number, or None.
        value: What is there now; `ABSENT` for nothing.
        name: Short text for messages: `cfg["beta"]`.
    """

    parent: Any
    way: str
    key: Any
    value: Any
    name: str


class Found(NamedTuple):
    """Result of a search.

    Attributes:
        entries: The places to compare.
        codes: All Python code that may run.
        reason: Why there is no watch list; None if everything is on the white list.
    """

    entries: list[Entry]
    codes: frozenset[types.CodeType]
    reason: str | None


class Holder(NamedTuple):
    """An object whose attributes are watched as far as code has their names."""

    parent: Any
    way: str  # "attribute" or "class"
    names: Any  # the dict
    name: str
    done: set[str]
    in_model: bool = False  # constants, arrays and containers are compared elsewhere
