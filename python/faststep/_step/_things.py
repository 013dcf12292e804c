"""Kinds of objects among those that a loss reaches, by their class alone: `__class__` may be the user's to compute."""

from __future__ import annotations

import argparse
import array
import collections
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import gc
import inspect
import io
import itertools
import operator
import string
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from faststep._step._library import is_library_class

PLAIN: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, mx.Dtype),
    *(np.number, np.bool_, np.character, np.datetime64, np.timedelta64),
    *(fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta),
)
# of which two that are equal are the same, or what is in them is compared
_TOLD_APART = (
    *(type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, type, weakref.ref),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, types.CodeType),
)
# compared as bytes; a structured scalar of NumPy's is a view
BUFFERS: tuple[type, ...] = (
    *(bytearray, memoryview, array.array, np.void),
    *(ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union),
)
STREAMS = (io.StringIO, io.BytesIO)  # compared as what is in them and their position
_ORDERED = collections.OrderedDict[Any, Any]()
VIEWS: tuple[type, ...] = (
    *(types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())),
    *(type(_ORDERED.keys()), type(_ORDERED.values()), type(_ORDERED.items())),
)
WEAK_SETS = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
GETTERS = (operator.attrgetter, operator.methodcaller)
CACHE = functools._lru_cache_wrapper
MAX_ITEMS, _MAX_QUEUE, _MAX_RESULTS = 4096, 256, 64
_RECORDS = (
    *(types.SimpleNamespace, argparse.Namespace, string.Template, threading.local, threading.Event),
    *(collections.UserDict, collections.UserList, collections.UserString, collections.ChainMap, BaseException),
)
# of these also the classes that are derived from theirs
_RECORD_MODULES = ("queue", "configparser", "threading", "asyncio", "multiprocessing", "concurrent", "sched")
# of these none: classes that keep nothing, or more than their methods read for the user
_CLOSED_MODULES = (
    "abc",
    "enum",
    "typing",
    "types",
    "random",
    "io",
    "codecs",
    "encodings",
    "importlib",
    "logging",
    "unittest",
)
_MADE_BY_PYTHON = 1 << 9  # a flag of classes
# modules of this package whose objects are no losses, nor parts of them
_OF_STEPS = ("faststep._step", "faststep.training", "faststep.data", "faststep.doctor")
# what is read of some objects of the standard library
_CHOSEN = {
    "logging": ("level", "disabled", "parent"),
    "unittest.mock": ("_mock_return_value", "_mock_side_effect", "_mock_wraps", "_mock_children", "return_value"),
    "asyncio.base_events": (),
    "concurrent.futures.thread": ("_shutdown",),
    "concurrent.futures.process": (),
    "multiprocessing.context": (),
    "multiprocessing.process": (),
}


def is_a(value: Any, cls: Any) -> bool:
    """Return whether an object is of a class by its type: functions of `mx.compile` report another `__class__`."""
    return issubclass(type(value), cls)


def size(value: Any) -> int:
    """Return the number of items of a container, whatever a user's class makes of `len`."""
    for kind in (dict, list, tuple, collections.deque):
        if is_a(value, kind):
            return kind.__len__(value)
    return len(value)


def is_record(value: Any) -> bool:
    """Return whether a library's code reads the attributes of an object for the user."""
    if is_a(value, _RECORDS) or any(root_of(base) in _RECORD_MODULES for base in type(value).__mro__):
        return True
    cls = type(value)
    root = root_of(cls)
    if root == "faststep" and not cls.__module__.startswith(_OF_STEPS) and callable(value):
        return True
    of_library = (root == "numpy" or root in sys.stdlib_module_names) and root not in _CLOSED_MODULES
    return of_library and bool(cls.__flags__ & _MADE_BY_PYTHON) and _is_open(cls) and not is_immutable(cls)


def _is_open(cls: type) -> bool:
    return cls.__dictoffset__ != 0 or any("__slots__" in vars(base) for base in cls.__mro__)


def root_of(cls: type) -> str:
    """Return the name of the package that a class is from."""
    return cls.__module__.split(".")[0] if isinstance(cls.__module__, str) else ""


def is_immutable(cls: type) -> bool:
    """Return whether objects of a class are compared by what is in them, and can be keys: that does not change."""
    made = next(vars(base)["__hash__"] for base in cls.__mro__ if "__hash__" in vars(base))  # a mock's makes more mocks
    return made is not None and made is not object.__hash__


def chosen(value: Any) -> list[str] | None:
    """Return the attributes of an object of the standard library that are followed, where these are known."""
    for base in type(value).__mro__:
        if base.__module__ in _CHOSEN:
            return list(_CHOSEN[base.__module__])
    return None


def is_fixed(value: Any) -> bool:
    """Return whether a number or a string has no attributes of a user's class."""
    return is_library_class(type(value))


