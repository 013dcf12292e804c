"""Objects that a loss function refers to beside its arguments: the arrays, numbers and objects that its code names.

A loss function reads closure cells, defaults, globals, the object that it is a method of, and whatever their attributes
lead to. `discover` follows its code, and the code of the functions that this leads to, and returns a list of nodes that
the native step compares before each call. Code of MLX, NumPy and the standard library is not followed.
"""

from __future__ import annotations

import argparse
import array
import builtins
import collections
import contextlib
import contextvars
import ctypes
import dis
import enum
import functools
import gc
import operator
import os
import string
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

# Ways from a parent's object to a node's; reach/node.rs has the same numbers.
ROOT, ITEM, INDEX, ATTRIBUTE, INSTANCE, CELL, GLOBAL, TYPE, BASE, CLASS, REFERENT, MODULES, CONTEXT, WEAK = range(14)
# Comparisons that it has to pass.
ARRAY, VALUE, CONTENTS, CONTAINER, OBJECT, FUNCTION, SAME, IDENTITY, ANYTHING, MODULE = range(10)

Node = tuple[int, int, Any, int, Any]  # parent, how it is found, its key, what is compared, what is expected

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, np.generic, mx.Dtype, enum.Enum)
_LIBRARIES = ("mlx", "numpy", "faststep", "builtins")
_STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_RECORDS = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    threading.local,
    threading.Event,
)
# compared as bytes
_BUFFERS: tuple[type, ...] = (bytearray, memoryview, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_VIEWS: tuple[type, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
_WEAK_DICTS = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary)
_GETTERS = (operator.attrgetter, operator.methodcaller)
_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "IMPORT_FROM")
_MAKERS = ("__init__", "__post_init__", "__new__")  # what they store is in an object that was not there before
_STATE = {"os": ("environ", "environb", "getenv", "getenvb"), "sys": ("argv",)}  # in standard modules
_DYNAMIC = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "eval", "exec", "attrgetter", "methodcaller", "getmembers"}
    | {"getattr_static", "__reduce__", "__reduce_ex__", "__getstate__", "format_map"}
)
_LOOKUPS = frozenset({"eval", "exec", "globals", "f_globals", "import_module", "__import__"})
_MAX_ITEMS, _MAX_NODES = 4096, 50_000
_MADE_BY_PYTHON = 1 << 9  # a flag of classes: their methods can be replaced


def discover(roots: tuple[Any, ...], owned: Any) -> tuple[list[Node], list[type]]:
    """Return what a loss function reaches.

    Args:
        roots: The loss function, the model, then modules and other objects that are passed to the loss function. The
            model's own arrays and numbers are left out: they are watched elsewhere.
        owned: The optimizer, which belongs to the step.

    Returns:
        The nodes, each behind its parent, roots numbered as in `roots`, and classes whose methods the loss may call.
    """
    search = _Search(roots[1], owned)
    for at, root in enumerate(roots):
        search.add(-1, ROOT, at, root)
    search.run()
    if search.todo:
        warnings.warn(
            f"faststep: the loss reaches more than {_MAX_NODES:,} objects: those beyond are not watched, and numbers "
            "in them keep the values that they have now. Keep large tables in an mx.array or a NumPy array",
            RuntimeWarning,
            stacklevel=3,  # between the user and this is Step.__call__ or fast_step
        )
    return search.kept(), list(search.classes.values())


def unwatched(array: mx.array, array_id: Callable[[mx.array], int], loss_fn: Any) -> str:
    """Describe an array that a loss function uses from an unwatched place, for a warning.

    Args:
        array: The array, of any shape and dtype.
        array_id: Tells which array objects have the same value.
        loss_fn: The loss function.
    """
    places = _places([array], array_id)
    code = getattr(getattr(loss_fn, "__func__", loss_fn), "__code__", None)
    line = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    place = f" ({places[0]})" if places else ""
    return (
        f"the loss{line} uses an array of shape {array.shape} and {array.dtype} that it takes from where the step does "
        f"not look{place}: it keeps the value that it has now. Pass it as an argument of the step, or keep it in an "
        "attribute, a global, a dict or a list that the loss names"
    )


