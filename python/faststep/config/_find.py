"""All components of a config, found by name."""

from __future__ import annotations

from typing import Any

from faststep.config import _arguments, _kinds
from faststep.config._components import Part, Parts
from faststep.config._optimizers import find_optimizers
from faststep.config._usage import Usage

SOME = 10**6  # steps of an epoch, as long as the data have not been made


def find_all(parts: Parts, usage: Usage) -> dict[str, Any]:
    """Find all components.

    Args:
        parts: What finds one, and collects the problems.
        usage: The values of the config.

    Returns:
        Parts by name: model, loss, metrics (by name), train, validation, collate, optimizers (pairs of part and
        patterns), callbacks, loggers. None stands for one that was not given or has a problem. Lengths of schedules
        that depend on the data's are provisional: `find_optimizers` is called again when that is known.
    """
    found: dict[str, Any] = {
        "model": parts.find(usage.top["model"], _kinds.MODEL, ("model",)),
        "loss": _loss(parts, usage),
        "metrics": {name: parts.find(each, _kinds.METRIC, ("metrics", name)) for name, each in usage.metrics.items()},
        "optimizers": find_optimizers(parts, usage.top["optimizer"], usage.steps(SOME), SOME),
    }
    for name, component in usage.components.items():
        kind = _kinds.COLLATE if name == "collate" else _kinds.DATASET
        found[name] = component and parts.find(component, kind, ("data", name))
    for name, kind in (("callbacks", _kinds.CALLBACK), ("loggers", _kinds.LOGGER)):
        found[name] = [parts.find(each, kind, (name, i)) for i, each in enumerate(usage.top[name])]
    return found


def _loss(parts: Parts, usage: Usage) -> Part | None:
    """Find the loss; a built-in one is told whether it has to give its weight, and outputs for metrics."""
    part = parts.find(usage.top["loss"], _kinds.LOSS, ("loss",))
    if part is None or part.users:
        return part
    if any(each.use != "perplexity" for each in usage.metrics.values()):
        part.arguments["outputs"] = True
    if not usage.step["weighted"]:
        return part
    takes = _arguments.signature(part.target)
    if takes is not None and "weighted" in takes.parameters:
        part.arguments["weighted"] = True
    else:
        parts.refuse(("step", "weighted"), f"expected a loss that gives its weight, got {usage.top['loss'].use}")
    return part
