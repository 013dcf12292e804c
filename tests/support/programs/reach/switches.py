"""What a loss asks the process, or objects that are written in C; it is changed between the calls."""

from __future__ import annotations

import asyncio
import collections
import ctypes
import decimal
import gc
import hashlib
import io
import itertools
import logging
import math
import mmap
import multiprocessing
import operator
import os
import queue
import random
import resource
import signal
import string
import sys
import tempfile
import threading
import types
import warnings
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from support.programs.reach.registry import (
    Around,
    Box,
    Build,
    Changing,
    Made,
    Make,
    add,
    changed,
    changing,
    made_of,
    program,
    scaled,
    squares,
)


def switch(get: Callable[[], Any], put: Callable[[Any], object], *values: Any) -> Build:
    """Return a program that reads a number of the process, which is put back at the end."""
    return lambda patch: (scaled(get), [lambda value=value: put(value) for value in values])


def held(make: Callable[[], Any], read: Callable[[Any], float], *changes: Callable[[Any], object]) -> Build:
    """Return a program that reads a number of an object, which is changed between its steps."""

    def build(patch: pytest.MonkeyPatch) -> Changing:
        it = make()
        return scaled(lambda: read(it)), [lambda change=change: change(it) for change in changes]

    return build


def rewritten(text: str) -> Callable[[io.StringIO], object]:
    return lambda stream: (stream.seek(0), stream.truncate(), stream.write(text))


