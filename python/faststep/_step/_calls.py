"""Calls of what a loss reads while it is traced, and can only be noticed as it is called: clocks, files, the system."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import datetime
import dis
import functools
import gc
import inspect
import io
import operator
import os
import random
import re
import struct
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from faststep._step._inside import LOCKS, read_of
from faststep._step._library import is_own, is_standard
from faststep._step._named import codes_of, named
from faststep._step._positions import FILE, moves
from faststep._step._switches import switches
from faststep._step._things import (
    BUFFERS,
    CACHE,
    GETTERS,
    PLAIN,
    STREAMS,
    VIEWS,
    is_a,
    is_immutable,
    root_of,
)

_COUNTERS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_CLOCKS = frozenset(
    {getattr(time, name + unit) for name in _COUNTERS for unit in ("", "_ns")}
    | {time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime}
)
_FILES = frozenset(
    {open, os.open, os.stat, os.lstat, os.fstat, os.access, os.listdir, os.scandir, os.readlink, os.read, os.lseek}
    | {np.fromfile}
)
_ENTROPY = frozenset({os.urandom, getattr(os, "getrandom", os.urandom)})
_OF_SYSTEM = frozenset(
    {sys.getrefcount, sys.getallocatedblocks, gc.get_count, gc.get_stats, gc.get_objects, weakref.getweakrefcount}
    | {gc.get_referrers, weakref.getweakrefs}
    | {getattr(os, name, os.times) for name in ("getloadavg", "getpriority", "sched_getaffinity", "waitpid", "waitid")}
)
_SYSTEM_MODULES = frozenset(
    {"resource", "_socket", "select", "fcntl", "termios", "pwd", "grp", "_tracemalloc", "_posixshmem"}
)
_NOTICED = _CLOCKS | _FILES | _ENTROPY | _OF_SYSTEM
RANDOM = "the system's randomness"
SYSTEM = "the system"
GENERATOR = "a generator"
PACKAGE = "the state of a step, a loader or a trainer"
DRAWN = (RANDOM, FILE, GENERATOR, PACKAGE)  # of which another call gives something else
_TAKES = frozenset({"read", "readline", "readlines", "read1", "readinto", "__next__"})
_CHANGES = frozenset({"add", "append", "clear", "close", "extend", "flush", "put", "release", "update", "write"})
_TURNS = {
    "acquire": 1,
    "acquire_lock": 1,
    "release": -1,
    "release_lock": -1,
}  # `with` and the standard library take no lock for good
_SILENT = frozenset({"logging", "warnings", "linecache", "traceback", "inspect", "tokenize", "importlib"})
_BY_ADDRESS = (ctypes.string_at.__code__, ctypes.wstring_at.__code__)
_MEMORY = ("get_active_memory", "get_peak_memory", "get_cache_memory")
_UNNOTICED = {"load": "files"} | dict.fromkeys(_MEMORY, SYSTEM)  # functions of MLX's, of which Python notices no call
_NAMES = frozenset({"__subclasses__", "now", "utcnow", "today", "seed", "generate_time_safe"})
# of these objects it is known what they hold, or nothing changes in them
_OPEN: tuple[type, ...] = (
    *(*PLAIN, *BUFFERS, *STREAMS, *VIEWS, *GETTERS, CACHE, dict, list, tuple, set, frozenset, deque),
    *(mx.array, np.ndarray, BaseException),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType, types.ModuleType),
    *(types.CellType, property, staticmethod, classmethod, functools.partial, weakref.ref, *weakref.ProxyTypes),
    *(contextvars.ContextVar, struct.Struct, operator.itemgetter, types.SimpleNamespace, re.Match),
)
# properties and methods of this package's objects that change from call to call, and are not looked at between them
_STATEFUL = ("faststep._step._step", "faststep.data._loader", "faststep.training._loop", "faststep.training._trainer")
_STATES = frozenset(
    {"stats", "state", "attributes", "average", "stage", "seconds", "signal", "reading"}
    | {"accumulate", "max_grad_norm", "options"}
)
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_OF_MLX = frozenset({*dir(mx), *dir(mx.array), *dir(mx.fast), *dir(mx.random), *dir(nn), *dir(nn.losses)})
_LIBRARIES = frozenset({"mlx", "numpy", "faststep", "nanobind", "pydantic_core"})


class Calls:
    """Calls of what can only be noticed as it is called, while `profile` is the thread's profile function.

    These are the clock, files, the system and its randomness, and methods of objects that a loss reaches of which it is
    not known what they hold, since they are not written in Python.
    """

    def __init__(
        self,
        reached: Iterable[Any] = (),
        frames: dict[int, types.FrameType] | None = None,
        codes: Iterable[types.CodeType] = (),
    ) -> None:
        self.found: dict[str, str] = {}  # what is read, with the line
        self._codes = {id(code) for code in codes}  # that the search has followed
        self._within = {id(each) for code in codes for each in codes_of(code)}
        self.written: set[int] = set()  # addresses of files
        self.turned: collections.Counter[int] = (
            collections.Counter()
        )  # how often locks have been taken, by their address
        self._watched = switches()
        self._closed = {id(each): each for each in reached if _is_closed(each)}
        self._frames = frames or {}  # of generators that a loss reaches

    def drawn(self) -> list[tuple[str, str]]:
        """Return of what another call gives something else, with the lines."""
        return [(what, place) for what, place in self.found.items() if what in DRAWN]

    def profile(self, frame: types.FrameType, event: str, function: Any) -> None:
        """Note a call."""
        if event == "call":
            what = self._of_python(frame)
            if what and (place := _place(frame.f_back)):
                self.found.setdefault(what, place)
        if event != "c_call":
            return
        own, name = getattr(function, "__self__", None), function.__name__
        if name in _TURNS and is_a(own, LOCKS) and not is_standard(frame.f_code.co_filename):
            self.turned[id(own)] += _TURNS[name]
        if id(own) in self._closed:
            what = None if name in _CHANGES or name.startswith("__") else _held(own, name)
            if name in _CHANGES:
                self.written.add(id(own))
        elif function in _NOTICED or name in _NAMES:
            what = _what(frame, function)
        elif type(own) is types.ModuleType and own.__name__ in _SYSTEM_MODULES and id(function) not in self._watched:
            what = SYSTEM
        else:
            return
        place = _place(frame) if what else None
        if what and place:
            self.found.setdefault(what, place)

    def _of_python(self, frame: types.FrameType) -> str | None:
        """Return what Python code reads, and note what it reads by functions of MLX's."""
        if id(frame.f_code) in self._codes:
            for what, place in unnoticed(frame.f_code):
                self.found.setdefault(what, place)
        elif self._codes and id(frame.f_code) not in self._within and self._is_met(frame):
            return f"what {frame.f_code.co_name} reads"
        if frame.f_code.co_name in _STATES and frame.f_globals.get("__name__") in _STATEFUL:
            return PACKAGE
        if frame.f_code in _BY_ADDRESS:
            return SYSTEM
        return GENERATOR if id(frame) in self._frames else None

    def _is_met(self, frame: types.FrameType) -> bool:
        """Return whether it is a function of the user's which the search has not found, and which reads something."""
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if code.co_flags & _SUSPENDED or code.co_name in ("__del__", "<module>"):
            return False
        if not isinstance(module, str) or not is_own(module) or code in _collecting():
            return False
        caller = frame.f_back
        while caller is not None and id(caller.f_code) not in self._within:
            if caller.f_globals.get("__name__", "").split(".")[0] in _SILENT:
                return False
            caller = caller.f_back
        return caller is not None and _reads_more(code, frame.f_globals)


