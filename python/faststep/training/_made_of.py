"""Loss, optimizer and options of a training, kept with its checkpoints: a resume names those that have changed."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from faststep._step import Step
from faststep.training import _rates

_SAME_NUMBERS = (
    "replay",
    "in_flight",
    "max_traces",
    "clear_cache_every",
    "sync",
    "check_ranks",
)  # options that change no number
_PLAIN = (bool, int, float, str)


def made_of(step: Step) -> dict[str, dict[str, Any]]:
    """Return the loss function, the optimizer's settings and the options of a step, as plain values.

    Learning rates are left out: `_rates` tells of those. So are the data: a loader compares its own state.
    """
    options = {"accumulate": step.accumulate, **step.options.plain()}
    options = {name: value for name, value in options.items() if name not in _SAME_NUMBERS}
    parts = [(f"optimizer {i}" if i else "optimizer", each) for i, each in enumerate(_rates.parts(step.optimizer))]
    return {"loss": _function(step.loss_fn), "step": options, **{name: _settings(each) for name, each in parts}}


def differences(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is another now, in words."""
    for part in before.keys() & now.keys():
        for name in sorted(before[part].keys() | now[part].keys()):
            old, new = before[part].get(name), now[part].get(name)
            if old == new:
                continue
            if name == "source":
                if before[part].get("name") == now[part].get("name"):
                    yield f"the loss function {now[part]['name']} has other code than before"
            else:
                what = "the loss function" if part == "loss" else f"{name} of the {part}"
                yield f"{what} is {new}, and was {old}"


def _function(loss_fn: Any) -> dict[str, Any]:
    """Return the name of a loss function, or of its class, and a digest of its source where that is there."""
    while isinstance(loss_fn, functools.partial) or hasattr(loss_fn, "loss_fn"):  # a `LossWithMetrics`
        loss_fn = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn.loss_fn
    code = loss_fn if inspect.isroutine(loss_fn) else type(loss_fn)
    try:
        source: str | None = hashlib.sha256(inspect.getsource(code).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        source = None
    return {"name": f"{code.__module__}.{code.__qualname__}", "source": source}


def _settings(optimizer: Any) -> dict[str, Any]:
    """Return the plain attributes of an optimizer, beta by beta."""
    found: dict[str, Any] = {"class": type(optimizer).__qualname__}
    for name, value in vars(optimizer).items():
        is_list = isinstance(value, list | tuple) and all(isinstance(each, _PLAIN) for each in value)
        if not name.startswith("_") and (isinstance(value, _PLAIN) or is_list):
            found[name] = list(value) if is_list else value
    return found