WATCHED: dict[str, Build] = {
    "recursion limit": switch(lambda: sys.getrecursionlimit() / 1000, sys.setrecursionlimit, 3000, 1000),
    "switch interval": switch(lambda: sys.getswitchinterval() * 100, sys.setswitchinterval, 0.01, 0.005),
    "garbage collection": switch(
        lambda: 2.0 if gc.isenabled() else 1.0, lambda on: gc.enable() if on else gc.disable(), False, True
    ),
    "NumPy's errors": switch(
        lambda: 2.0 if np.geterr()["over"] == "raise" else 1.0, lambda mode: np.seterr(over=mode), "raise", "warn"
    ),
    "NumPy's buffer": switch(lambda: np.getbufsize() / 4096, np.setbufsize, 4096, 8192),
    "NumPy's printing": switch(
        lambda: float(np.array2string(np.array([1.23456789]))[1:-1]),
        lambda digits: np.set_printoptions(precision=digits),
        *(1, 8),
    ),
    "decimal": switch(
        lambda: float(decimal.getcontext().prec), lambda prec: setattr(decimal.getcontext(), "prec", prec), 5, 28
    ),
    "signals": switch(
        lambda: 1.0 if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL else 2.0,
        lambda handler: signal.signal(signal.SIGUSR1, handler),
        *(signal.SIG_IGN, signal.SIG_DFL),
    ),
    "a thread's name": switch(
        lambda: float(len(threading.current_thread().name)),
        lambda name: setattr(threading.current_thread(), "name", name),
        *("abc", "MainThread"),
    ),
    "levels of logs": switch(
        lambda: 2.0 if logging.getLogger("faststep.switches").isEnabledFor(logging.DEBUG) else 1.0,
        logging.getLogger("faststep.switches").setLevel,
        *(logging.DEBUG, logging.ERROR),
    ),
    "all logs": switch(
        lambda: 1.0 if logging.getLogger("faststep.switches").isEnabledFor(logging.CRITICAL) else 3.0,
        logging.disable,
        *(logging.CRITICAL, logging.NOTSET),
    ),
    "StringIO": held(lambda: io.StringIO("1"), lambda stream: float(stream.getvalue()), rewritten("2"), rewritten("5")),
    "a place in a StringIO": held(
        lambda: io.StringIO("abcdef"), lambda stream: 1.0 + stream.tell(), *(lambda s, n=n: s.seek(n) for n in (3, 5))
    ),
    "BytesIO": held(io.BytesIO, lambda stream: 1.0 + len(stream.getvalue()), *[lambda stream: stream.write(b"ab")] * 2),
    "SimpleQueue": held(
        queue.SimpleQueue, lambda numbers: 1.0 + numbers.qsize(), *[lambda numbers: numbers.put(1)] * 2
    ),
    "count": held(itertools.count, lambda numbers: 1.0 + float(repr(numbers)[6:-1]), *[next] * 2),
    "an iterator": held(lambda: iter([1.0] * 9), lambda numbers: float(operator.length_hint(numbers)), *[next] * 2),
    "mmap": held(
        lambda: mmap.mmap(-1, 16), lambda memory: 1.0 + memory[0], *(lambda m, n=n: m.__setitem__(0, n) for n in (3, 5))
    ),
    "a large mmap": held(lambda: mmap.mmap(-1, 1 << 20), lambda m: 1.0 + m[9], lambda m: m.__setitem__(9, 5)),
    "hashlib": held(hashlib.md5, lambda made: 1.0 + made.digest()[0], *[lambda made: made.update(b"a")] * 2),
    "Lock": held(
        threading.Lock, lambda lock: 1.0 + lock.locked(), lambda lock: lock.acquire(), lambda lock: lock.release()
    ),
    "Semaphore": held(
        lambda: threading.Semaphore(3),
        lambda free: 2.0 if free.acquire(blocking=False) and not free.release() else 1.0,
        *[lambda free: free.acquire()] * 3,
    ),
    "Barrier": held(
        lambda: threading.Barrier(2), lambda barrier: 1.0 + barrier.broken, lambda barrier: barrier.abort()
    ),
    "asyncio.Event": held(asyncio.Event, lambda event: 1.0 + event.is_set(), lambda event: event.set()),
    "asyncio.Queue": held(asyncio.Queue, lambda made: 1.0 + made.qsize(), lambda made: made.put_nowait(1)),
    "multiprocessing.Value": held(
        lambda: multiprocessing.Value("d", 1.0),
        lambda number: number.value,
        *(lambda number, value=value: setattr(number, "value", value) for value in (2.0, 5.0)),
    ),
    "a pointer": held(
        lambda: ctypes.pointer(ctypes.c_double(1.0)),
        lambda number: number.contents.value,
        *(lambda number, value=value: setattr(number.contents, "value", value) for value in (2.0, 5.0)),
    ),
    "OrderedDict": held(
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda table: next(iter(table.values())),
        *(lambda table, key=key: table.move_to_end(key) for key in "ab"),
    ),
    "a view of an OrderedDict": held(
        lambda: (table := collections.OrderedDict(a=1.0, b=2.0), table.values()),
        lambda pair: next(iter(pair[1])),
        lambda pair: pair[0].move_to_end("a"),
    ),
    "order of attributes": held(
        lambda: types.SimpleNamespace(a=1.0, b=2.0),
        lambda it: next(iter(vars(it).values())),
        lambda it: (vars(it).update(c=vars(it).pop("a")), vars(it).update(a=vars(it).pop("c"))),
    ),
    "a cell": held(
        lambda: types.CellType(1.0), lambda cell: cell.cell_contents, lambda cell: setattr(cell, "cell_contents", 3.0)
    ),
    "an exception": held(
        lambda: ValueError(1.0), lambda error: error.args[0], lambda error: setattr(error, "args", (3.0,))
    ),
    "flatiter": held(
        lambda: (table := np.arange(1.0, 5.0), table.flat), lambda pair: pair[1][0], lambda p: p[0].__setitem__(0, 3.0)
    ),
}


@changing("process")
def numpys_errors_that_are_raised(patch: pytest.MonkeyPatch) -> Changing:
    table = np.array([1e38], np.float32)

    def scale() -> float:
        try:
            return float(np.isinf(table * table)[0])
        except FloatingPointError:
            return 3.0

    return scaled(scale), [lambda: np.seterr(over="raise"), lambda: np.seterr(over="ignore")]


@changing("process")
def decimals(patch: pytest.MonkeyPatch) -> Changing:
    number = decimal.Decimal(1)
    context = decimal.getcontext()
    return scaled(lambda: float(number / 3)), [
        lambda: patch.setattr(context, "prec", 2),
        lambda: patch.setattr(context, "prec", 28),
    ]


@changing("process")
def folder(patch: pytest.MonkeyPatch) -> Changing:
    return scaled(lambda: float(len(os.getcwd()))), [lambda: patch.chdir("/"), patch.undo]  # noqa: PTH109


