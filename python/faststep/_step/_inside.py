"""What objects of libraries hold that is neither an attribute nor an item, and how that is read: a place, a length."""

from __future__ import annotations

import collections
import ctypes
import io
import mmap
import operator
import queue
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from faststep._step._positions import position, state_of
from faststep._step._things import CACHE, PLAIN, attributes, is_a, is_immutable, root_of

Read = Callable[[Any], Any]

LOCKS = _LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_HASHES = frozenset({"digest", "copy", "update"})
_MAX_BYTES = 1 << 16  # from which on a checksum is compared
_PEEKS = frozenset({"length_hint", "__length_hint__", "repr", "copy", "deepcopy", "__copy__", "__reduce__", "gi_frame"})
_GENERATORS = frozenset({"bit_generator", "getstate", "get_state", "__getstate__"})
_OF_PACKAGE = frozenset({"epoch", "position", "number", "skipped", "best"})  # numbers of loaders and trainers
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_KNOWN: tuple[type, ...] = (
    *(mx.array, nn.Module, np.ndarray, np.generic, type, types.FunctionType, types.ModuleType, weakref.ref),
    *(types.CodeType, types.FrameType, types.TracebackType, types.MethodType, types.BuiltinFunctionType),
)


def _pointed(pointer: Any) -> Any:
    """Return the bytes of what a pointer of ctypes points to."""
    return bytes(memoryview(pointer.contents)) if pointer else None


def _mapped(memory: Any) -> Any:
    """Return what is in a mapped file and its position; None of one that is closed."""
    if memory.closed:
        return None
    return memory.tell(), memory[:] if len(memory) <= _MAX_BYTES else zlib.crc32(memory)


def _buffered(buffer: Any) -> Any:
    with memoryview(buffer) as view:
        return bytes(view) if view.nbytes <= _MAX_BYTES else zlib.crc32(view)


def _tokenizer(tokenizer: Any) -> Any:
    return tokenizer.get_vocab_size(), repr(tokenizer.padding), repr(tokenizer.truncation)


def _keys(ordered: Any) -> Any:
    """Return the keys of a dict that keeps another order than a dict does."""
    return tuple(map(id, collections.OrderedDict.__iter__(ordered)))


def names_of(value: Any) -> Any:
    """Return the names of an object's attributes in their order."""
    return tuple(attributes(value))


_BY_CLASS: tuple[tuple[type, Read], ...] = (
    (_LOCK, _LOCK.locked),
    (_RLOCK, repr),
    (queue.SimpleQueue, queue.SimpleQueue.qsize),
    (threading.Thread, threading.Thread.is_alive),
    (weakref.finalize, operator.attrgetter("alive")),
    (collections.OrderedDict, _keys),
    (mmap.mmap, _mapped),
    (ctypes._Pointer, _pointed),
    (operator.methodcaller, repr),
    (operator.attrgetter, repr),
)


def read_of(value: Any) -> Read | None:
    """Return the function that reads what an object holds, if there is one."""
    if is_a(value, collections.OrderedDict) and all(is_a(key, PLAIN) for key in value):
        return tuple
    for cls, read in _BY_CLASS:
        if is_a(value, cls):
            return read
    cls = type(value)
    if cls.__name__ == "SemLock" and root_of(cls) == "_multiprocessing":
        return cls._get_value  # type: ignore[no-any-return]
    if root_of(cls) == "_asyncio" and "_state" in vars(cls):
        return operator.attrgetter("_state")
    if cls.__name__ == "Tokenizer" and root_of(cls) == "tokenizers":
        return _tokenizer
    if cls.__name__ == "PickleBuffer":
        return _buffered
    if root_of(cls).startswith("_") and _HASHES <= vars(cls).keys() and "shake" not in getattr(value, "name", "shake"):
        return cls.digest  # type: ignore[no-any-return]
    return None


def read_kept(value: Any, names: set[str]) -> Read | None:
    """Return the same of what changes only as somebody changes it, for code with these names.

    The order of a dict that drops what has not been used for long (`move_to_end`, `popitem`) decides nothing else.
    """
    if is_a(value, (threading.Thread, weakref.finalize, queue.SimpleQueue)):  # the last is a generator for the step
        return None
    return None if is_a(value, collections.OrderedDict) and "popitem" in names else read_of(value)


def read_by_names(value: Any, names: set[str]) -> Read | None:
    """Return the same of what code with these names may look at without taking it: the place of an iterator."""
    if own := [name for name in sorted(names & _OF_PACKAGE) if _is_of_package(getattr(type(value), name, None))]:
        return operator.attrgetter(*own)
    if is_a(value, CACHE) and names & {"cache_info"}:
        return operator.methodcaller("cache_info")
    if hasattr(type(value), "__next__") and not is_a(value, io.IOBase):
        return position if names & _PEEKS else None
    if "numpy.random" in sys.modules and is_a(value, np.random.BitGenerator):
        return lambda generator: state_of(generator.state)
    is_generator = type(value).__name__ in ("Random", "RandomState", "Generator")
    if is_generator and names & _GENERATORS and position(value) != id(value):
        return position
    has_order = names & {"vars", "__dict__"} and not is_a(value, _KNOWN) and len(attributes(value)) > 1
    return names_of if has_order else None


def _is_of_package(found: Any) -> bool:
    """Return whether it is a property of a class of this package."""
    return is_a(found, property) and str(getattr(found.fget, "__module__", "")).startswith("faststep.")


def slots_of(cls: type) -> frozenset[str]:
    """Return the attributes that objects of a class have which is written in C."""
    if is_immutable(cls) or issubclass(cls, (*PLAIN, *_KNOWN)):
        return frozenset()
    names = (name for base in cls.__mro__ for name, each in vars(base).items() if is_a(each, _SLOTS))
    return frozenset(name for name in names if not name.startswith("__"))


def what_slot_gives(value: Any, name: str) -> Any:
    """Return what such an attribute gives; None where that is another object each time that it is asked for."""
    first, second = (getattr(value, name, None) for _ in range(2))
    return first if first is second or is_a(first, PLAIN) else None
