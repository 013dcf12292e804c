"""A config from its file: read, overridden, checked."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path as File
from typing import Any

from pydantic import ValidationError

from faststep._files import expanded, numbered
from faststep.config._components import Parts
from faststep.config._errors import ConfigError, Path, Problem, Source, expected, short, unknown
from faststep.config._find import find_all
from faststep.config._schema import ONE, SEVERAL, Config
from faststep.config._usage import Usage
from faststep.config._yaml import override, read


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Load a config.

    Args:
        path: The YAML file.
        overrides: What is set on top of it, each as `key.key=value`, the value in YAML.

    Returns:
        The config, with all defaults filled in; `run` is `runs/` and the file's name where it is not set, `folder` the
        file's.

    Raises:
        ConfigError: The file cannot be read, or anything in it is wrong; all of it is listed, with lines. What the
            user's own files hold is checked by `build`.
    """
    file = File(path)
    try:
        text = file.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError([Problem((), f"cannot be read: {error}", str(file))]) from None
    values, places = read(text, str(file))
    if values is None:
        values = {}
    for each in overrides:
        override(each, values, places)
    if isinstance(values, dict):
        values.setdefault("run", f"runs/{file.stem}")
        _expand(values, Source(places))
        folder = values.get("folder", ".")
        if isinstance(folder, str):
            values["folder"] = str(file.parent.resolve() / folder)
    return validate(values, Source(places))


def _expand(values: dict[str, Any], source: Source) -> None:
    """Replace what stands for other names in the paths of the config's own keys."""
    problems = []
    for key in ("run", "folder", "weights"):
        if isinstance(values.get(key), str):
            try:
                path = expanded(values[key])
                values[key] = numbered(path) if key == "run" else path
            except ValueError as error:
                problems.append(source.problem((key,), str(error)))
    if problems:
        raise ConfigError(problems)


def validate(values: Any, source: Source | None = None) -> Config:
    """Make a config of plain values, as `load` does of a file.

    Raises:
        ConfigError: Anything is wrong with them.
    """
    source = source or Source()
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        found = error.errors()
        problems = [_problem(each, source) for each in found]
        raise ConfigError(sorted([*problems, *_behind(values, found, source)], key=_order)) from None
    config._source = source
    usage = Usage(config)
    if problems := [*usage.problems(source), *_components(usage, source)]:
        raise ConfigError(sorted(problems, key=_order))
    return config


def _components(usage: Usage, source: Source) -> list[Problem]:
    """Return what is wrong with the built-in components."""
    parts = Parts(source, usage.top["folder"], loads=False)
    find_all(parts, usage)
    return parts.problems


def _behind(values: Any, errors: Iterable[Mapping[str, Any]], source: Source) -> list[Problem]:
    """Return what is wrong with the components where the rest is wrong too: of a config without the wrong keys."""
    values = copy.deepcopy(values)
    for error in errors:
        way = [key for key in error["loc"] if key not in (ONE, SEVERAL)]
        known = len(way) == 1 and error["type"] != "extra_forbidden"
        if error["type"] == "missing" or not way or known or way[0] == "train":
            return []
        holder: Any = reduce(_of, way[:-1], values)
        if isinstance(holder, dict):
            holder.pop(way[-1], None)
    try:
        return _components(Usage(Config.model_validate(values)), source)
    except ValidationError:
        return []


def _of(holder: Any, key: Any) -> Any:
    """Return what a mapping or a list has under a key, or None."""
    if isinstance(holder, list) and isinstance(key, int) and key < len(holder):
        return holder[key]
    return holder.get(key) if isinstance(holder, dict) else None


def _order(problem: Problem) -> tuple[str, int]:
    name, _, line = problem.place.rpartition(":")
    return (name, int(line)) if line.isdecimal() else (problem.place, 0)


def _problem(error: Mapping[str, Any], source: Source) -> Problem:
    """Return an error of pydantic as a problem in this package's words."""
    path: Path = tuple(key for key in error["loc"] if key not in (ONE, SEVERAL))
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return source.problem(path, unknown(path[-1], _section(path[:-1])))
    if kind == "missing":
        return source.problem(path, "missing")
    wanted = expected(error)
    if error.get("ctx", {}).get("class_name") == "Component" and isinstance(given, str):
        wanted += f" such as {{use: {short(given)}}}"
    return source.problem(path, f"expected {wanted}, got {short(given)}")


def _section(path: Path) -> Iterable[str]:
    """Return the keys that a section has."""
    model: Any = Config
    for key in path:
        options = [model.model_fields[key].annotation, *getattr(model.model_fields[key].annotation, "__args__", ())]
        model = next(each for each in options if hasattr(each, "model_fields"))
    return list(model.model_fields)