def kept(arrays: list[mx.array], array_id: Callable[[mx.array], int]) -> str:
    """Describe where arrays stand that a loss has computed while it was traced, for a warning; clear caches of them.

    Args:
        arrays: The arrays, or what they are computed into.
        array_id: Tells which array objects have the same value.
    """
    wanted, places = {array_id(array) for array in arrays}, _places(arrays, array_id)
    for cache in gc.get_objects():
        if type(cache) is functools._lru_cache_wrapper:
            cached = (each for each in gc.get_referents(cache) if type(each) is mx.array)
            if any(array_id(each) in wanted for each in cached):
                cache.cache_clear()
                places.append(f"in the cache of {getattr(cache, '__qualname__', 'a function')}")
    return f" ({places[0]})" if places else " where the step does not look"


def _places(arrays: list[mx.array], array_id: Callable[[mx.array], int]) -> list[str]:
    """Return the places in containers where other objects have the value of one of these arrays."""
    wanted, own, places = {array_id(array) for array in arrays}, {id(array) for array in arrays}, []
    for container in gc.get_objects():
        if type(container) in (dict, list, tuple, collections.deque) and len(container) <= _MAX_ITEMS:
            pairs = container.items() if isinstance(container, dict) else enumerate(container)
            for key, item in list(pairs):
                if type(item) is mx.array and id(item) not in own and array_id(item) in wanted:
                    at = (
                        f"at {key!r} of" if isinstance(container, dict) else "in"
                    )  # the number would be another one each time
                    places.append(f"{at} a {type(container).__name__}")
    return places


def _is(value: Any, cls: Any) -> bool:
    """Return whether an object is of a class by its type: functions of `mx.compile` report another `__class__`."""
    return issubclass(type(value), cls)


def _is_library(function: types.FunctionType) -> bool:
    name = function.__globals__.get("__name__")
    if isinstance(name, str) and name.split(".")[0] in _LIBRARIES:
        return True
    return is_standard(function.__code__.co_filename)


@functools.lru_cache(maxsize=4096)
def is_standard(file: str) -> bool:
    if file.startswith("<frozen"):
        return True
    return os.path.realpath(file).startswith(_STANDARD) and "site-packages" not in file


@functools.lru_cache(maxsize=4096)
def _is_standard_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in sys.builtin_module_names or (file is not None and is_standard(file))


def _is_library_class(cls: type) -> bool:
    return cls.__module__.split(".")[0] in _LIBRARIES or _is_standard_module(cls.__module__)


@functools.lru_cache(maxsize=4096)
def _named(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str], bool]:
    """Return the globals, the attributes and the modules that code names, and whether it may read any attribute."""
    names, attributes, modules = set(), set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _NAMES:
            names.add(instruction.argval)
        elif instruction.opname in _ATTRIBUTES:
            attributes.add(instruction.argval)
        elif instruction.opname == "STORE_ATTR" and code.co_name not in _MAKERS:
            attributes.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            modules |= {instruction.argval, instruction.argval.split(".")[0]}
    dynamic = bool(_DYNAMIC & (names | attributes))
    texts = list(_texts(code.co_consts))
    if _LOOKUPS & (names | attributes) or ("modules" in attributes and "sys" in names | modules):
        names |= {name for text in texts for name in _names_in(text)}
        modules |= set(texts)
    attributes |= {name for text in texts for name in _attributes_in(text)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_names, inner_attributes, inner_modules, inner_dynamic = _named(constant)
            names |= inner_names
            attributes |= inner_attributes
            modules |= inner_modules
            dynamic |= inner_dynamic
    return frozenset(names), frozenset(attributes), frozenset(modules), dynamic


def _texts(constants: Iterable[Any]) -> Iterable[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):  # the names in a pattern of `match`, say
            yield from _texts(constant)


def _attributes_in(text: str) -> Iterable[str]:
    """Return the attributes that a constant may name: "weight", "layer.weight" or "{0.weight}"."""
    if all(part.isidentifier() for part in text.split(".")):
        return text.split(".")
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field] if "{" in text else []
    except ValueError:
        return []
    return [part for field in fields for part in field.replace("[", ".").split(".") if part.isidentifier()]


