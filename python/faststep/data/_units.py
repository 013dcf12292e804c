"""Lengths of a training in units of people: epochs, hours."""

from __future__ import annotations

import re
from typing import Any

_EPOCHS = re.compile(r"([1-9]\d{0,8}) epochs?", re.ASCII)
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def epochs_of(value: Any) -> int | None:
    """Return how many epochs a text such as "2 epochs" says, None for anything else."""
    found = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    return int(found[1]) if found else None


def seconds_of(value: Any) -> float | None:
    """Return the seconds that a positive number or a text such as "90m" or "1.5 h" says, None for anything else."""
    if isinstance(value, str) and (found := _TIME.fullmatch(value)):
        value = float(found[1]) * _SECONDS[found[2]]
    return float(value) if type(value) in (int, float) and 0 < value < float("inf") else None
