"""What a search finds in libraries: functions and classes that may be replaced, and what a user has put there."""

from __future__ import annotations

import collections
import enum
import sys
import types
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from faststep._step._library import is_library_class, is_library_function, is_mlx
from faststep._step._named import named
from faststep._step._nodes import ATTRIBUTE, BASE, CLASS, INSTANCE, ITEM, MODULES, TYPE, Nodes
from faststep._step._things import PLAIN, has_attributes, is_a, parts

_STATE = {"os": ("environ", "environb", "getenv", "getenvb"), "sys": ("argv",)}  # in standard modules
_DATA = (mx.array, dict, list, set, collections.deque, *PLAIN)
MADE_BY_PYTHON = 1 << 9  # a flag of classes: their methods can be replaced


class OfLibrary(Nodes):
    """The part of a search that does not follow what it finds."""

    def follow_builtins(self, at: int, function: types.FunctionType, names: Iterable[str]) -> None:
        """Add the builtins that a function's code names."""
        known = getattr(function, "__builtins__", None)
        if type(known) is not dict:
            return
        at = self.spaces.setdefault(id(known), self.add_place(at, ATTRIBUTE, "__builtins__", known))
        self.openers.add(at)
        for name in sorted(names):
            if name in known:
                self.add_of_library(at, ITEM, name, known[name])
            else:
                self.add_place(at, ITEM, name)

    def follow_library(self, function: types.FunctionType) -> None:
        """Add the functions of libraries that the code of one of MLX's functions names."""
        module = sys.modules.get(function.__module__) if is_mlx(function.__module__) else None
        if module is None or vars(module) is not function.__globals__ or function.__code__ in self.codes:
            return
        self.codes.add(function.__code__)
        names, attributes, _, _ = named(function.__code__)
        at = self.add(0, MODULES, function.__module__, module)
        for name in sorted(names & vars(module).keys()):
            self.add_of_library(at, INSTANCE, name, vars(module)[name])
            if is_a(vars(module)[name], types.ModuleType):
                self.follow_module(self.seen[id(vars(module)[name])], vars(module)[name], attributes)

    def follow_module(self, at: int, module: types.ModuleType, names: Iterable[str]) -> None:
        """Add what a library's module has under some names, and what its modules have."""
        known = vars(module)
        for name in sorted(known.keys() & names):
            if name in _STATE.get(module.__name__, ()):
                self.add(at, INSTANCE, name, known[name])
            else:
                self.add_of_library(at, INSTANCE, name, known[name])
                if is_a(known[name], types.ModuleType) and known[name].__name__.startswith(module.__name__ + "."):
                    self.follow_module(self.seen[id(known[name])], known[name], names)

    def add_of_library(self, at: int, how: int, key: str, value: Any) -> None:
        """Add what a module of a library has under a name: a user's objects there are followed."""
        if is_a(value, type):
            followed = not is_library_class(value)
        elif is_a(value, types.FunctionType):
            followed = not is_library_function(value)
        elif is_a(value, (dict, list, tuple, set, frozenset, collections.deque)):
            followed = value is not sys.modules
        elif is_a(value, types.BuiltinFunctionType):
            followed = False
        else:
            known = is_library_class(type(value)) and not parts(value) and not has_attributes(value)
            followed = not known or is_a(value, (*PLAIN, mx.array, nn.Module, types.ModuleType, type(mx.checkpoint)))
            followed = followed or type(value).__name__ == "_gc_func"
        if followed:
            self.add(at, how, key, value)
            return
        node = self.add_fixed(at, how, key, value)
        if is_a(value, type):
            self.add_class(value)
            self.filtered.append(node)
        elif is_a(value, types.FunctionType):
            self.follow_library(value)
        self.follow_called_within(value)

    def follow_called_within(self, value: Any) -> None:
        """Add the functions and classes that the code of one of NumPy's or the standard library's functions names."""
        function: Any = value if is_a(value, types.FunctionType) else getattr(value, "__wrapped__", None)
        if not is_a(function, types.FunctionType) or is_mlx(function.__module__) or function.__code__ in self.codes:
            return
        module = sys.modules.get(function.__module__)
        if module is None or vars(module) is not function.__globals__ or not is_library_function(function):
            return
        self.codes.add(function.__code__)
        at = self.add(0, MODULES, function.__module__, module)
        for name in sorted(named(function.__code__)[0] & vars(module).keys()):
            inner = vars(module)[name]
            if callable(inner):
                self.add_fixed(at, INSTANCE, name, inner)
            if is_a(inner, type):
                self.add_class(inner)

    def follow_class_data(self, at: int, cls: type) -> None:
        """Add the class of an object, where code may read numbers and containers of it by the object."""
        if any(self.data_of(base) & self.attributes for base in cls.__mro__):
            self.add(at, TYPE, None, cls)

    def data_of(self, base: type) -> set[str]:
        """Return the names under which a class of a library has numbers, arrays and containers."""
        if base not in self.data:
            own = () if issubclass(base, enum.Enum) else vars(base).items()
            self.data[base] = {name for name, value in own if is_a(value, _DATA) and not name.startswith("__")}
        return self.data[base]

    def follow_library_class(self, at: int, number: int, base: type) -> None:
        """Add numbers, arrays and containers that a class of a library has under a name that the code has."""
        for name in sorted(self.data_of(base) & self.attributes):
            self.add(self.add_place(at, BASE, number, base), CLASS, name, vars(base)[name])

    def add_class(self, cls: type) -> None:
        """Add a class whose methods the code may call."""
        for base in cls.__mro__:
            if id(base) in self.classes or not base.__flags__ & MADE_BY_PYTHON or base.__module__ == "nanobind":
                continue
            self.classes[id(base)] = base
            if is_library_class(base):
                self.follow_replaced(base)
            if is_mlx(base.__module__) and base is not nn.Module:
                self.follow_methods(base)

    def follow_replaced(self, cls: type) -> None:
        """Add the functions that a user has put in the places of methods of a library's class."""
        module = sys.modules.get(cls.__module__)
        for name, value in vars(cls).items():
            own = is_a(value, types.FunctionType) and not is_library_function(value)
            if own and module is not None and vars(module).get(cls.__name__) is cls:
                at = self.add(0, MODULES, cls.__module__, module)
                self.add(self.add_fixed(at, INSTANCE, cls.__name__, cls), CLASS, name, value)

    def follow_methods(self, cls: type) -> None:
        """Follow those methods of one of MLX's classes that the code names, and that they name in turn."""
        methods = {name: getattr(method, "__func__", method) for name, method in vars(cls).items()}
        todo, done = {"__call__"} | self.attributes, set[str]()
        while todo := (todo & methods.keys()) - done:
            name = todo.pop()
            done.add(name)
            if is_a(methods[name], types.FunctionType):
                self.follow_library(methods[name])
                todo |= named(methods[name].__code__)[1]