@changing("process")
def life_of_a_finalizer(patch: pytest.MonkeyPatch) -> Changing:
    kept = [Box(1.0)]
    end = weakref.finalize(kept[0], int)
    return scaled(lambda: 1.0 + end.alive), [kept.clear]


@changing("process")
def dict_put_onto_a_library(patch: pytest.MonkeyPatch) -> Changing:
    patch.setattr(nn, "SETTINGS", {"scale": 1.0, "inner": [2.0]}, raising=False)
    settings: Any = nn.SETTINGS  # type: ignore[attr-defined]
    return scaled(lambda: nn.SETTINGS["scale"] * nn.SETTINGS["inner"][0]), [  # type: ignore[attr-defined]
        lambda: settings.update(scale=3.0),
        lambda: settings["inner"].insert(0, 5.0),
        lambda: patch.setattr(nn, "SETTINGS", {"scale": mx.array(4.0), "inner": [1.0]}),
    ]


@changing("process")
def queue_and_set_put_onto_the_standard_library(patch: pytest.MonkeyPatch) -> Changing:
    patch.setattr(math, "LAST", collections.deque([1.0]), raising=False)
    patch.setattr(string, "ALL", {1.0}, raising=False)
    last, every = math.LAST, string.ALL  # type: ignore[attr-defined]
    return scaled(lambda: math.LAST[0] * max(string.ALL)), [  # type: ignore[attr-defined]
        lambda: last.appendleft(3.0),
        lambda: every.add(7.0),
    ]


@changing("process")
def number_of_a_librarys_class(patch: pytest.MonkeyPatch) -> Changing:
    patch.setattr(nn.Linear, "FACTOR", 1.0, raising=False)
    patch.setattr(nn.Linear, "TABLE", {"factor": 1.0}, raising=False)
    table: Any = nn.Linear.TABLE  # type: ignore[attr-defined]
    return scaled(lambda: nn.Linear.FACTOR * nn.Linear.TABLE["factor"]), [  # type: ignore[attr-defined]
        lambda: patch.setattr(nn.Linear, "FACTOR", 3.0),
        lambda: table.update(factor=5.0),
    ]


for name, build in WATCHED.items():
    add("process", name, made_of(build))


@changing("process")
def an_object_in_c_of_which_nothing_is_known() -> Changing:
    packed = zlib.compressobj()
    return scaled(lambda: 1.0 + len(packed.copy().flush())), [lambda: packed.compress(random.randbytes(9))]


@changing("process")
def a_question_to_the_system() -> Changing:
    return scaled(lambda: 1.0 + (resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0)), [lambda: None]


def reading_on(kind: str) -> Make:
    """A loss that reads on in a stream."""

    def make(around: Around) -> Made:
        file = tempfile.TemporaryFile("w+")
        around.opened.enter_context(file)
        stream: Any = io.StringIO() if kind == "StringIO" else file
        stream.writelines(f"{number}\n" for number in range(1, 30))
        stream.seek(0)
        return changed(scaled(lambda: float(stream.readline())), [lambda: None], stream.tell)

    return make


for kind in ("StringIO", "file"):
    add("iterator", f"a {kind} in which the loss reads on", reading_on(kind))


@program("process")
def what_a_loss_does_under_a_lock() -> Made:
    lock, free, numbers = threading.Lock(), threading.Semaphore(2), np.ones(2)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        with lock, free, np.errstate(over="raise"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return squares(model, x) * float(numbers[0])
            except FloatingPointError:
                return squares(model, x)

    return Made(loss_fn, lambda: (lock.locked(), free._value))  # type: ignore[attr-defined]


@program("object")
def a_stream_into_which_a_loss_writes() -> Made:
    log = io.StringIO()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        log.write("called\n")
        return squares(model, x)

    return Made(loss_fn, log.getvalue)


@changing("process")
def the_state_of_another_generator_of_numpy() -> Changing:
    np.random.set_bit_generator(np.random.PCG64(1))

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state: Any = np.random.get_state(legacy=False)
        return squares(model, x) * (1.0 + state["state"]["state"] % 2)

    return loss_fn, [lambda: np.random.random()] * 12
