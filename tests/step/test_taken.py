"""Losses that take from iterators, files and objects in C, or that count: each gives the plain loop's numbers."""

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
from faststep import Step
from faststep._step._limits import Limits
from support.beside import Box, Program, beside, squares

Losses = Callable[[pytest.MonkeyPatch], Program]
OPEN: list[Any] = []


@pytest.fixture(autouse=True)
def _files_are_closed() -> Iterator[None]:
    yield
    for each in OPEN:
        opened = each.connection if isinstance(each, sqlite3.Cursor) else each
        if isinstance(opened, io.IOBase | sqlite3.Connection):
            opened.close()
    OPEN.clear()


def taking(make: Callable[[], Any], take: Callable[[Any], Any] = next) -> Losses:
    """Return a program whose loss takes a number from an object at each call."""

    def build(patch: pytest.MonkeyPatch) -> Program:
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
TAKEN: dict[str, Losses] = {
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


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_loss_takes_is_taken_at_every_step(name: str) -> None:
    with pytest.warns(RuntimeWarning, match="as it is called, which a trace would do once"):
        assert beside(TAKEN[name]).stats.mode == "plain"


DRAWN: dict[str, Losses] = {
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


# what they hold can neither be put back nor be seen to be taken, were the loss called once without a trace
NOT_SEEN = {"hash", "lock", "a number that is read only"}


@pytest.mark.parametrize("name", [*DRAWN, *(name for name in TAKEN if name not in NOT_SEEN)])
def test_what_a_loss_takes_before_it_reads_a_value_is_not_taken_twice(name: str) -> None:
    """The trace that ends there has taken it already."""

    def build(patch: pytest.MonkeyPatch) -> Program:
        loss_fn, changes = (DRAWN | TAKEN)[name](patch)

        def reads(model: nn.Module, x: mx.array) -> mx.array:
            loss = loss_fn(model, x)
            return loss * 2 if loss.item() < 1 else loss

        return reads, changes

    with pytest.warns(RuntimeWarning, match="cannot be compiled: it (takes from|reads the value)"):
        assert beside(build).stats.mode == "plain"


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", [name for name in DRAWN if name not in ("count", "dict", "enumerate")])
def test_what_a_loss_begins_to_take_at_a_later_step_is_taken_once(name: str, reads: bool) -> None:
    """The number by which it begins to is compared by a call for the graph alone."""

    def build(patch: pytest.MonkeyPatch) -> Program:
        loss_fn, _ = DRAWN[name](patch)
        box, counted = Box(0.5), Box(1.0)

        def begins(model: nn.Module, x: mx.array) -> mx.array:
            if box.value <= 2:
                return squares(model, x) * box.value
            counted.value *= 0.5
            loss = loss_fn(model, x) * counted.value
            return loss * 2 if reads and loss.item() < 1 else loss

        return begins, [box.set(value) for value in (1.5, 2.0, 3.0, 3.0, 4.0, 2.0, 5.0)]

    with pytest.warns(
        RuntimeWarning, match="cannot be compiled: it (takes from|reads the value)|what it changes itself"
    ):
        assert beside(build).stats.mode == "plain"


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


SELDOM: dict[str, Losses] = DRAWN | {
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


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("name", SELDOM)
def test_what_a_loss_takes_at_some_calls_is_taken_at_those(name: str, every: int) -> None:
    def build(patch: pytest.MonkeyPatch) -> Program:
        loss_fn, _ = SELDOM[name](patch)
        box = Box(0)

        def seldom(model: nn.Module, x: mx.array) -> mx.array:
            box.value += 1
            return (squares if box.value % every else loss_fn)(model, x)

        return seldom, [lambda: None] * 11

    with pytest.warns(RuntimeWarning, match="cannot be compiled: (it takes from|it calls os|it closes|its result)"):
        assert beside(build).stats.mode == "plain"


def counting(decide: Callable[[Box], bool], **others: float) -> Losses:
    """Return a program whose loss counts its calls, and decides by that."""

    def build(patch: pytest.MonkeyPatch) -> Program:
        box = Box(0)
        vars(box).update(others)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            box.value += 1
            return squares(model, x) * (5.0 if decide(box) else 1.0)

        return loss_fn, [lambda: None] * 4

    return build


COUNTED: dict[str, Losses] = {
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


@pytest.mark.parametrize("name", COUNTED)
def test_a_counter_is_tried_at_what_it_is_compared_with(name: str) -> None:
    with pytest.warns(RuntimeWarning, match=r"depends on what it changes itself \(value\)"):
        assert beside(COUNTED[name]).stats.mode == "plain"


def test_a_list_that_grows_is_tried_at_the_lengths_with_which_its_own_is_compared() -> None:
    def build(patch: pytest.MonkeyPatch) -> Program:
        log: list[int] = []

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            log.append(1)
            return squares(model, x) * (5.0 if len(log) > 7 else 1.0)

        return loss_fn, [lambda: None] * 4

    with pytest.warns(RuntimeWarning, match="depends on what it changes itself"):
        assert beside(build).stats.mode == "plain"


@pytest.mark.parametrize("limit", [float("inf"), float("nan"), 10**400, -(10**400), 0.0])
def test_a_counter_beside_a_number_that_no_float_can_hold(limit: float) -> None:
    def build(patch: pytest.MonkeyPatch) -> Program:
        box = Box(0)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            box.value += 1
            return squares(model, x) * (5.0 if box.value == limit else 1.0)

        return loss_fn, [lambda: None]

    assert beside(build).stats.mode == "native"


def test_numbers_that_note_what_they_are_compared_with_compute_as_others_do() -> None:
    for before, now in ((3, 4), (0.25, 0.5), (10, 7)):
        number = Limits().noting(before, now)
        for compute in (
            *(lambda it: it + 2, lambda it: 2 - it, lambda it: it - 2, lambda it: 3 * it, lambda it: it / 4),
            *(lambda it: it % 3, lambda it: it // 2, lambda it: divmod(it, 2), lambda it: -it, lambda it: it * it),
            *(lambda it: it == 4, lambda it: it < 5, lambda it: max(it, 5), lambda it: bool(it - it), hash, repr),
        ):
            assert compute(number) == compute(now)
    limits = Limits()
    assert (limits.noting(0, 1) - 7) * 2 != 50
    assert 31 in limits.calls()


WATCHED: dict[str, Losses] = {}


def watched(build: Losses) -> Losses:
    WATCHED[build.__name__] = build
    return build


@watched
def functions_that_numpy_calls_within(patch: pytest.MonkeyPatch) -> Program:
    within = np.linalg._linalg  # type: ignore[attr-defined]
    return (lambda model, x: squares(model, x) * float(np.linalg.norm(np.eye(2), 2))), [
        lambda: patch.setattr(within, "_multi_svd_norm", lambda *args: np.float64(3.0))
    ]


@watched
def methods_that_the_standard_library_calls_within(patch: pytest.MonkeyPatch) -> Program:
    return (lambda model, x: squares(model, x) * float(len(textwrap.fill("a b c d", 10)))), [
        lambda: patch.setattr(textwrap.TextWrapper, "_split", lambda self, text: ["ab"])
    ]


@watched
def functions_that_the_standard_library_calls_within(patch: pytest.MonkeyPatch) -> Program:
    return (lambda model, x: squares(model, x) * statistics.fmean([1.0, 2.0])), [
        lambda: patch.setattr(statistics, "fsum", lambda numbers: 9.0)
    ]


@watched
def numbers_of_a_librarys_class_by_an_object(patch: pytest.MonkeyPatch) -> Program:
    layer, text = nn.Linear(2, 2), string.Template("")
    patch.setattr(nn.Linear, "FACTOR", 1.0, raising=False)

    def loss_fn(model: Any, x: mx.array) -> mx.array:
        return squares(model, x) * (layer.FACTOR + model.FACTOR + getattr(text, "FACTOR", 0.0))

    return loss_fn, [
        lambda: patch.setattr(nn.Linear, "FACTOR", 3.0),
        lambda: patch.setattr(string.Template, "FACTOR", 3.0, raising=False),
    ]


@watched
def functions_that_are_called_at_the_end(patch: pytest.MonkeyPatch) -> Program:
    count = atexit._ncallbacks
    begun = count()
    return (lambda model, x: squares(model, x) * (1 + count() - begun)), [lambda: atexit.register(int)]


@watched
def numbers_of_numpys_objects(patch: pytest.MonkeyPatch) -> Program:
    line = np.polynomial.Polynomial([1.0, 2.0])
    return (lambda model, x: squares(model, x) * float(line(1.0))), [lambda: line.coef.__setitem__(0, 5.0)]


@watched
def objects_in_an_array(patch: pytest.MonkeyPatch) -> Program:
    boxes = np.array([Box(1.0)], dtype=object)
    return (lambda model, x: squares(model, x) * boxes[0].value), [lambda: setattr(boxes[0], "value", 3.0)]


@watched
def annotations(patch: pytest.MonkeyPatch) -> Program:
    kind: Any = type("Kind", (), {"__annotations__": {"scale": 1.0}})
    return (lambda model, x: squares(model, x) * kind.__annotations__["scale"]), [
        lambda: kind.__annotations__.update(scale=3.0)
    ]


@watched
def other_iterators_copied(patch: pytest.MonkeyPatch) -> Program:
    numbers = iter([1.0, 2.0, 3.0, 4.0])
    return (lambda model, x: squares(model, x) * next(copy.copy(numbers))), [lambda: next(numbers)]


@watched
def slots_that_a_property_hides(patch: pytest.MonkeyPatch) -> Program:
    class Base:
        __slots__ = ("pair",)

    class Hiding(Base):
        @property
        def pair(self) -> tuple[float, float]:  # type: ignore[override]
            return (1.0, 2.0)

    it = Hiding()
    return (lambda model, x: squares(model, x) * it.pair[0]), [lambda: None]


@pytest.mark.parametrize("name", WATCHED)
def test_a_change_is_seen_as_by_the_plain_loop(name: str) -> None:
    assert beside(WATCHED[name]).stats.mode == "native"  # a warning is an error in these tests


def test_logs_caches_and_locks_change_nothing() -> None:
    recent, log, lock = collections.OrderedDict[int, float](), list[int](), threading.RLock()
    pending: queue.Queue[int] = queue.Queue()

    def scale(number: int) -> float:
        with lock:
            recent[number] = recent.pop(number, float(number))
            recent.move_to_end(number)
            if len(recent) > 3:
                recent.popitem(last=False)
            return recent[number]

    with tempfile.TemporaryFile("w+") as file:

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            log.append(1)
            if len(log) % 100 == 0 and pending.empty():
                file.write(str(len(log)))
            file.write("called\n")
            return squares(model, x) * scale(x.shape[0])

        step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
        for length in (1, 2, 1, 2, 3):
            step(mx.ones((length, 4)))  # a warning is an error in these tests
    assert len(log) == 5
    assert step.stats.mode == "native"
