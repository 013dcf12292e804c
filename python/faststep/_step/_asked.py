"""What code may ask for by a name that it makes, or by a function that it knows under another name."""

from __future__ import annotations

import collections
import functools
import re
import sys
import types
from typing import Any

import mlx.core as mx
import numpy as np

from faststep._step._library import is_installed, is_library_class, is_library_function, is_own
from faststep._step._named import DYNAMIC, LOOKUPS, asked, codes_of, named, texts
from faststep._step._nodes import GLOBAL, MODULES
from faststep._step._of_library import OfLibrary
from faststep._step._things import PLAIN, is_a

# of which there are subclasses whose objects have attributes, and methods, beside what they hold
BASES = (dict, list, tuple, set, frozenset, functools.partial)
_DATA = (mx.array, np.ndarray, collections.deque, *BASES, *PLAIN)
_WRITTEN_IN_C = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    types.ClassMethodDescriptorType,
)
_CODE = (type, property, staticmethod, classmethod, types.FunctionType, types.ModuleType)
_NOT_OWN = ("__", "@")  # names that begin so are Python's, or pytest's, of asserts
_IN_NAMES = re.compile(r"[\w.]{3,}")  # a text of which a name may be made
_MAX_TEXTS = 1000  # a vocabulary has more


class Asking(OfLibrary):
    """The part of a search for what no code has the name of."""

    def ask_in(self, space: int, function: types.FunctionType) -> None:
        """Note whether a function's code, unless it is installed, may ask for any attribute, global or module."""
        code = function.__code__
        if is_installed(code.co_filename):
            return
        names, attributes, modules, dynamic = named(code)
        self.any_attribute |= dynamic
        self._ask(asked(names, attributes, modules))
        self.own_spaces.setdefault(space, function.__globals__)
        for each in codes_of(code):
            self.asking.update(filter(_IN_NAMES.fullmatch, texts(each.co_consts)))

    def name_function(self, at: int, value: Any) -> None:
        """Add the name of a library's function or class, which code may call by another one: `look = vars`."""
        if is_a(value, types.FunctionType):
            of_library = is_library_function(value)
        else:
            of_library = is_library_class(value) if is_a(value, type) else is_a(value, _WRITTEN_IN_C)
        if not of_library:
            return
        name = value.__name__
        self.names.add(name)
        self.any_attribute |= name in DYNAMIC
        if name in LOOKUPS and self.nodes[at][2] != name:
            self._ask(asked(frozenset({name}), frozenset(), frozenset()))

    def follow_asked(self) -> None:
        """Add globals and modules of the user's where the code may ask for any.

        Modules are that of the code, and those whose names the code has or reaches, or begin with a text that it has.
        """
        for space, known in self.own_spaces.items() if self.any_global else ():
            for name, value in list(known.items()):
                is_data = is_a(value, _DATA) or is_own(type(value).__module__)
                if self.may_ask(name, value) and (is_data or is_own(getattr(value, "__module__", None))):
                    self.add(space, GLOBAL, name, value)
        if self.any_module:
            exactly = self.texts | {str(known.get("__name__")) for known in self.own_spaces.values()}
            begins = tuple(self.asking)
            asked_for = [name for name in sys.modules if name in exactly or name.startswith(begins)]
            for name in filter(is_own, asked_for):
                self.add(0, MODULES, name, sys.modules[name])

    def may_ask(self, name: str, value: Any) -> bool:
        """Return whether code may ask for something by a name that it makes.

        For data by any name; for functions and classes, which lead far, by a text that the code has or reaches, or by
        one with such a text in it. Others are noticed as they are called (`_calls.py`).
        """
        if name.startswith(_NOT_OWN) or not is_a(value, _CODE):
            return not name.startswith(_NOT_OWN)
        return name in self.texts or any(text in name for text in self._parts())

    def is_named(self, name: str, value: Any, everything: bool) -> bool:
        """Return whether the code may name an attribute of a class or a Python module."""
        return name in self.attributes or (everything and self.may_ask(name, value))

    def _ask(self, what: tuple[bool, bool]) -> None:
        self.any_global |= what[0]
        self.any_module |= what[1]

    def _parts(self) -> set[str]:
        """Return the texts of which a name may be made: those of the code, and those that it reaches."""
        count = len(self.asking), len(self.texts)
        if count != self.counted:
            met = self.texts if len(self.texts) <= _MAX_TEXTS else ()
            self.counted, self.parts = count, self.asking.union(filter(_IN_NAMES.fullmatch, met))
        return self.parts
