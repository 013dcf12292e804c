"""The arguments of a loader, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from faststep.data._by_length import ByLength
from faststep.data._source import Items, Stream

LEAST = {"batch_size": 1, "prefetch": 1, "world_size": 1}  # the others begin at 0


def check_options(
    source: Items | Stream, numbers: Mapping[str, Any], flags: Mapping[str, Any], collate: Any, lengths: Any
) -> None:
    """Refuse what does not fit; see `Loader` for the arguments.

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument is out of its range, or does not go with the source.
    """
    for name, number in numbers.items():
        least = LEAST.get(name, 0)
        if type(number) is not int:
            raise TypeError(f"{name}: expected an int, got {number!r}")
        if number < least:
            raise ValueError(f"{name}: expected {least} or more, got {number}")
    if numbers["rank"] >= numbers["world_size"]:
        raise ValueError(f"rank: expected less than world_size={numbers['world_size']}, got {numbers['rank']}")
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise TypeError(f"{name}: expected True or False, got {flag!r}")
    if not callable(collate):
        raise TypeError(f"collate: expected a function of a list of items, Pad or Pack, got {collate!r}")
    if isinstance(collate, type) and issubclass(collate, ByLength):
        raise TypeError(f"collate: expected {collate.__name__}(...), got the class itself")
    _check_lengths(source, collate, lengths)
    if flags["processes"] and (not numbers["workers"] or isinstance(source, Stream)):
        given = "workers=0" if not numbers["workers"] else "an iterable, which is read in one place"
        raise ValueError(f"processes: expected workers, one or more, and a sequence, got {given}")
    if isinstance(source, Stream) and flags["shuffle"]:
        raise ValueError(
            "shuffle: an iterable has its own order: give a sequence, or an iterable that shuffles itself (it is told "
            "the epoch by set_epoch(epoch) if it has that)"
        )


def _check_lengths(source: Items | Stream, collate: Any, lengths: Any) -> None:
    if lengths is None:
        return
    if isinstance(source, Stream):
        raise ValueError("lengths: an iterable's items are measured when they are read: leave lengths out")
    if not (isinstance(collate, ByLength) and collate.arranges):
        raise ValueError("lengths: only Pack and Pad(window=...) arrange items by length: leave lengths out")
