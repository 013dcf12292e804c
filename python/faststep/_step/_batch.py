"""Batches of a loader as arguments of a function."""

from __future__ import annotations

import inspect
from typing import Any


def call_with(batch: Any, function: Any, *before: Any) -> Any:
    """Call a function with a batch.

    A tuple's parts are passed by position, anything that is no dict as one argument. A dict is passed by name where the
    function has these names, and whole where it takes one argument.

    Args:
        batch: The batch.
        function: The function: a step or one of its methods, or a loss function.
        *before: Its arguments before the batch.

    Returns:
        The function's result.

    Raises:
        TypeError: A dict fits neither way.
    """
    if not isinstance(batch, dict):
        return function(*before, *batch) if isinstance(batch, tuple) else function(*before, batch)
    loss_fn = getattr(getattr(function, "__self__", function), "loss_fn", None)  # a step takes what its loss takes
    taken, skipped = (function, len(before)) if loss_fn is None else (loss_fn, 1)
    return function(*before, **batch) if by_name(batch, taken, skipped) else function(*before, batch)


def by_name(batch: dict[Any, Any], function: Any, before: int) -> bool:
    """Return whether a dict is passed to a function by its keys; whole otherwise.

    Raises:
        TypeError: It fits neither way.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()][before:]
    except (TypeError, ValueError):  # nothing is known about it
        return True
    kinds = {each.kind for each in parameters}
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    needed = [each.name for each in named if each.default is each.empty]
    missing = [name for name in needed if name not in batch]
    unknown = [] if inspect.Parameter.VAR_KEYWORD in kinds else sorted(map(str, batch.keys() - {p.name for p in named}))
    if not missing and not unknown:
        return True
    if (len(needed) == 1 and missing) or (not needed and inspect.Parameter.VAR_POSITIONAL in kinds):
        return False
    name = getattr(function, "__name__", type(function).__name__)
    wrong = [f"{' and '.join(unknown)} is none of its arguments"] if unknown else []
    wrong += [f"{' and '.join(missing)} is missing"] if missing else []
    keys = ", ".join(map(str, batch))
    raise TypeError(
        f"batch: a dict with the keys {keys} was to be passed by name to {name}, which takes {', '.join(needed)}: "
        f"{', and '.join(wrong)}. Give it these keys, or let the loss take the whole dict as its one argument"
    )
