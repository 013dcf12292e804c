"""A line of the report about the environment. Python's standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TextIO

Level = Literal["ok", "warning", "failure"]
_COLOURS = {"ok": "32", "warning": "33", "failure": "31"}


@dataclass(frozen=True)
class Line:
    """A finding about one part of the environment.

    Attributes:
        name: The part: "MLX", "BLAS".
        level: "ok"; "warning": it works, slower or with less than it could; "failure": it does not.
        text: What was found.
        remedy: What to do about it, a command where there is one; empty for "ok".
    """

    name: str
    level: Level
    text: str
    remedy: str = ""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


def write(lines: Iterable[Line], to: TextIO) -> None:
    """Write lines as a table, each remedy below its line; in colours where it is a terminal."""
    coloured = to.isatty() and "NO_COLOR" not in os.environ
    for line in lines:
        level = f"{line.level:<8}"
        level = f"\033[{_COLOURS[line.level]}m{level}\033[0m" if coloured else level
        print(f"{level} {line.name:<13} {line.text}", file=to)
        if line.remedy:
            print(f"{'':<22} -> {line.remedy}", file=to)


def size(count: float) -> str:
    """Return bytes in GB, in powers of ten."""
    return f"{count / 1e9:.1f} GB"
