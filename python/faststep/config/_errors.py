"""Problems of a config: all at once, each with its place and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str | int, ...]  # the keys that lead to a value


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: The keys that lead to it.
        message: What was expected, what was given, what to do.
        place: Where it was set, `file:line` or the override; empty where that is unknown.
    """

    path: Path
    message: str
    place: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.place, dotted(self.path), self.message]))


class ConfigError(ValueError):
    """A config that cannot be used. The message lists all that was found.

    Attributes:
        problems: Each of them.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__(lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} errors in the config:", *lines]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return ConfigError, (self.problems,)


class CodeError(ConfigError):
    """Code of the user's own, which a config names, raised an exception: this error's `__cause__`."""

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return CodeError, (self.problems,)


@dataclass(frozen=True)
class Source:
    """Places of the values of a config; equality of configs ignores them.

    Attributes:
        places: The place of every key, by its path: `file:line`, or the override.
    """

    places: dict[Path, str] = field(default_factory=dict, compare=False)

    def problem(self, path: Path, message: str) -> Problem:
        """Return a problem with the place of its key, or of the nearest key around it."""
        around = (path[:length] for length in range(len(path), -1, -1))
        return Problem(path, message, next((self.places[keys] for keys in around if keys in self.places), ""))

    def raised(self, path: Path, error: Exception) -> CodeError:
        """Return the error for an exception of code that the config names at a key."""
        return CodeError([self.problem(path, f"{type(error).__name__}: {error}")])


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
    "greater_than_equal": "a number from {ge} on",
    "greater_than": "a number above {gt}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number up to {le}",
    "literal_error": "{expected}",
    "string_too_short": "text that is not empty",
    "too_short": "a list that is not empty",
    "callable_type": "{{use: ...}}",
    "none_required": "null",
    "path_type": "a path",
    "tuple_type": "a list",
    "dataclass_type": "a mapping",
    "string_pattern_mismatch": "text of the form {pattern}",
}


def expected(error: Mapping[str, Any]) -> str:
    """Say in words what one of pydantic's errors expected."""
    context = error.get("ctx", {})
    if error["type"] == "value_error":  # of a validator of ours
        return str(context["error"])
    return _EXPECTED.get(error["type"], "").format(**context) or str(error["msg"])


def dotted(path: Path) -> str:
    """Join keys as an override writes them: `optimizer.0.learning_rate`."""
    return ".".join(map(str, path))


def unknown(name: object, names: Iterable[str], what: str = "key") -> str:
    """Return the message for an unknown name, with the nearest of the known ones, or all of them."""
    names = {each.lower(): each for each in sorted(names)}
    near = difflib.get_close_matches(str(name).lower(), names, n=1)
    hint = f"did you mean {names[near[0]]!r}?" if near else f"expected one of {', '.join(names.values())}"
    return f"unknown {what} {short(name)}: {hint if names else 'there are none'}"


def short(value: Any, limit: int = 60) -> str:
    """Show a value as a config writes it, cut where it is long."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
