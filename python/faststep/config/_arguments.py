"""The arguments of a component against the signature of what it uses."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any

from faststep.config._errors import short, unknown

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    File: "a path",
}
_PLAIN = (str, int, float, bool, type(None), list, dict)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return what a callable takes, annotations evaluated where they can be; None where it is unknown."""
    try:
        return inspect.signature(target, eval_str=True).parameters
    except Exception:  # an annotation is the user's code, and may be anything
        try:
            return inspect.signature(target).parameters
        except (TypeError, ValueError):
            return None


def missing(takes: Mapping[str, inspect.Parameter], given: Iterable[str]) -> list[str]:
    """Return the names of parameters that must be given and are not."""
    kinds = (*_BY_NAME, inspect.Parameter.POSITIONAL_ONLY)
    required = [name for name, each in takes.items() if each.kind in kinds and each.default is each.empty]
    return [name for name in required if name not in set(given)]


def is_open(takes: Mapping[str, inspect.Parameter]) -> bool:
    """Whether it takes any number of positional arguments."""
    return any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in takes.values())


def complaints(takes: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments that do not fit, each with what is wrong."""
    names = [name for name, each in takes.items() if each.kind in _BY_NAME]
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    for name, value in given.items():
        if name not in names:
            if not open_ended:
                yield name, unknown(name, names)
        elif not fits(value, takes[name].annotation):
            yield name, f"expected {words(takes[name].annotation)}, got {short(value)}"


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value may be given where a hint stands; components may, and hints of other things take all."""
    if is_component(value) or not isinstance(value, _PLAIN):
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if isinstance(hint, type) and hint in _WORDS:
        if hint in (int, float) and isinstance(value, bool):
            return False
        return isinstance(value, int | float if hint is float else str if hint is File else hint)
    if (origin or hint) in (list, Sequence):
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value if inner)
    if (origin or hint) is Callable:
        return callable(value)
    return True


def is_component(value: Any) -> bool:
    """Whether a value is a component: `{use: NAME, ...}`."""
    return isinstance(value, dict) and isinstance(value.get("use"), str)


def words(hint: Any) -> str:
    """Describe in words what a hint takes."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words(each) for each in inner)
    if origin is typing.Literal:
        return " or ".join(short(each) for each in inner)
    if (origin or hint) in (list, Sequence):
        return f"a list, each {words(inner[0])}" if inner else "a list"
    if (origin or hint) is Callable:
        return "{use: ...}"
    return _WORDS.get(hint, str(hint))


def with_paths(value: Any, hint: Any, folder: File) -> Any:
    """Turn text into a path below a folder where the hint asks for a `pathlib.Path`."""
    inner = typing.get_args(hint)
    if hint is File and isinstance(value, str):
        return folder / value
    if isinstance(value, list) and typing.get_origin(hint) in (list, Sequence):
        return [with_paths(each, inner[0], folder) for each in value]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        changed = [with_paths(value, each, folder) for each in inner]
        return next((each for each in changed if each is not value and each != value), value)
    return value
