"""Components: from `{use: NAME, ...}` to a callable whose signature the arguments fit, and to an object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from faststep.config import _arguments
from faststep.config._errors import ConfigError, Path, Problem, Source, unknown
from faststep.config._kinds import Kind
from faststep.config._schema import Component
from faststep.config._user_code import NotThere, attribute, importable


@dataclass
class Part:
    """A component that has been found, with arguments that fit.

    Attributes:
        path: Its keys in the config.
        kind: The kind of object that it makes.
        target: What its name stands for.
        arguments: Plain values, and other parts.
        folder: What is importable while it is made.
        users: Whether it is the user's own code.
    """

    path: Path
    kind: Kind
    target: Any
    arguments: dict[str, Any]
    folder: File
    users: bool
    source: Source = field(repr=False)

    def make(self) -> Any:
        """Make it.

        Raises:
            ConfigError: What a built-in name stands for refuses its arguments, or it gives something else. A
                `CodeError` where code of the user's own raised an exception, which is its cause.
        """
        arguments = {name: _made(value) for name, value in self.arguments.items()}
        try:
            with importable(self.folder):
                made = self._call(arguments)
        except ConfigError:
            raise
        except Exception as error:
            if self.users:
                raise self.source.raised(self.path, error) from error
            if not isinstance(error, TypeError | ValueError | OverflowError | OSError | ImportError):
                raise
            name, _, message = str(error).partition(": ")
            named = name in self.arguments
            path = (*self.path, name) if named else self.path
            raise ConfigError([self.source.problem(path, message if named else str(error))]) from error
        if not self.kind.fits(made):
            message = f"expected {self.kind.gives}, got {type(made).__name__}"
            raise ConfigError([self.source.problem((*self.path, "use"), message)])
        return made

    def _call(self, arguments: dict[str, Any]) -> Any:
        if not callable(self.target) or (self.is_function and not arguments):
            return self.target
        return functools.partial(self.target, **arguments) if self.is_function else self.target(**arguments)

    @property
    def is_function(self) -> bool:
        """True if the target itself is the function that is wanted: it still needs what it is to be called with."""
        if not self.users or not self.kind.function or inspect.isclass(self.target) or not callable(self.target):
            return False
        takes = _arguments.signature(self.target)
        return takes is None or _arguments.is_open(takes) or bool(_arguments.missing(takes, self.arguments))


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return [_made(each) for each in value]
    return value.make() if isinstance(value, Part) else value


class Parts:
    """Finder of the components of a config; it collects the problems with them.

    Args:
        source: Where the values of the config come from.
        folder: The config's folder.
        loads: Whether the user's own code is loaded; without, it is passed over.

    Attributes:
        problems: Problems found so far.
    """

    def __init__(self, source: Source, folder: str, *, loads: bool = True) -> None:
        self.source, self.folder = source, File(folder)
        self.problems: list[Problem] = []
        self._loads = loads

    def refuse(self, path: Path, message: str) -> None:
        """Note a problem."""
        self.problems.append(self.source.problem(path, message))

    def find(
        self, component: Component, kind: Kind, path: Path, arguments: Mapping[str, Any] | None = None
    ) -> Part | None:
        """Find what a component uses, and hold its arguments against the signature.

        Args:
            component: The component.
            kind: What it is to give.
            path: Its keys in the config.
            arguments: Its arguments, where they are not the component's own: parts among them, say.

        Returns:
            The part, None where there is a problem.
        """
        users = ":" in component.use
        if users and not self._loads:
            return None
        before = len(self.problems)
        target = self._target(component.use, kind, (*path, "use"), users)
        if target is not None:
            given = component.arguments if arguments is None else arguments
            part = Part(path, kind, target, dict(given), self.folder, users, self.source)
            self._fill(part)
        return part if len(self.problems) == before else None

    def _target(self, use: str, kind: Kind, path: Path, users: bool) -> Any:
        if not users:
            names = kind.names()
            if use not in names:
                hint = " (the user's own are module:attribute or file.py:attribute)"
                self.refuse(path, unknown(use, names, kind.name) + hint)
            return names.get(use)
        try:
            return attribute(use, self.folder)
        except NotThere as error:
            self.refuse(path, str(error))
        except Exception as error:
            raise self.source.raised(path, error) from error
        return None

    def _fill(self, part: Part) -> None:
        """Hold the arguments against the signature, find the components among them, and make paths of paths."""
        if not callable(part.target):
            for name in part.arguments:
                self.refuse((*part.path, name), f"{part.target!r:.60} takes no arguments")
            return
        takes = _arguments.signature(part.target)
        if takes is None:
            part.arguments = {name: self._inside(each, part, name) for name, each in part.arguments.items()}
            return
        bad = dict(_arguments.complaints(takes, part.arguments))
        for name, message in bad.items():
            self.refuse((*part.path, name), message)
        for name in _arguments.missing(takes, part.arguments):
            if not part.is_function:
                self.refuse((*part.path, name), "missing")
        for name in part.arguments.keys() - bad.keys():
            value, _ = _arguments.converted(part.arguments[name], _arguments.hint_of(takes, name))
            try:
                part.arguments[name] = _arguments.below(self._inside(value, part, name), self.folder)
            except ValueError as error:
                self.refuse((*part.path, name), str(error))

    def _inside(self, value: Any, part: Part, *keys: str | int) -> Any:
        """Find the components among the arguments of another."""
        if _arguments.is_component(value):
            return self.find(Component.model_validate(value), part.kind, (*part.path, *keys))
        if isinstance(value, list):
            return [self._inside(each, part, *keys, i) for i, each in enumerate(value)]
        return value