def is_numbers(value: Any) -> bool:
    """Return whether it is a `deque` of numbers alone: the last rewards, say."""
    short = is_a(value, collections.deque) and 0 < size(value) <= MAX_ITEMS
    return short and all(is_a(each, PLAIN) for each in value)


def is_of_numbers(value: Any) -> bool:
    """Return whether it is a list or a dict of numbers and texts alone: a history of losses, say."""
    if is_a(value, dict):
        return is_of_numbers([*dict.keys(value), *dict.values(value)])
    return is_a(value, list) and all(type(each) in PLAIN for each in list.__iter__(value))


def is_large_deque(value: Any) -> bool:
    """Return whether it is a `deque` of which only the length is watched: a replay buffer, say."""
    return is_a(value, collections.deque) and size(value) > _MAX_QUEUE and not is_numbers(value)


def holds_values(value: Any) -> bool:
    """Return whether the first items of a list, dict or tuple are numbers and texts, or tuples of such."""
    items = list(itertools.islice(value.values() if is_a(value, dict) else value, 64))
    items += [each for item in items if type(item) is tuple for each in item]
    return all(is_a(each, PLAIN) or type(each) is tuple for each in items)


def is_buffer(value: Any) -> bool:
    """Return whether it is a `deque` of objects, which may grow at each step: it is followed where code names it."""
    return is_a(value, collections.deque) and size(value) > 0 and not is_numbers(value)


def has_attributes(value: Any) -> bool:
    """Return whether the attributes of an object are followed."""
    if is_record(value) or chosen(value) is not None:
        return True
    return not is_library_class(type(value)) and _is_open(type(value))


def attributes(value: Any) -> dict[str, Any]:
    """Return the instance dict of an object, whatever its class makes of a look at attributes.

    Raises:
        TypeError: It has one that cannot be looked at.
    """
    if type(value).__dictoffset__ == 0 and not is_a(value, threading.local):
        return {}
    for look in (getattr, object.__getattribute__):
        try:
            found = look(value, "__dict__")
        except Exception:
            continue
        if is_a(found, dict):
            return found  # type: ignore[no-any-return]
    if is_library_class(type(value)):  # one of asyncio's, written in C
        return {}
    raise TypeError("its attributes are hidden")


