"""Batches of a loader as Python values."""

from __future__ import annotations

from typing import Any

from faststep.data import Loader

from support.helpers import flat


def plain(batch: Any) -> Any:
    """Return a batch as Python values."""
    return {name or "": array.tolist() for name, array in flat(batch).items()}


def epoch(loader: Loader) -> list[Any]:
    return [plain(batch) for batch in loader]
