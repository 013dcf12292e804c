"""Values of records: as JSON, as numbers, by dotted names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


def plain(value: Any) -> Any:
    """Return the value with nothing in it but what JSON has.

    Arrays and scalars of MLX and numpy become numbers or lists of them, and a float that is not finite one of the
    strings "NaN", "Infinity" and "-Infinity", for JSON has no such numbers and null means unknown; `float` reads them.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _infinite(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if hasattr(value, "tolist") and not isinstance(value, type):
        return plain(value.tolist())
    return value.as_posix() if isinstance(value, Path) else str(value)


def _infinite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def dumps(record: Record) -> str:
    """Return the record as one line of JSON, ASCII only."""
    try:
        return json.dumps(record, allow_nan=False, default=plain)
    except (ValueError, TypeError):  # a number that is not finite, or a key that is no string
        return json.dumps(plain(record), allow_nan=False)


def number(value: Any) -> float:
    """Return a record's number, NaN for what is unknown (None).

    Raises:
        ValueError: It is no number.
        TypeError: It is no number.
    """
    return math.nan if value is None else float(value.item() if hasattr(value, "item") else value)


def flat(record: Record, prefix: str = "") -> dict[str, Any]:
    """Return the values by name, those of dicts in it by `name.inner`."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
