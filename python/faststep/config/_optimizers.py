"""The optimizer, or several by patterns, and the schedules of their learning rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from faststep.config import _arguments
from faststep.config._components import Part, Parts
from faststep.config._errors import Path, short
from faststep.config._kinds import OPTIMIZER, SCHEDULE
from faststep.config._schema import Component
from faststep.data import epochs_of

_REFUSED = object()  # in the place of a schedule whose problems have been noted
_LENGTHS = {"cosine_decay": "decay_steps", "linear_schedule": "steps", "one_cycle": "steps"}


@dataclass(frozen=True)
class Choice:
    """An optimizer, and the patterns of what it takes; without patterns it takes what is left."""

    part: Part | None
    patterns: list[str]


def find_optimizers(
    parts: Parts, optimizer: Component | list[Component], steps: int | None, epoch: int | None
) -> list[Choice]:
    """Find one optimizer or several, for a training of so many steps, and so many of an epoch, where that is known."""
    if isinstance(optimizer, Component):
        return [_find(parts, optimizer, ("optimizer",), steps, epoch, named=False)]
    paths: list[Path] = [("optimizer", i) for i in range(len(optimizer))]
    return [
        _find(parts, each, path, steps, epoch, named=path != paths[-1])
        for each, path in zip(optimizer, paths, strict=True)
    ]


def _find(
    parts: Parts, component: Component, path: Path, steps: int | None, epoch: int | None, *, named: bool
) -> Choice:
    arguments = dict(component.arguments)
    patterns = arguments.pop("parameters", [])
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        parts.refuse((*path, "parameters"), f"expected a pattern or a list of them, got {short(patterns)}")
        patterns = []
    elif named and not patterns:
        parts.refuse(path, "parameters is missing: only the last optimizer takes what is left")
    elif patterns and not named:
        parts.refuse((*path, "parameters"), "the only or last optimizer takes what is left, it has no patterns")
    schedule = arguments.get("learning_rate")
    if _arguments.is_component(schedule):
        place = (*path, "learning_rate")
        inside = Component.model_validate(_in_steps(parts, schedule, place, epoch))
        found = find_schedule(parts, inside, place, steps)
        arguments["learning_rate"] = _REFUSED if found is None else found
    return Choice(parts.find(component, OPTIMIZER, path, arguments), patterns)


def _in_steps(parts: Parts, value: Any, path: Path, epoch: int | None) -> Any:
    """Turn lengths in epochs, within a schedule, into steps."""
    if isinstance(value, dict):
        return {key: _in_steps(parts, each, (*path, key), epoch) for key, each in value.items()}
    if isinstance(value, list):
        return [_in_steps(parts, each, (*path, i), epoch) for i, each in enumerate(value)]
    epochs = epochs_of(value)
    if epochs is None:
        return value
    if epoch is None:
        parts.refuse(path, f"expected a number of steps, got {short(value)}: the data have no length")
        return epochs
    return epochs * epoch


def find_schedule(parts: Parts, component: Component, path: Path, steps: int | None) -> Part | None:
    """Find a schedule.

    Args:
        parts: What finds it.
        component: It, with `warmup` steps that come first, from `warmup_init`, beside its own arguments.
        path: Its keys in the config.
        steps: How long it goes on, where that is known: what a length that is not given is computed from.
    """
    arguments = dict(component.arguments)
    warmup, init = arguments.pop("warmup", None), arguments.pop("warmup_init", 0.0)
    if not _is_count(warmup) and warmup is not None:
        parts.refuse((*path, "warmup"), f"expected a whole number from 1 on, got {short(warmup)}")
        return None
    if warmup is None and "warmup_init" in component.arguments:
        parts.refuse((*path, "warmup_init"), "set, but nothing reads it: there is no warmup")
    elif _arguments.converted(init, float)[1] is not None:
        parts.refuse((*path, "warmup_init"), f"expected a number, got {short(init)}")
    left = None if steps is None else steps - (warmup or 0)
    if component.use == "join_schedules":
        _join(parts, arguments, path, left)
    length = _LENGTHS.get(component.use)
    if length is not None and length not in arguments and not _fill(parts, arguments, (*path, length), left):
        return None
    part = parts.find(component, SCHEDULE, path, arguments)
    if part is None or warmup is None:
        return part
    from faststep.recipes import warm_up

    return replace(part, target=warm_up, arguments={"schedule": part, "steps": warmup, "init": init})


def _join(parts: Parts, arguments: dict[str, Any], path: Path, steps: int | None) -> None:
    """Find the schedules of a joined one; each goes on to the next boundary, the last to the end."""
    schedules, boundaries = arguments.get("schedules"), arguments.get("boundaries")
    if not isinstance(schedules, list) or not isinstance(boundaries, list) or not all(map(_is_count, boundaries)):
        return  # the signature says what is expected
    edges = [0, *boundaries, steps]
    schedules = arguments["schedules"] = list(schedules)
    if len(boundaries) != len(schedules) - 1 or boundaries != sorted(set(boundaries)):
        message = f"expected {len(schedules) - 1} growing steps, got {short(boundaries)}"
        parts.refuse((*path, "boundaries"), message)
        return
    for i, (schedule, start, end) in enumerate(zip(schedules, edges, edges[1:], strict=False)):
        if _arguments.is_component(schedule):
            lasts = None if end is None else end - start
            found = find_schedule(parts, Component.model_validate(schedule), (*path, "schedules", i), lasts)
            schedules[i] = _REFUSED if found is None else found
        else:
            parts.refuse((*path, "schedules", i), f"expected {{use: ...}}, got {short(schedule)}")


def _fill(parts: Parts, arguments: dict[str, Any], path: Path, left: int | None) -> bool:
    """Set the length of a schedule to what is left of the training."""
    if left is None:
        parts.refuse(
            path,
            "missing: it is what is left of train.steps or train.epochs; neither is set, or the data have no length",
        )
        return False
    arguments[str(path[-1])] = max(1, left)  # the training may end before it begins
    return True


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1
