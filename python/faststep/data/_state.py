"""State of a loader in a checkpoint: its fingerprint and its place."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from faststep.data._order import IntArray

VERSION = 1


def name_of(collate: Any) -> str:
    """Return what tells one collate from another: its settings, or a function's name."""
    if hasattr(collate, "__dataclass_fields__"):
        return repr(collate)
    return str(getattr(collate, "__qualname__", None) or type(collate).__qualname__)


def checksum(lengths: IntArray) -> str:
    """Return a checksum of the lengths that an epoch was arranged by."""
    return f"{zlib.crc32(lengths.astype('<i8').tobytes()):08x}"


def place_of(state: Any) -> tuple[int, int, dict[str, Any] | None]:
    """Return epoch, position and a stream's place out of a state.

    Raises:
        ValueError: It is no state of a loader.
    """
    if not isinstance(state, Mapping) or state.get("version") != VERSION or not isinstance(state.get("of"), Mapping):
        raise ValueError(f"load_state: expected a Loader's state (version {VERSION}), got {_short(state)}")
    for name in ("epoch", "position"):
        number = state.get(name)
        if type(number) is not int or number < 0:
            raise ValueError(f"load_state: {name}: expected a number, 0 or more, got {number!r}")
    stream = state.get("stream")
    if stream is not None and not _is_place(stream):
        raise ValueError(f"load_state: stream: expected the place of a stream, got {_short(stream)}")
    return state["epoch"], state["position"], dict(stream) if stream is not None else None


def _is_place(stream: Any) -> bool:
    if not isinstance(stream, Mapping) or not {"source", "used"} <= set(stream) or not isinstance(stream["used"], list):
        return False
    numbers = [*(stream.get(name) for name in ("item", "piece", "size", "taken")), *stream["used"]]
    return all(type(number) is int and number >= 0 for number in numbers)


def check_same(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Compare what the loaders are.

    Raises:
        ValueError: They differ; the message says in what.
    """
    differences = [
        f"{name}: {theirs.get(name)!r} in the state, {ours.get(name)!r} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]
    if differences:
        raise ValueError(f"load_state: the state is of another loader: {'; '.join(differences)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
