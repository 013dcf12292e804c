"""The arguments of a component against the signature of what it uses: bound by `inspect`, typed by pydantic."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as File
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from faststep._files import expanded
from faststep.config._errors import expected, short, unknown

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature(target: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a callable, annotations evaluated where they can be; None where it is unknown."""
    try:
        return inspect.signature(target, eval_str=True)
    except Exception:  # an annotation is the user's code, and may be anything
        try:
            return inspect.signature(target)
        except (TypeError, ValueError):
            return None


def missing(takes: inspect.Signature, given: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters that must be given and are not."""
    bound = takes.bind_partial(**{name: value for name, value in given.items() if _binds(takes, name)}).arguments
    required = [each for each in takes.parameters.values() if each.default is each.empty]
    return [each.name for each in required if each.kind not in _ANY_NUMBER and each.name not in bound]


def is_open(takes: inspect.Signature) -> bool:
    """Return whether it takes any number of positional arguments."""
    return any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in takes.parameters.values())


def complaints(takes: inspect.Signature, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments that do not fit, each with what is wrong."""
    names = [name for name, each in takes.parameters.items() if each.kind in _BY_NAME]
    for name, value in given.items():
        if not _binds(takes, name):
            yield name, unknown(name, names)
        elif (problem := converted(value, hint_of(takes, name))[1]) is not None:
            yield name, problem


def hint_of(takes: inspect.Signature, name: str) -> Any:
    """Return the annotation of a parameter; that of `**options` for others; `Any` where there is none."""
    rest = [each for each in takes.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    found = takes.parameters.get(name) or next(iter(rest), None)
    return Any if found is None or found.annotation is found.empty else found.annotation


def converted(value: Any, hint: Any) -> tuple[Any, str | None]:
    """Return a plain value as a hint has it (a path of text, a tuple of a list), and what is wrong with it.

    Components, and values where the hint is none that pydantic knows, are as they should be.
    """
    adapter = _adapter(hint)
    if adapter is None or not _is_plain(value):
        return value, None
    try:
        return adapter.validate_json(json.dumps(value), strict=True), None
    except ValidationError as error:
        errors = error.errors()
        fields = _fields(hint)
        if strange := [each["loc"][-1] for each in errors if each["type"] == "unexpected_keyword_argument"]:
            return value, unknown(strange[0], fields)
        found = {expected(each): each["input"] for each in errors}
        inside = [str(each["loc"][0]) for each in errors if each["loc"] and each["loc"][0] in fields]
        problem = f"expected {' or '.join(found)}, got {short(next(iter(found.values())))}"
        return value, ": ".join([*inside[:1], problem])


def _fields(hint: Any) -> list[str]:
    """Return the names of a dataclass's fields, or of one among several kinds."""
    kinds = [each for each in (hint, *getattr(hint, "__args__", ())) if dataclasses.is_dataclass(each)]
    return [field.name for each in kinds for field in dataclasses.fields(each)]


def is_component(value: Any) -> bool:
    """Return whether a value is a component: `{use: NAME, ...}`."""
    return isinstance(value, dict) and isinstance(value.get("use"), str)


def below(value: Any, folder: File) -> Any:
    """Put the paths in a value below a folder, what stands for other names in them replaced.

    Raises:
        ValueError: It stands for nothing.
    """
    if isinstance(value, File):
        return folder / expanded(str(value))
    if isinstance(value, list | tuple):
        return type(value)(below(each, folder) for each in value)
    return {key: below(each, folder) for key, each in value.items()} if isinstance(value, dict) else value


def _binds(takes: inspect.Signature, name: str) -> bool:
    try:
        takes.bind_partial(**{name: None})
    except TypeError:
        return False
    return True


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return not is_component(value) and all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    try:
        return _made(hint)
    except (PydanticUserError, TypeError, NameError, RecursionError):  # no schema, not hashable, names not there
        return None


@functools.lru_cache(maxsize=1000)
def _made(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)
