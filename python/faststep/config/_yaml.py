"""YAML: text to plain values with the line of each, and back.

Values without quotes mean what YAML 1.2's core schema says (https://yaml.org/spec/1.2.2/#103-core-schema): `1e-3` is a
number, `no` and `2001-01-01` are text, and only `true` and `false` are truth values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from faststep.config._errors import ConfigError, Path, Problem, short

_LIMIT = 100_000  # values, with those that aliases repeat
_TAG = "tag:yaml.org,2002:"
_WORDS = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
    "merge": (re.compile(r"^<<$"), ["<"]),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012, its own


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012, its own

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that is there twice, twice."""
        return True


for _name, (_pattern, _first) in _WORDS.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def read(text: str | bytes, name: str) -> tuple[Any, dict[Path, str]]:
    """Read YAML.

    Args:
        text: The text; bytes are UTF-8, or UTF-16 with a byte order mark.
        name: What places call it.

    Returns:
        Mappings with text for keys, lists, text, numbers, truth values and None; and the place of each, `name:line`.

    Raises:
        ConfigError: It is no such YAML.
    """
    try:
        node = _compose(text)
        return (None, {(): name}) if node is None else _Reader(name).read(node)
    except yaml.YAMLError as error:
        raise ConfigError([_refusal(error, name)]) from None
    except RecursionError:
        raise ConfigError([Problem((), "expected fewer levels of nesting", name)]) from None


def write(values: Any) -> str:
    """Write plain values as YAML in ASCII, which `read` gives back as they were."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120)
    return text


def _compose(text: str | bytes) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            node: yaml.Node | None = loader.get_single_node()
        finally:
            loader.dispose()
    except (ValueError, OverflowError) as error:  # of an escape such as "\\UFFFFFFFF", which PyYAML does not check
        raise yaml.YAMLError(str(error)) from None
    return node


def _refusal(error: yaml.YAMLError, name: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    place = f"{name}:{mark.line + 1}" if mark else name
    text = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return Problem((), f"expected YAML: {text}", place)


class _Reader:
    """Converter of PyYAML's nodes into values; it notes their places."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[Path, str] = {}
        self.problems: list[Problem] = []
        self.open: set[int] = set()
        self.count = 0

    def read(self, node: yaml.Node) -> tuple[Any, dict[Path, str]]:
        value = self.value(node, ())
        if self.problems:
            raise ConfigError(self.problems)
        return value, self.places

    def place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def refuse(self, path: Path, message: str, node: yaml.Node) -> None:
        self.problems.append(Problem(path, message, self.place(node)))

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.places.setdefault(path, self.place(node))
        self.count += 1
        if id(node) in self.open or self.count > _LIMIT:
            what = "an alias that holds itself" if id(node) in self.open else f"more than {_LIMIT} values"
            raise ConfigError([Problem(path, f"expected plain values, got {what}", self.place(node))])
        self.open.add(id(node))
        try:
            return self.inside(node, path)
        finally:
            self.open.remove(id(node))

    def inside(self, node: yaml.Node, path: Path) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and kind in ("null", "bool", "int", "float", "str", "merge"):
            return self.scalar(node, kind, path)
        return self.refuse(path, f"expected plain values, got the tag {short(node.tag)}", node)

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        lines: dict[str, int] = {}
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str" or not _is_text(key):
                self.refuse(path, f"expected text for a key, got {_shown(key_node)}", key_node)
            elif key in lines:
                self.refuse((*path, key), f"set twice, the first time in line {lines[key]}", key_node)
            else:
                lines[key] = key_node.start_mark.line + 1
                self.places.setdefault((*path, key), self.place(key_node))
                result[key] = self.value(value_node, (*path, key))
        for key, value in self.merged(node, path):
            result.setdefault(key, value)
        return result

    def merged(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield what `<<` brings; the first of several wins, and keys of the mapping itself win over all."""
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                several = isinstance(value_node, yaml.SequenceNode)
                for each in value_node.value if several else [value_node]:
                    if isinstance(each, yaml.MappingNode):
                        yield from self.value(each, path).items()
                    else:
                        self.refuse(path, "expected a mapping after <<", key_node)

    def scalar(self, node: yaml.ScalarNode, kind: str, path: Path) -> Any:
        text: str = node.value
        if not _is_text(text):
            return self.refuse(path, f"expected text, got {short(text)}, which no file can hold", node)
        if kind not in _WORDS or kind == "merge":
            return text
        if not _WORDS[kind][0].match(text):
            return self.refuse(path, f"expected {kind}, as its tag says, got {short(text)}", node)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "float":
            return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
        try:
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        except ValueError:
            return self.refuse(path, f"expected a number of fewer digits, got {len(text)} of them", node)


def _is_text(value: str) -> bool:
    """Return whether it can be written: YAML has escapes for half a character."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _shown(node: yaml.Node) -> str:
    return short(node.value) if isinstance(node, yaml.ScalarNode) else "a list or a mapping"


def override(text: str, values: Any, places: dict[Path, str]) -> None:
    """Set one value, `a.b=c`, in what was read; `c` is YAML, and mappings on the way are made.

    Raises:
        ConfigError: It is no such text, or leads through something that has no such key.
    """
    name = f"override {short(text)}"
    keys, equals, written = text.partition("=")
    *way, last = keys.strip().split(".")
    if not equals or "" in (*way, last):
        raise ConfigError([Problem((), "expected key=value, as in train.steps=100", name)])
    holder: Any = values
    path: Path = ()
    for key in way:
        if isinstance(holder, dict) and holder.get(key) is None:
            holder[key] = {}
            here = *path, key  # in brackets, mypy takes it for syntax of Python 3.11
            places[here] = name
        path += (_key(holder, key, path, name),)
        holder = holder[path[-1]]
    path += (_key(holder, last, path, name),)
    holder[path[-1]], found = read(written, name)
    for stale in [each for each in places if each[: len(path)] == path]:
        del places[stale]
    places.update({path + rest: name for rest in found})


def _key(holder: Any, key: str, path: Path, name: str) -> str | int:
    """Return a key as what holds it takes it: a name, or a number that its list has."""
    if isinstance(holder, dict):
        return key
    if isinstance(holder, list) and key.isdecimal() and int(key) < len(holder):
        return int(key)
    what = f"a list of {len(holder)}" if isinstance(holder, list) else short(holder)
    raise ConfigError([Problem(path, f"expected something with the key {short(key)}, got {what}", name)])
