"""Batches of a loader as arguments of a function."""

from __future__ import annotations

from typing import Any


def call_with(batch: Any, function: Any, *before: Any) -> Any:
    """Call a function with a batch: a tuple's parts by position, a dict's by name, anything else as one argument.

    Args:
        batch: The batch.
        function: The function: a step, or a loss function.
        *before: Its arguments before the batch.

    Returns:
        The function's result.
    """
    if isinstance(batch, dict):
        return function(*before, **batch)
    return function(*before, *batch) if isinstance(batch, tuple) else function(*before, batch)
