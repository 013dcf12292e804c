"""What code may ask for by a name that it makes, or by a function that it knows under another name."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import operator
import re
import string
import sys
import types
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer

from faststep._step._library import is_installed, is_library_class, is_library_function, is_own
from faststep._step._made_names import made_names
from faststep._step._named import DYNAMIC, LOOKUPS, asked, asks_for_items, codes_of, named, names_of_others, texts
from faststep._step._nodes import GLOBAL, MODULES
from faststep._step._of_library import OfLibrary
from faststep._step._things import GETTERS, PLAIN, VIEWS, attributes, is_a, is_record, size

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
# by which code may read an attribute that it does not name
_BY_ANY_NAME = frozenset({"hasattr", "setattr", "delattr", "__getattr__", "__setattr__", "__delattr__"})
# by which code may read all items of a module, or the modules among them
_OF_ITEMS = frozenset(
    {"items", "values", "get", "pop", "popitem", "setdefault", "copy", "deepcopy", "dict", "state", "__getitem__"}
    | {"getitem", "itemgetter", "children", "modules", "named_modules", "leaf_modules", "filter_and_map", "map"}
    | {"apply", "apply_to_modules", "update_modules", "train", "freeze", "unfreeze", "tree_flatten", "tree_map"}
    | {"tree_map_with_path", "tree_reduce", "tree_merge", "repr", "str", "format", "print", "ascii", "dump", "dumps"}
    | {"vformat", "__reversed__", "__eq__", "__ne__", "__or__", "__ror__", "asdict", "update"}
)
_TAKERS = (*VIEWS, operator.itemgetter, string.Template, string.Formatter)
_COMPILED = ("_gc_func", "gc_func")
# methods that Python or MLX calls without a name in the code
_UNNAMED = frozenset({"__repr__", "__str__", "__format__", "_extra_repr", "__len__", "__getattr__", "__getattribute__"})


def _takes_items(value: Any) -> bool:
    """Return whether an object may take items of a model that it does not name: a user's compiled function, a view."""
    if type(value).__name__ in _COMPILED:
        made_of = [each for each in gc.get_referents(value) if is_a(each, types.FunctionType)]
        return not made_of or not all(map(is_library_function, made_of))
    return is_a(value, _TAKERS)


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
            self.made.update(made_names(each) or ())

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

    def ask_made(self, names: Iterable[str]) -> None:
        """Take those of an object's names for attributes that code has which it may make of texts that are known."""
        if self.made:
            fits = re.compile("|".join(self.made)).fullmatch
            self.attributes.update(name for name in names if not name.startswith(_NOT_OWN) and fits(name))

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

    def leave(self, owner: Any, name: str, node: tuple[int, int, Any, Any] | None) -> None:
        """Add a node of a module's attribute if code may read that, of another owner now; None: note that it may."""
        if is_a(owner, nn.Module):
            self.left.append((owner, name, node))
        elif node is not None:
            self.add(*node)

    def follow_left(self) -> None:
        """Add those nodes that have been left out, and may be read by code that has been met since."""
        for each in list(self.left) if self.left else ():
            owner, name, node = each
            is_item = node is None and dict.__contains__(owner, name)
            if self.may_read(owner, name) or (is_item and self.may_read_items()):
                self.left.remove(each)
                if node is None:
                    self.read.append(name)
                else:
                    self.add(*node)

    def may_read(self, module: nn.Module, name: str) -> bool:
        """Return whether code may read an attribute of a module: by its name, by one that it makes, or unnamed."""
        self.ask_made((name,))
        named_so = self.attributes | self.names | self.of_modules
        known = name in named_so or name in self.texts or name in self.asking or not name.isidentifier()
        if known or self.may_read_any(named_so):
            return True
        if dataclasses.is_dataclass(module) or is_record(module):
            return True
        bases = {base for kind in (type(module), *self.classes.values()) for base in kind.__mro__}
        bases -= {object, nn.Module, *_DATA}
        return any(_names_it(base, name, own=not is_library_class(base)) for base in bases)

    def may_read_any(self, named_so: set[str]) -> bool:
        """Return whether code may read any attribute of an object."""
        anything = self.any_attribute or self.any_global or self.any_module or self.hidden is not None
        if anything or not _BY_ANY_NAME.isdisjoint(named_so) or any(named(code)[3] for code in self.own_codes):
            return True
        return any(map(_has_own_code, self.updating.values()))

    def may_read_items(self) -> bool:
        """Return whether code may read items of a module that it does not name, or what MLX finds in them."""
        if not _OF_ITEMS.isdisjoint(self.attributes | self.names | self.of_modules):
            return True
        if any(_takes_items(value) for value in self.objects):
            return True
        return any(asks_for_items(code) for code in self.own_codes)

    def may_read_state(self, optimizer: Optimizer) -> bool:
        """Return whether code may read the `_state` of an optimizer: it names one that is not its own object's."""
        if "_state" not in self.attributes:
            return False
        if self.any_attribute or not is_library_class(type(optimizer)):
            return True
        getters = any(type(value) in GETTERS for value in self.objects)
        return getters or any(names_of_others(code, "_state") for code in self.own_codes)

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


def owner_of(model: nn.Module, path: str) -> Any:
    """Return the module of which a path in a model leads to an attribute; None: it leads to an item of a container."""
    *parts, name = path.split(".")
    owner: Any = model
    for part in parts:
        if is_a(owner, dict):
            inner = dict.get(owner, part)
            owner = attributes(owner).get(part) if inner is None and is_a(owner, nn.Module) else inner
        elif is_a(owner, (list, tuple)) and part.isdecimal() and int(part) < size(owner):
            owner = owner[int(part)]
        else:
            return None
    of_module = is_a(owner, nn.Module) and name in attributes(owner) and not dict.__contains__(owner, name)
    return owner if of_module else None


def _names_it(cls: type, name: str, own: bool) -> bool:
    """Return whether methods of a class name an attribute; of a user's, those that are called without a name."""
    for key, value in vars(cls).items():
        if own and key not in _UNNAMED:
            continue
        inner = [value.fget, value.fset] if is_a(value, property) else [getattr(value, "__func__", value)]
        codes = [each.__code__ for each in inner if is_a(each, types.FunctionType)]
        if codes and own and issubclass(cls, nn.Module):
            return True  # what they call may do so
        if any(name in {*named(code)[0], *named(code)[1]} for code in codes):
            return True
    return False


def _has_own_code(optimizer: Any) -> bool:
    """Return whether an optimizer calls code of the user's, which may read the model."""
    if not is_library_class(type(optimizer)):
        return True
    todo, seen = [value for name, value in attributes(optimizer).items() if name != "_state"], set[int]()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_a(value, types.FunctionType) and is_library_function(value):
            try:
                todo += [cell.cell_contents for cell in value.__closure__ or ()]
            except ValueError:  # one is empty
                return True
        elif is_a(value, (dict, list, tuple)) and not is_a(value, nn.Module):
            todo += dict.values(value) if is_a(value, dict) else value
        elif not is_a(value, (mx.array, *PLAIN, *_WRITTEN_IN_C)) and not is_a(value, Optimizer):
            return True
    return False
