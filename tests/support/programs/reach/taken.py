"""Losses that take from iterators, files and objects in C, at each call or at some."""

from __future__ import annotations

import array
import atexit
import collections
import copy
import csv
import functools
import hashlib
import io
import itertools
import multiprocessing
import operator
import os
import queue
import random
import re
import sqlite3
import statistics
import string
import struct
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from support.programs.reach.registry import (
    Around,
    Box,
    Build,
    Changing,
    Made,
    Make,
    Place,
    add,
    changing,
    made_of,
    program,
    squares,
)

OPEN: list[Any] = []


def closed() -> None:
    """Close what programs have opened."""
    for each in OPEN:
        opened = each.connection if isinstance(each, sqlite3.Cursor) else each
        if isinstance(opened, io.IOBase | sqlite3.Connection):
            opened.close()
    OPEN.clear()


def closing(build: Build) -> Make:
    """Make a program, and close behind it what it has opened."""

    def make(around: Around) -> Made:
        around.opened.callback(closed)
        return made_of(build)(around)  # type: ignore[call-arg]

    return make


def taking(make: Callable[[], Any], take: Callable[[Any], Any] = next) -> Build:
    """Return a program whose loss takes a number from an object at each call."""

    def build() -> Changing:
        it = make()
        OPEN.append(it)
        return lambda model, x: squares(model, x) * (1.0 + float(take(it))), [lambda: None] * 3

    return build


def lines(mode: str) -> Any:
    OPEN.append(file := tempfile.TemporaryFile(mode))
    text = "".join(f"{number}\n" for number in range(1, 40))
    file.write(text if "b" not in mode else text.encode())
    file.seek(0)
    return file


def popped(numbers: list[float]) -> Iterator[float]:
    while True:
        yield numbers.pop()


def after_the_first(file: Any) -> Any:
    next(file)
    return file


def rows() -> sqlite3.Cursor:
    base = sqlite3.connect(":memory:")
    base.execute("create table numbers (value)")
    base.executemany("insert into numbers values (?)", [(number,) for number in range(1, 40)])
    return base.execute("select value from numbers")


def inserting() -> Any:
    base = sqlite3.connect(":memory:")
    base.execute("create table numbers (value)")
    return base


NUMBERS = range(1, 40)
TEXT = " ".join(map(str, NUMBERS))
TAKEN: dict[str, Build] = {
    "tee": taking(lambda: itertools.tee(iter(NUMBERS))[0]),
    "nditer": taking(lambda: np.nditer(np.arange(1.0, 40.0))),
    "flatiter": taking(lambda: np.arange(1.0, 40.0).flat),
    "broadcast": taking(lambda: np.broadcast(np.arange(1.0, 40.0), 1.0), lambda it: next(it)[0]),
    "ndenumerate": taking(lambda: np.ndenumerate(np.arange(1.0, 40.0)), lambda it: next(it)[1]),
    "ndindex": taking(lambda: np.ndindex(40), lambda it: next(it)[0]),
    "lines": taking(lambda: lines("w+")),
    "lines after one": taking(lambda: after_the_first(lines("w+"))),
    "lines of bytes": taking(lambda: lines("w+b")),
    "lines by for": taking(lambda: lines("w+"), lambda file: next(line for line in file)),
    "csv": taking(lambda: csv.reader(map(str, NUMBERS)), lambda it: next(it)[0]),
    "csv of a text": taking(lambda: csv.reader(io.StringIO(TEXT.replace(" ", "\n"))), lambda it: next(it)[0]),
    "re": taking(lambda: re.finditer(r"\d+", TEXT), lambda it: next(it).group()),
    "sqlite": taking(rows, lambda it: next(it)[0]),
    "struct": taking(lambda: struct.iter_unpack("i", array.array("i", NUMBERS).tobytes()), lambda it: next(it)[0]),
    "starmap": taking(lambda: itertools.starmap(float, ((number,) for number in NUMBERS))),
    "accumulate": taking(lambda: itertools.accumulate(NUMBERS)),
    "groupby": taking(lambda: itertools.groupby(NUMBERS), lambda it: next(it)[0]),
    "pairwise": taking(lambda: itertools.pairwise(NUMBERS), lambda it: next(it)[0]),
    "product": taking(lambda: itertools.product(NUMBERS, "a"), lambda it: next(it)[0]),
    "permutations": taking(lambda: itertools.permutations(NUMBERS, 2), sum_of_next := lambda it: sum(next(it))),
    "compress": taking(lambda: itertools.compress(NUMBERS, itertools.repeat(1))),
    "takewhile": taking(lambda: itertools.takewhile(bool, iter(NUMBERS))),
    "dropwhile": taking(lambda: itertools.dropwhile(operator.not_, iter(NUMBERS))),
    "zip_longest": taking(lambda: itertools.zip_longest(NUMBERS, []), lambda it: next(it)[0]),
    "zip": taking(lambda: zip(itertools.count(1), itertools.count(2), strict=False), sum_of_next),
    "calls": taking(lambda: iter(functools.partial(next, itertools.count(1)), -1)),
    "a sequence": taking(lambda: iter(type("Sequence", (), {"__getitem__": lambda self, at: float(at)})())),
    "a generator of what it pops": taking(lambda: popped([float(number) for number in NUMBERS])),
    "one within another": taking(lambda: map(float, popped([float(number) for number in NUMBERS]))),
    "bits": taking(lambda: np.random.PCG64(0), lambda bits: bits.random_raw() % 7),
    "seeds": taking(lambda: np.random.SeedSequence(1), lambda seeds: len(seeds.spawn(1)) + seeds.n_children_spawned),
    "hash": taking(hashlib.md5, lambda made: made.update(b"a") or made.digest()[0]),
    "lock": taking(
        threading.Lock, lambda lock: ((lock.release if lock.locked() else lock.acquire)(), lock.locked())[1]
    ),
    "order": taking(
        lambda: collections.OrderedDict(a=1.0, b=2.0, c=3.0),
        lambda table: table.move_to_end(next(iter(table))) or next(iter(table.values())),
    ),
    "a number that is read only": taking(
        inserting, lambda base: base.execute("insert into numbers values (1)") and base.total_changes
    ),
}


