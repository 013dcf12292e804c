"""Calls of a step that cannot be meant so: a batch that is not unpacked, a loss without a model, a misspelt option."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from faststep._step._options import Options

_OPTIONS = ("accumulate", "cache_limit", "hang_timeout", *Options._fields)
_ALIKE = 0.85  # of two names, by `difflib`


def refuse_unknown(named: Mapping[str, Any]) -> None:
    """Refuse options of `Step(...)` that do not exist.

    Raises:
        TypeError: There is one; it says which option may be meant.
    """
    for name in named:
        alike = difflib.get_close_matches(name, _OPTIONS, 1)
        meant = f"did you mean {alike[0]}?" if alike else f"expected one of {', '.join(sorted(_OPTIONS))}"
        raise TypeError(f"{name}: no such option of Step(...); {meant}")


def refuse_options(loss_fn: Any, named: Mapping[str, Any]) -> None:
    """Refuse options among the named arguments of a loss function that does not name them.

    Raises:
        TypeError: One is an option, or looks like one that is misspelt.
    """
    try:
        known = inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):
        return
    for name in (name for name in named if name not in known):
        if name in _OPTIONS:
            raise TypeError(f"{name}: it is an option of Step(...), not an argument of its calls")
        if alike := difflib.get_close_matches(name, _OPTIONS, 1, _ALIKE):
            raise TypeError(f"{name}: no such option; did you mean {alike[0]}?")


def explain(loss_fn: Any, model: Any, batch: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Say how to pass arguments that the loss function does not take; it returns where Python's own error says it all.

    Raises:
        TypeError: They do not fit as they were passed, and would in another way.
    """
    try:
        signature = inspect.signature(function(loss_fn))
    except ValueError:  # nothing is known about it
        return
    try:
        signature.bind(model, *batch, **named)
        return
    except TypeError as error:
        mismatch = str(error)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    first = batch[0] if batch else None
    hint = ""
    if isinstance(first, tuple | list) and _fits(lambda: signature.bind(model, *first, **named)):
        hint = "The batch is one tuple: call step(*batch)"
    elif isinstance(first, dict) and _fits(lambda: signature.bind(model, **{**named, **first})):
        hint = "The batch is one dict: call step(**batch)"
    elif _fits(lambda: signature.bind(*batch, **named)):
        hint = "The loss function has to take the model first: loss_fn(model, ...)"
    elif isinstance(first, dict) and len(batch) == 1:
        keys, takes = ", ".join(map(str, first)), ", ".join(list(signature.parameters)[1:])
        hint = f"The batch is one dict with the keys {keys}; the loss function takes {takes} after the model"
    if hint:
        raise TypeError(f"{name}{signature} does not take these arguments after the model: {mismatch}. {hint}")


def _fits(bind: Callable[[], object]) -> bool:
    try:
        bind()
    except TypeError:
        return False
    return True


def function(loss_fn: Any) -> Any:
    """Return a loss function, checked.

    Raises:
        TypeError: It is none.
    """
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn: expected a function of the model and a batch, got {type(loss_fn).__name__}: pass the function "
            "itself, not what it returns"
        )
    return loss_fn