def _names_in(text: str) -> Iterable[str]:
    """Return the globals that a constant may name, which may be Python code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _named(compile(text.strip(), "<constant>", "exec"))[0]
    except (SyntaxError, ValueError):
        return []


def _containers(root: Any) -> set[int]:
    """Return the addresses of a model's modules, dicts and lists."""
    found: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if isinstance(value, dict | list) and id(value) not in found:
            found.add(id(value))
            todo.extend(value.values() if isinstance(value, dict) else value)
            if isinstance(value, nn.Module):
                todo.extend(vars(value).values())
        elif isinstance(value, tuple):
            todo.extend(value)
    return found


def _is_numbers(value: Any) -> bool:
    """Return whether it is a `deque` without arrays or objects in it: the last rewards, say."""
    short = isinstance(value, collections.deque) and len(value) <= _MAX_ITEMS
    return short and all(isinstance(each, PLAIN) for each in value)


def _has_attributes(value: Any) -> bool:
    if isinstance(value, _RECORDS):
        return True
    cls = type(value)
    return not _is_library_class(cls) and (
        hasattr(value, "__dict__") or any("__slots__" in vars(b) for b in cls.__mro__)
    )


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """Return what makes up a callable or a descriptor that is no plain function."""
    names: tuple[str, ...] = ()
    if _is(value, types.MethodType):
        names = ("__func__", "__self__")
    elif _is(value, functools.partial) or isinstance(value, functools.partialmethod):
        names = ("func", "args", "keywords")
    elif isinstance(value, functools.singledispatchmethod):
        names = ("dispatcher", "func")
    elif isinstance(value, property):
        names = ("fget",)
    elif isinstance(value, staticmethod | classmethod):
        names = ("__func__",)
    elif isinstance(value, functools.cached_property):
        names = ("func",)
    return [(name, getattr(value, name)) for name in names]