for name, build in TAKEN.items():
    add("iterator", f"what a loss takes: {name}", closing(build))


DRAWN: dict[str, Build] = {
    "random": taking(lambda: random.Random(1), lambda it: it.random()),
    "numpy": taking(lambda: np.random.default_rng(1), lambda it: it.random()),
    "numpy's older one": taking(lambda: np.random.RandomState(1), lambda it: it.rand()),
    "random of the process": taking(lambda: random.seed(1), lambda _: random.random()),
    "numpy of the process": taking(lambda: np.random.seed(1), lambda _: np.random.rand()),
    "list": taking(lambda: iter([float(number) for number in NUMBERS])),
    "tuple": taking(lambda: iter(tuple(NUMBERS))),
    "range": taking(lambda: iter(NUMBERS)),
    "count": taking(lambda: itertools.count(1)),
    "dict": taking(lambda: iter(dict.fromkeys(NUMBERS))),
    "enumerate": taking(lambda: enumerate(NUMBERS), sum_of_next),
    "map": taking(lambda: map(float, iter(NUMBERS))),
}


# from what the process has nobody takes but the loss
OF_THE_PROCESS = {"random", "numpy", "numpy's older one", "random of the process", "numpy of the process"}


def reading(build: Build) -> Build:
    """Return a loss that takes something, and reads a value then."""

    def reads() -> Changing:
        loss_fn, changes = build()  # type: ignore[call-arg]

        def loss(model: nn.Module, x: mx.array) -> mx.array:
            found: mx.array = loss_fn(model, x)
            return found * 2 if found.item() < 1 else found

        return loss, changes

    return reads


for name, build in (DRAWN | TAKEN).items():
    place: Place = "process" if name in OF_THE_PROCESS else "iterator"
    add(place, f"what a loss takes before it reads a value: {name}", closing(reading(build)))


def later(build: Build, reads: bool) -> Build:
    """Return a loss that begins to take something at a later call."""

    def begins() -> Changing:
        loss_fn, _ = build()  # type: ignore[call-arg]
        box, counted = Box(0.5), Box(1.0)

        def loss(model: nn.Module, x: mx.array) -> mx.array:
            if box.value <= 2:
                return squares(model, x) * box.value
            counted.value *= 0.5
            found: mx.array = loss_fn(model, x) * counted.value
            return found * 2 if reads and found.item() < 1 else found

        return loss, [box.set(value) for value in (1.5, 2.0, 3.0, 3.0, 4.0, 2.0, 5.0)]

    return begins