def slots(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the slots of a class and of those that it is derived from, by name."""
    for base in cls.__mro__:
        if "__slots__" in vars(base) and not is_library_class(base):
            own = ((n, slot) for n, slot in vars(base).items() if type(slot) is types.MemberDescriptorType)
            yield from ((n, slot) for n, slot in own if inspect.getattr_static(cls, n, None) is slot)  # else hidden


def members(value: Iterable[Any]) -> list[Any]:
    """Return the objects of a user's classes in a collection that can be referred to weakly."""
    return [each for each in list(value) if is_member(each) and type(each).__weakrefoffset__ != 0]


def is_member(value: Any) -> bool:
    """Return whether it is an object of a user's class, which is itself alone and no value."""
    return not is_a(value, (type, types.FunctionType, *PLAIN)) and has_attributes(value)


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two equal objects of one class have the same attributes; of a library's, what it pickles."""
    if is_a(one, (set, frozenset)) and not all(map(_same, one, other)):
        return False  # or in another order
    if is_library_class(type(one)):
        return type(one) in _TOLD_APART or _same(_pickled(one), _pickled(other))
    if not _same(dict(attributes(one)), dict(attributes(other))):
        return False
    pairs = ([getattr(each, name, None) for each in (one, other)] for name, _ in slots(type(one)))
    return all(_same(*pair) for pair in pairs)


def _pickled(value: Any) -> Any:
    """Return of what pickle makes an object again: ranges and times, say, are equal that are not the same."""
    try:
        made = value.__reduce_ex__(4)
    except Exception:
        return None  # it is not pickled
    return made[:3] if is_a(made, tuple) else made


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are one, or of one class and equal, with all that is in them."""
    if one is other:
        return True
    if type(one) is not type(other) or is_a(one, (mx.array, np.ndarray)):
        return False
    if is_a(one, dict):
        return _same(list(dict.items(one)), list(dict.items(other))) and are_alike(one, other)
    if is_a(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other)) and are_alike(one, other)
    if is_a(one, (float, complex)):
        return repr(one) == repr(other) and are_alike(one, other)
    return bool(one == other) and are_alike(one, other)


def held(value: Iterable[Any]) -> list[Any]:
    """Return the objects of user classes and the functions in a set or among the keys of a dict: within keys too."""
    found: list[Any] = []
    for each in list(value):
        if is_a(each, (tuple, frozenset)):
            found += held(each)
        elif is_a(each, weakref.ref):
            found += held([each()])
        elif is_a(each, types.FunctionType) or is_member(each):
            found.append(each)
    return found


def holder(value: Any) -> Callable[[], Any]:
    """Return what gives an object back, and does not keep it alive where that can be."""
    return weakref.ref(value) if type(value).__weakrefoffset__ else lambda: value


class Kept:
    """What finds an object among those that a function with a cache keeps."""

    def __init__(self, value: Any) -> None:
        self._get = holder(value)
        self._id = id(value)

    def __call__(self, cache: Any) -> Any:
        """Return the object, if it is there."""
        value = self._get()
        return value if any(each is value for each in results(cache)) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and self._id == other._id and self._get() is other._get()

    def __hash__(self) -> int:
        return self._id


def kept_in(cache: Any) -> list[Any]:
    """Return those of the results that a function with a cache keeps from which something else is found, or changes."""
    if cache.cache_info().currsize > MAX_ITEMS:
        return []
    fixed = (type, types.ModuleType, mx.array, *PLAIN)
    return [each for each in results(cache) if not is_a(each, fixed)]


def states_in(cache: Any) -> list[Any]:
    """Return those in which something may change: one state for all who ask for it, say."""
    found = [each for each in kept_in(cache) if not is_a(each, (tuple, types.FunctionType))]
    containers = (dict, list, set, collections.deque)
    return [each for each in found if is_a(each, containers) or has_attributes(each)]


def forget_states(cache: Any, misses: int) -> None:
    """Take the results out of a function's cache that it has made since it had made so many."""
    if misses == 0:
        cache.cache_clear()
        return
    known = _dict_of(cache, gc.get_referents(cache))[1]
    for _ in range(min(cache.cache_info().misses - misses, len(known))):
        known.popitem()  # of a cache with bounds too: Python looks whether what is the oldest is still in the dict


def results(cache: Any) -> list[Any]:
    """Return what a function with a cache keeps."""
    referents = gc.get_referents(cache)
    place, known = _dict_of(cache, referents)
    if place <= 1:  # without bounds, or empty
        return list(known.values())
    found = dict(zip(referents[1:place:3], referents[2:place:3], strict=False))  # the last of a key
    return [found[key] for key in known if key in found]


def values_kept(cache: Any) -> tuple[Any, ...]:
    """Return the numbers and texts that a function with a cache keeps, and which arrays; of many results nothing."""
    if cache.cache_info().currsize > _MAX_RESULTS:
        return ()
    found = (Kept(each) if is_a(each, mx.array) else each for each in results(cache))
    return tuple(each for each in found if type(each) in (Kept, *PLAIN))


def _dict_of(cache: Any, referents: list[Any]) -> tuple[int, dict[Any, Any]]:
    """Return the place of a cache's dict among what its function refers to, and the dict.

    Behind a class come the keys and results of a cache with bounds, then the dict, and the function.
    """
    wrapped = cache.__wrapped__
    place = len(referents) - 1
    while place > 0 and referents[place] is not wrapped:
        place -= 1
    place -= 1
    known = referents[place] if place > 0 else None
    return place, known if type(known) is dict else {}


def parts(value: Any) -> tuple[str, ...]:
    """Return the names of what makes up a callable or a descriptor that is no plain function."""
    if is_a(value, types.MethodType):
        return ("__func__", "__self__")
    if is_a(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        own = value.__self__
        return () if own is None or is_a(own, (types.ModuleType, type)) else ("__self__",)
    if is_a(value, (functools.partial, functools.partialmethod)):
        return ("func", "args", "keywords")
    if is_a(value, functools.singledispatchmethod):
        return ("dispatcher", "func")
    if is_a(value, property):
        return ("fget", "fset")
    if is_a(value, (staticmethod, classmethod)):
        return ("__func__",)
    if is_a(value, functools.cached_property):
        return ("func",)
    if is_a(value, np.flatiter):
        return ("base", "index")
    return ("__wrapped__",) if is_a(value, CACHE) else ()


def refill(buffer: Any, contents: Any) -> None:
    """Give a `bytearray`, an `array.array` or an object of ctypes its bytes of before, a stream its position too."""
    if is_a(buffer, bytearray):
        buffer[:] = contents
    elif is_a(buffer, array.array):
        del buffer[:]
        buffer.frombytes(contents)
    elif is_a(buffer, memoryview):
        buffer.cast("B")[:] = contents
    elif is_a(buffer, STREAMS):
        buffer.seek(0)
        buffer.truncate()
        buffer.write(contents[0])
        buffer.seek(contents[1])
    elif is_a(buffer, np.void):
        buffer[()] = np.frombuffer(contents, dtype=buffer.dtype)[0]
    else:
        ctypes.memmove(ctypes.addressof(buffer), contents, len(contents))