def _reads_more(code: types.CodeType, known: dict[str, Any]) -> bool:
    """Return whether code reads more than its arguments: attributes, what it encloses, globals that are data."""
    names, attributes, _, _ = named(code)
    functions = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
    data = any(name in known and not is_a(known[name], functions) for name in names)
    return data or bool(code.co_freevars) or not attributes <= _OF_MLX


@functools.lru_cache(maxsize=4096)
def unnoticed(code: types.CodeType) -> list[tuple[str, str]]:
    """Return what code reads by functions of MLX's, of which Python notices no call, with the lines."""
    found: list[tuple[str, str]] = []
    line, last = code.co_firstlineno, None
    for each in dis.get_instructions(code):
        line = each.starts_line if type(each.starts_line) is int else line
        if last in ("mx", "core") and each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each.argval in _UNNOTICED:
            found.append((_UNNOTICED[each.argval], f"{code.co_filename}:{line}"))
        last = each.argval
    inner = (constant for constant in code.co_consts if is_a(constant, types.CodeType))
    return found + [each for constant in inner for each in unnoticed(constant)]


def _is_closed(value: Any) -> bool:
    """Return whether only methods of an object, which are written in C, may tell what it holds."""
    cls = type(value)
    known = is_a(value, _OPEN) or is_immutable(cls) or root_of(cls) in _LIBRARIES
    return not (known or moves(value) or read_of(value) is not None)


def _held(own: Any, name: str) -> str | None:
    """Return what is read of an object by one of its methods."""
    if isinstance(own, io.IOBase):
        return FILE if name in _TAKES else ("the place in an open file" if name in ("tell", "peek") else None)
    return f"a {type(own).__module__}.{type(own).__qualname__}"


def _what(frame: types.FrameType, function: Any) -> str | None:
    """Return what a function without Python code reads."""
    cls, name = getattr(function, "__self__", None), function.__name__
    if function in _FILES:
        return "files"
    if function in _ENTROPY or name == "generate_time_safe":
        return RANDOM
    if name == "seed":  # without a seed, which a generator takes from the system
        return RANDOM if isinstance(cls, random.Random) and _seeds_freely(frame) else None
    if function in _OF_SYSTEM or name == "__subclasses__":
        return SYSTEM
    of_class = isinstance(cls, type) and issubclass(cls, datetime.date)
    return "the clock" if function in _CLOCKS or of_class else None


def _seeds_freely(frame: types.FrameType) -> bool:
    return frame.f_code is random.Random.seed.__code__ and frame.f_locals.get("a") is None


def _collecting() -> list[Any]:
    """Return the code that Python calls as it collects garbage."""
    return [getattr(callback, "__code__", None) for callback in gc.callbacks]


def _place(frame: types.FrameType | None) -> str | None:
    """Return the line from which the standard library is called; none where that only writes a log or a warning.

    None also where Python calls it by itself, as it collects garbage.
    """
    collecting = _collecting()
    while frame is not None:
        if frame.f_code in collecting:
            return None
        if frame.f_globals.get("__name__", "").split(".")[0] in _SILENT:
            return None
        if not is_standard(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