for name, build in DRAWN.items():
    if name not in ("count", "dict", "enumerate"):
        place = "process" if name in OF_THE_PROCESS else "iterator"
        for reads in (False, True):
            how = f"{name}{', before it reads a value' if reads else ''}"
            add(place, f"what a loss begins to take at a later call: {how}", closing(later(build, reads)))


def received() -> Any:
    sender, receiver = multiprocessing.Pipe()
    for number in NUMBERS:
        sender.send(number)
    OPEN.append(sender)
    return receiver


def numbered() -> int:
    number: int = lines("w+b").fileno()
    os.lseek(number, 0, os.SEEK_SET)
    return number


SELDOM: dict[str, Build] = DRAWN | {
    "lines": TAKEN["lines"],
    "lines of bytes": taking(lambda: lines("w+b"), lambda file: file.readline()),
    "a part": taking(lambda: lines("w+"), lambda file: file.read(2)),
    "an array": taking(lambda: lines("w+b"), lambda file: np.fromfile(file, np.uint8, 1)[0]),
    "a method": taking(lambda: lines("w+").readline, lambda read: read()),
    "lines of another": taking(lambda: map(float, lines("w+"))),
    "a generator": TAKEN["a generator of what it pops"],
    "a pipe": taking(received, lambda pipe: pipe.recv()),
    "a number of a file": taking(numbered, lambda number: os.read(number, 1)[0]),
    "the end": taking(lambda: lines("w+"), lambda file: file.closed or file.close() or file.closed),
    "a place": taking(numbered, lambda number: os.lseek(number, 1, os.SEEK_CUR)),
}


def seldom(build: Build, every: int) -> Build:
    """Return a loss that takes something at some calls."""

    def takes() -> Changing:
        loss_fn, _ = build()  # type: ignore[call-arg]
        box = Box(0)

        def loss(model: nn.Module, x: mx.array) -> mx.array:
            box.value += 1
            return (squares if box.value % every else loss_fn)(model, x)  # type: ignore[no-any-return]

        return loss, [lambda: None] * 7

    return takes


for (name, build), every in itertools.product(SELDOM.items(), (2, 3, 5)):
    place = "process" if name in OF_THE_PROCESS else "iterator"
    add(place, f"what a loss takes at every {every}th call: {name}", closing(seldom(build, every)))


def counting(decide: Callable[[Box], bool], **others: float) -> Build:
    """Return a program whose loss counts its calls, and decides by that."""

    def build() -> Changing:
        box = Box(0)
        vars(box).update(others)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            box.value += 1
            return squares(model, x) * (5.0 if decide(box) else 1.0)

        return loss_fn, [lambda: None] * 4

    return build


COUNTED: dict[str, Build] = {
    "a product": counting(lambda box: box.value == box.more * box.most, more=2, most=4),
    "a sum": counting(lambda box: box.value > box.more + box.most, more=2, most=4),
    "a difference": counting(lambda box: box.value - box.more == box.most * 2, more=1, most=3),
    "a remainder": counting(lambda box: (box.value - 3) % (box.more * box.most) == 0, more=2, most=3),
    "bits": counting(lambda box: bool(box.value & 4)),
    "a shift": counting(lambda box: bool(box.value >> 2)),
    "a range": counting(lambda box: box.value in range(4, 6)),
    "a part": counting(lambda box: box.value / box.more >= 0.75, more=9),
    "the larger": counting(lambda box: max(6, box.value) > box.more * 2, more=3),
    "later": counting(lambda box: box.value == box.more * box.most, more=131, most=17),
}


for name, build in COUNTED.items():
    add("object", f"a counter that is compared with {name}", made_of(build))


@changing("object")
def a_list_that_grows_and_whose_length_is_compared() -> Changing:
    log: list[int] = []

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        log.append(1)
        return squares(model, x) * (5.0 if len(log) > 7 else 1.0)

    return loss_fn, [lambda: None] * 4


def beside_a_limit(limit: float) -> Build:
    def build() -> Changing:
        box = Box(0)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            box.value += 1
            return squares(model, x) * (5.0 if box.value == limit else 1.0)

        return loss_fn, [lambda: None]

    return build


for name, limit in {
    "infinity": float("inf"),
    "NaN": float("nan"),
    "much": 10**400,
    "little": -(10**400),
    "0": 0.0,
}.items():
    add("object", f"a counter beside a number that no float can hold: {name}", made_of(beside_a_limit(limit)))


