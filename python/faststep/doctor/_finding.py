"""A finding: what is wrong with a training, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["failure", "warning", "note"]
LEVELS: tuple[Level, ...] = ("failure", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One fault, its place, and the remedy.

    Attributes:
        name: A short name of the kind, which does not change between versions: "lazy-batch".
        level: "failure": training cannot work so; "warning": it loses time, memory or what it could learn; "note": what
            to know, where nothing need be wrong.
        text: What was found, with the place.
        remedy: What to do, in words.
        code: What to do, as Python or a command; empty where words are all.
    """

    name: str
    level: Level
    text: str
    remedy: str
    code: str = ""

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)
