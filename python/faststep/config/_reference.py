"""Descriptions of a config made from its models and the built-in components: a JSON schema, and a page of Markdown."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from faststep.config import _arguments, _kinds
from faststep.config._kinds import Kind
from faststep.config._schema import Config

_OWN = {"pattern": "^[^:]+:[^:]+$", "description": "Your own: module:attribute or file.py:attribute."}
# The kind of component that each key of the config holds.
_KINDS: dict[str, Kind] = {
    "model": _kinds.MODEL,
    "loss": _kinds.LOSS,
    "data.train": _kinds.DATASET,
    "data.validation": _kinds.DATASET,
    "data.test": _kinds.DATASET,
    "data.collate": _kinds.COLLATE,
    "metrics": _kinds.METRIC,
    "optimizer": _kinds.OPTIMIZER,
    "callbacks": _kinds.CALLBACK,
    "loggers": _kinds.LOGGER,
}
_SHOWN = {
    "Models": _kinds.MODEL,
    "Losses": _kinds.LOSS,
    "Metrics": _kinds.METRIC,
    "Datasets": _kinds.DATASET,
    "Collates": _kinds.COLLATE,
    "Optimizers": _kinds.OPTIMIZER,
    "Schedules": _kinds.SCHEDULE,
}
_HEAD = """\
# Config reference

`make docs` writes this page from the code. `faststep schema` prints the same
as a JSON schema for editors (`# yaml-language-server: $schema=faststep.schema.json` at the head of a config).

[training.md](training.md) explains the sections. A component is `{use: NAME, ...}` with its arguments; in
place of a built-in name it may be your own, `module:attribute` or `file.py:attribute`. Intervals are steps, or epochs
where the type says so (`1 epoch`); lengths of schedules may be epochs too.
"""


def schema() -> dict[str, Any]:
    """Return the JSON schema of a config: its keys with types, ranges and defaults, and the names of the components."""
    made = Config.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for key, kind in _KINDS.items():
        section, _, name = key.rpartition(".")
        holder = made["$defs"][section.capitalize()] if section else made
        holder["properties"][name] = _named(holder["properties"][name], kind)
    return made


def _named(value: Any, kind: Kind) -> Any:
    """Add a kind's names wherever a schema refers to a component."""
    if isinstance(value, list):
        return [_named(each, kind) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("$ref", "").endswith("/Component"):
        names: list[Any] = [{"enum": sorted(kind.names())}] if kind.names() else []
        return {"allOf": [value, {"properties": {"use": {"anyOf": [*names, _OWN]}}}]}
    return {key: _named(each, kind) for key, each in value.items()}


def reference() -> str:
    """Return a page of Markdown: a table for each section, and one for each kind of component."""
    parts = [_HEAD, *_sections(Config, ""), "## Components\n", *map(_components, _SHOWN, _SHOWN.values())]
    return "\n".join(parts).rstrip() + "\n"


def _sections(model: type[BaseModel], path: str) -> Iterator[str]:
    """Yield the table of a section, and those of the sections in it."""
    properties = model.model_json_schema()["properties"]
    inner: list[tuple[str, type[BaseModel]]] = []
    rows = []
    for name, field in model.model_fields.items():
        key = f"{path}{name}"
        section = _section(field.annotation)
        if section is not None:
            inner.append((key, section))
            continue
        default = "required" if field.is_required() else f"`{_json(field.get_default(call_default_factory=True))}`"
        rows.append(f"| `{key}` | {_type(properties[name])} | {default} |")
    yield f"## {f'`{path[:-1]}`' if path else 'The config'}\n\n{_paragraph(model)}\n"
    yield _table(("key", "type", "default"), rows)
    for key, section in inner:
        yield from _sections(section, f"{key}.")


def _section(hint: Any) -> type[BaseModel] | None:
    options = [hint, *getattr(hint, "__args__", ())]
    found = [each for each in options if isinstance(each, type) and issubclass(each, BaseModel)]
    return found[0] if found and found[0].__name__ != "Component" else None


def _type(schema: dict[str, Any]) -> str:
    """Say in words what a JSON schema takes."""
    if "$ref" in schema:
        return "component"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{_json(each)}`" for each in schema.get("enum", [schema.get("const")]))
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in options))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "pattern" in schema:
        return "epochs (`1 epoch`)" if "epoch" in schema["pattern"] else "a time (`90m`)"
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "string": "text",
        "null": "null",
    }
    word = words.get(schema.get("type", ""), "mapping")
    names = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}
    limits = [text.format(_json(schema[name])) for name, text in names.items() if name in schema]
    return " ".join([word, *limits])


def _components(title: str, kind: Kind) -> str:
    rows = []
    for name, target in sorted(kind.names().items()):
        target = target() if kind is _kinds.COLLATE and name == "stack" else target
        rows.append(f"| `{name}` | {_signature(target, kind)} | {_first_line(target)} |")
    return f"### {title}\n\n{_table(('name', 'arguments', ''), rows)}"


def _signature(target: Any, kind: Kind) -> str:
    takes = _arguments.signature(target)
    called = kind is _kinds.COLLATE and not inspect.isclass(target)  # with the items
    if takes is None or called:
        return ""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    shown = [each for each in takes.parameters.values() if each.kind in by_name]
    return ", ".join(
        f"`{each.name}`" + ("" if each.default is each.empty else f" = `{_json(each.default)}`") for each in shown
    )


def _first_line(target: Any) -> str:
    text = inspect.getdoc(target) or ""
    line = re.split(r"\n\s*\n|(?<=[.])\s", text.strip(), maxsplit=1)[0]
    plain = re.sub(r":math:`([^`]*)`", r"\1", re.sub(r"\s*\[\d+\]", "", " ".join(line.split())))
    return plain.replace("|", "\\|")


def _paragraph(model: type[BaseModel]) -> str:
    text = inspect.cleandoc(model.__doc__ or "")
    return re.sub(r"\n\nAttributes:.*", "", text, flags=re.DOTALL)


def _json(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{key}: {each}" for key, each in value.model_dump().items()) + "}"
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


def _table(head: Iterable[str], rows: list[str]) -> str:
    names = list(head)
    return "\n".join([f"| {' | '.join(names)} |", "|" + "---|" * len(names), *rows]) + "\n"