class _Search:
    """A walk from the roots to all that the code found on the way names."""

    def __init__(self, model: nn.Module, owned: Any) -> None:
        self.nodes: list[Node] = []
        self.objects: list[Any] = []  # of each node
        self.index: dict[tuple[int, int, Any], int] = {}
        self.owned, self.walked = owned, _containers(model)  # dicts, lists and modules whose arrays are known as slots
        self.seen: dict[int, int] = {}  # the node of each object by its address
        self.todo: collections.deque[int] = collections.deque()
        self.filtered: list[int] = []  # nodes of objects of which only attributes that the code names are followed
        self.attributes: set[str] = set()
        self.any_attribute = False
        self.classes: dict[int, type] = {}

    def add(self, parent: int, how: int, key: Any, value: Any) -> int:
        """Add an object as a node, to be followed."""
        place = (parent, how, key)
        if place not in self.index:
            at = self.index[place] = len(self.nodes)
            kind, expected = self.compared(value)
            self.nodes.append((*place, kind, expected))
            self.objects.append(value)
            if kind not in (VALUE, SAME):
                self.seen[id(value)] = at
                self.todo.append(at)
        return self.index[place]

    def add_place(self, parent: int, how: int, key: Any, value: Any = None) -> int:
        """Add a place that is not followed; None: there is nothing, and something may be put there later."""
        place = (parent, how, key)
        if place not in self.index:
            self.index[place] = len(self.nodes)
            self.nodes.append((*place, ANYTHING, None))
            self.objects.append(value)
        return self.index[place]

    def compared(self, value: Any) -> tuple[int, Any]:
        """Return what is compared in an object, and what is expected."""
        if _is(value, weakref.ref) or type(value) in (*weakref.ProxyTypes, *_VIEWS, *_GETTERS):
            return ANYTHING, None
        if isinstance(value, PLAIN):
            return VALUE, value
        if id(value) in self.seen:
            return SAME, self.seen[id(value)]
        if isinstance(value, mx.array):
            return ARRAY, None
        if isinstance(value, (np.ndarray, set, frozenset, *_BUFFERS)) or _is_numbers(value):
            return CONTENTS, type(value)
        if _is(value, types.FunctionType):
            return FUNCTION, value.__code__
        if isinstance(value, nn.Module):
            if id(value) in self.walked:
                return IDENTITY, weakref.ref(value)
            containers = _containers(value)
            if containers & self.walked:  # the model is a part of it, say: the rest is looked at by itself
                return CONTAINER, None
            self.walked |= containers
            return MODULE, None
        if isinstance(value, dict | list | tuple):
            if id(value) in self.walked:
                return ANYTHING, None
            return (CONTAINER, None) if len(value) <= _MAX_ITEMS else (CONTENTS, type(value))
        if _parts(value):
            return ANYTHING, None
        if value is not self.owned and _has_attributes(value) and not isinstance(value, type):
            return OBJECT, None
        try:
            return IDENTITY, weakref.ref(value)
        except TypeError:
            return IDENTITY, value

    def run(self) -> None:
        """Follow objects until nothing new is met: attributes may be named by code that is met later."""
        while self.todo and len(self.nodes) < _MAX_NODES:
            while self.todo and len(self.nodes) < _MAX_NODES:
                at = self.todo.popleft()
                self.follow(at, self.objects[at])
            for at in self.filtered:
                self.follow_named(at, self.objects[at])

    def follow(self, at: int, value: Any) -> None:
        """Add what an object leads to."""
        if _is(value, weakref.ref):
            self.add(at, WEAK, None, value())
        elif type(value) in weakref.ProxyTypes:
            with contextlib.suppress(ReferenceError, AttributeError):
                self.add(at, WEAK, None, value.__init__.__self__)
        elif _is(value, types.FunctionType):
            self.follow_function(at, value)
        elif parts := _parts(value):
            for name, part in parts:
                self.add(at, ATTRIBUTE, name, part)
        elif type(value) in _VIEWS:
            self.follow_referents(at, value, dict)
        elif type(value) in _GETTERS:
            self.attributes |= {part for text in _texts(value.__reduce__()[1]) for part in _attributes_in(text)}
            self.follow_referents(at, value, types.FunctionType)
        elif isinstance(value, _WEAK_DICTS):
            self.add(at, INSTANCE, "data", vars(value)["data"])
        elif isinstance(value, dict | list | tuple):
            if len(value) <= _MAX_ITEMS:
                self.follow_container(at, value)
        elif isinstance(value, type | types.ModuleType) or (value is not self.owned and _has_attributes(value)):
            self.filtered.append(at)
            self.follow_class(at, value)
            self.follow_named(at, value)
        elif isinstance(value, contextvars.ContextVar):
            self.follow_context(at, value)
        elif isinstance(value, type(os.environ)):
            self.add(at, INSTANCE, "_data", vars(value)["_data"])
        elif callable(value):
            getattr(value, "__dict__", None)  # which Python may make only now, as one more referent
            # of mx.compile, mx.checkpoint and their kind
            self.follow_referents(at, value, types.FunctionType, types.MethodType, functools.partial)

    def follow_referents(self, at: int, value: Any, *kinds: type) -> None:
        """Add those objects of some kinds that an object refers to."""
        for number, referent in enumerate(gc.get_referents(value)):
            if issubclass(type(referent), kinds):
                self.add(at, REFERENT, number, referent)

    def follow_function(self, at: int, function: types.FunctionType) -> None:
        """Add a function's closure and defaults, and the globals that its code names."""
        for number, cell in enumerate(function.__closure__ or ()):
            try:
                self.add(at, CELL, number, cell.cell_contents)
            except ValueError:  # the cell is empty
                continue
        for name in ("__defaults__", "__kwdefaults__", "__wrapped__"):
            if (value := getattr(function, name, None)) is not None:
                self.add(at, ATTRIBUTE, name, value)
        if _is_library(function) and function not in (os.getenv, getattr(os, "getenvb", None)):
            return
        if vars(function):
            self.filtered.append(at)
        names, attributes, modules, dynamic = _named(function.__code__)
        self.attributes |= attributes
        self.any_attribute |= dynamic and "site-packages" not in function.__code__.co_filename
        for name in sorted(names):
            if name in function.__globals__ and not name.startswith("@"):  # such names are pytest's, of asserts
                self.add(at, GLOBAL, name, function.__globals__[name])
            elif not hasattr(builtins, name):
                self.add_place(at, GLOBAL, name)
        for name in sorted(modules & sys.modules.keys()):
            self.add(at, MODULES, name, sys.modules[name])

    def follow_container(self, at: int, value: Any) -> None:
        """Add what is in a dict, list, tuple or module; of a module, what is no slot of it."""
        pairs = [(ITEM, *item) for item in value.items()] if isinstance(value, dict) else []
        if not isinstance(value, dict):
            pairs = [(INDEX, *item) for item in enumerate(value)]
        if isinstance(value, nn.Module):
            pairs += [(INSTANCE, *item) for item in vars(value).items()]
            self.follow_class(at, value)
        of_module = id(value) in self.walked
        pairs.sort(key=lambda pair: not isinstance(pair[2], PLAIN))  # numbers in one row are compared fastest
        for how, key, item in pairs:
            if not of_module or not (isinstance(item, (mx.array, set, *PLAIN)) or id(item) in self.seen):
                self.add(at, how, key, item)

    def follow_context(self, at: int, variable: contextvars.ContextVar[Any]) -> None:
        """Add the value of a context variable, or that it has none."""
        try:
            self.add(at, CONTEXT, None, variable.get())
        except LookupError:
            self.add_place(at, CONTEXT, None)

    def follow_class(self, at: int, value: Any) -> None:
        """Add the class of an object, whose methods the code may call."""
        cls = type(value)
        if isinstance(value, nn.Module) or not _is_library_class(cls):
            self.classes |= {id(base): base for base in cls.__mro__ if base.__flags__ & _MADE_BY_PYTHON}
        if cls is not type and not _is_library_class(cls) and id(cls) not in self.seen:
            self.add(at, TYPE, None, cls)

    def follow_named(self, at: int, value: Any) -> None:
        """Add the attributes of an object, class or Python module that the code names."""
        if isinstance(value, type):
            for number, base in enumerate(value.__mro__):
                if not _is_library_class(base):
                    self.classes[id(base)] = base
                if not _is_library_class(base) and not issubclass(base, enum.Enum):
                    self.follow_base(at, number, base)
            return
        values: Mapping[str, Any] = getattr(value, "__dict__", {})
        if isinstance(value, types.ModuleType):
            library = value.__name__.split(".")[0] in _LIBRARIES or _is_standard_module(value.__name__)
            known = _STATE.get(value.__name__, ()) if library else values
            names = [name for name in known if name in self.attributes and name in values]
        else:
            everything = self.any_attribute or isinstance(value, _RECORDS)
            names = [name for name in values if everything or name in self.attributes]
            names.sort(key=lambda name: not isinstance(values[name], PLAIN))
            self.follow_slots(at, value, everything)
        for name in names:
            self.add(at, INSTANCE, name, values[name])

    def follow_slots(self, at: int, value: Any, everything: bool) -> None:
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if (everything or name in self.attributes) and not name.startswith("__"):
                    if hasattr(value, name):
                        self.add(at, ATTRIBUTE, name, getattr(value, name))
                    else:
                        self.add_place(at, ATTRIBUTE, name)

    def follow_base(self, at: int, number: int, base: type) -> None:
        """Add what the code names of one class of an inheritance, and what Python calls by itself."""
        for name, value in vars(base).items():
            called = name.startswith("__") and _is(value, types.FunctionType)
            if called or (name in self.attributes and not name.startswith("__")):
                self.add(self.add_place(at, BASE, number, base), CLASS, name, value)

    def kept(self) -> list[Node]:
        """Return the nodes that can change, and those that lead to them, renumbered."""
        keep = [self.can_change(at) for at in range(len(self.nodes))]
        for at in reversed(range(len(self.nodes))):
            parent, _, _, kind, expected = self.nodes[at]
            if keep[at]:
                for needed in (parent, expected if kind == SAME else -1):
                    if needed >= 0:
                        keep[needed] = True
        numbers, nodes = {-1: -1}, list[Node]()
        for at, (parent, how, key, kind, expected) in enumerate(self.nodes):
            if keep[at]:
                numbers[at] = len(nodes)
                nodes.append((numbers[parent], how, key, kind, numbers[expected] if kind == SAME else expected))
        return nodes

    def can_change(self, at: int) -> bool:
        """Return whether a user may put another object there, or change it."""
        parent, how, _, kind, expected = self.nodes[at]
        value = self.objects[at]
        if how == ROOT or kind in (ARRAY, CONTENTS, MODULE):
            return True
        if isinstance(value, types.ModuleType) or (
            kind == SAME and isinstance(self.objects[expected], types.ModuleType)
        ):
            return False
        if how in (TYPE, BASE, REFERENT) or (how == CLASS and kind in (FUNCTION, SAME, ANYTHING)):
            return False
        return not (kind in (IDENTITY, ANYTHING, SAME) and id(self.objects[parent]) in self.walked)