@changing("process")
def functions_that_numpy_calls_within(patch: pytest.MonkeyPatch) -> Changing:
    within = np.linalg._linalg  # type: ignore[attr-defined]
    return (lambda model, x: squares(model, x) * float(np.linalg.norm(np.eye(2), 2))), [
        lambda: patch.setattr(within, "_multi_svd_norm", lambda *args: np.float64(3.0))
    ]


@changing("process")
def methods_that_the_standard_library_calls_within(patch: pytest.MonkeyPatch) -> Changing:
    return (lambda model, x: squares(model, x) * float(len(textwrap.fill("a b c d", 10)))), [
        lambda: patch.setattr(textwrap.TextWrapper, "_split", lambda self, text: ["ab"])
    ]


@changing("process")
def functions_that_the_standard_library_calls_within(patch: pytest.MonkeyPatch) -> Changing:
    return (lambda model, x: squares(model, x) * statistics.fmean([1.0, 2.0])), [
        lambda: patch.setattr(statistics, "fsum", lambda numbers: 9.0)
    ]


@changing("process")
def numbers_of_a_librarys_class_by_an_object(patch: pytest.MonkeyPatch) -> Changing:
    layer, text = nn.Linear(2, 2), string.Template("")
    patch.setattr(nn.Linear, "FACTOR", 1.0, raising=False)

    def loss_fn(model: Any, x: mx.array) -> mx.array:
        return squares(model, x) * (layer.FACTOR + model.FACTOR + getattr(text, "FACTOR", 0.0))

    return loss_fn, [
        lambda: patch.setattr(nn.Linear, "FACTOR", 3.0),
        lambda: patch.setattr(string.Template, "FACTOR", 3.0, raising=False),
    ]


@changing("process")
def functions_that_are_called_at_the_end(patch: pytest.MonkeyPatch) -> Changing:
    count = atexit._ncallbacks
    begun = count()
    return (lambda model, x: squares(model, x) * (1 + count() - begun)), [lambda: atexit.register(int)]


@changing("object")
def numbers_of_numpys_objects(patch: pytest.MonkeyPatch) -> Changing:
    line = np.polynomial.Polynomial([1.0, 2.0])
    return (lambda model, x: squares(model, x) * float(line(1.0))), [lambda: line.coef.__setitem__(0, 5.0)]


@changing("object")
def objects_in_an_array(patch: pytest.MonkeyPatch) -> Changing:
    boxes = np.array([Box(1.0)], dtype=object)
    return (lambda model, x: squares(model, x) * boxes[0].value), [lambda: setattr(boxes[0], "value", 3.0)]


@changing("object")
def annotations(patch: pytest.MonkeyPatch) -> Changing:
    kind: Any = type("Kind", (), {"__annotations__": {"scale": 1.0}})
    return (lambda model, x: squares(model, x) * kind.__annotations__["scale"]), [
        lambda: kind.__annotations__.update(scale=3.0)
    ]


@changing("iterator")
def other_iterators_copied(patch: pytest.MonkeyPatch) -> Changing:
    numbers = iter([1.0, 2.0, 3.0, 4.0])
    return (lambda model, x: squares(model, x) * next(copy.copy(numbers))), [lambda: next(numbers)]


@changing("object")
def slots_that_a_property_hides(patch: pytest.MonkeyPatch) -> Changing:
    class Base:
        __slots__ = ("pair",)

    class Hiding(Base):
        @property
        def pair(self) -> tuple[float, float]:  # type: ignore[override]
            return (1.0, 2.0)

    it = Hiding()
    return (lambda model, x: squares(model, x) * it.pair[0]), [lambda: None]


@program("object")
def logs_caches_and_locks(around: Around) -> Made:
    recent, log, lock = collections.OrderedDict[int, float](), list[int](), threading.RLock()
    pending: queue.Queue[int] = queue.Queue()
    file = around.opened.enter_context((around.folder / "log").open("w+"))

    def scale(number: int) -> float:
        with lock:
            recent[number] = recent.pop(number, float(number))
            recent.move_to_end(number)
            if len(recent) > 3:
                recent.popitem(last=False)
            return recent[number]

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        log.append(1)
        if len(log) % 100 == 0 and pending.empty():
            file.write(str(len(log)))
        file.write("called\n")
        return squares(model, x) * scale(x.shape[0])

    return Made(loss_fn, lambda: (len(log), list(recent)), optimizer=optim.SGD(1e-3), rows=(1, 2, 1, 2, 3, 4, 5))
