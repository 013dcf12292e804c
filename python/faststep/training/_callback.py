"""The states of callbacks in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def states(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the states of the callbacks that have one, in their order."""
    return [{"name": type(each).__qualname__, "state": each.state} for each in callbacks if _is_stateful(each)]


def load_states(callbacks: Sequence[Any], kept: Sequence[dict[str, Any]]) -> list[str]:
    """Load the states of a checkpoint, each into the next callback of its class; return the classes without one."""
    waiting = [each for each in callbacks if _is_stateful(each)]
    lost = []
    for entry in kept:
        mine = next((each for each in waiting if type(each).__qualname__ == entry["name"]), None)
        if mine is None:
            lost.append(str(entry["name"]))
        else:
            waiting.remove(mine)
            mine.load_state(entry["state"])
    return lost


def _is_stateful(callback: Any) -> bool:
    return hasattr(callback, "state") and hasattr(callback, "load_state")
