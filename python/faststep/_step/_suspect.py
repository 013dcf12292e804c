"""What a loss function draws and reads while it is traced, by which a trace may go wrong: generators, clocks, files."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Iterable
from typing import Any

import mlx.nn as nn
import numpy as np

from faststep._step._calls import DRAWN, Calls
from faststep._step._inside import LOCKS, Read, read_kept
from faststep._step._positions import (
    FILE,
    UNKNOWN,
    frames,
    generator_name,
    is_file,
    is_of_process,
    is_opaque,
    known_in,
    moves,
    of_process,
    place_in,
    position,
    returning_all,
    with_inner,
)
from faststep._step._things import is_a, root_of


class Reads:
    """Reads of a traced array's value on this thread while `trace` is its trace function.

    Those are noticed too where the user's code catches MLX's error for them.
    """

    def __init__(self) -> None:
        self.place: str | None = None  # of the first read

    def trace(self, frame: types.FrameType, event: str, raised: Any) -> Any:
        """Note an error."""
        if event == "call":
            frame.f_trace_lines = False
        elif event == "exception" and self.place in (None, _IN_LIBRARY):
            self.place = read_at(raised[1], raised[2]) or self.place
        return self.trace


def read_at(error: BaseException, traceback: types.TracebackType | None) -> str | None:
    """Return the line that reads the value of a traced array, if an error is MLX's for it."""
    reads = isinstance(error, ValueError | RuntimeError) and str(error).startswith(_READS)
    return _place(traceback) if reads else None


def refused_at(error: BaseException, traceback: types.TracebackType | None) -> str | None:
    """Return the line that passes an array where MLX takes a number, if an error may be MLX's for a traced one."""
    refused = isinstance(error, TypeError) and "incompatible function arguments" in str(error)
    return _place(traceback) if refused or str(error) == "std::bad_cast" else None


def _place(traceback: types.TracebackType | None) -> str:
    """Return the last line outside of MLX and NumPy."""
    place = _IN_LIBRARY
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if "/mlx/" not in file and "/numpy/" not in file:
            place = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


_BLOCKING = frozenset({"threading", "queue", "multiprocessing", "concurrent", "asyncio"})
_READS = (
    "[eval] Attempting to eval an array during function transformations",
    "[eval] Attempting to eval an array without a primitive",  # in an optimizer's update
)
_IN_LIBRARY = "in the loss"
_SIGNALS = tuple(  # whose handlers may raise
    getattr(signal, name)
    for name in ("SIGALRM", "SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


class Positions:
    """Where random generators and iterators stand: those of the process, of the model, and that a loss reaches.

    Calls of what is as good as a generator, and of clocks and files, are noticed by `profile`.
    """

    def __init__(self, model: nn.Module, reached: list[Any], codes: Iterable[types.CodeType] | None) -> None:
        known = known_in(model, reached)
        self._objects = [each for each in known if moves(each) and not is_of_process(each)]
        self._opaque = {generator_name(each) for each in self._objects if is_opaque(each)}
        self._files = [(each, place_in(each)) for each in known if is_file(each)]
        kept = _kept(known, codes or ())
        self._kept = [(each, read) for each, read in kept if not is_a(each, LOCKS)]
        self._locks = [(each, read, read(each)) for each, read in kept if is_a(each, LOCKS)]
        self._before = self._now()
        # `stay`: whether what is taken from one of them cannot be put back
        self._back, self.stay = returning_all([*with_inner(self._objects), *(file for file, _ in self._files)])
        self._calls = Calls(known, frames(known), codes or ())
        self.profile = self._calls.profile

    def moved(self) -> list[str]:
        """Return the names of those that have moved since, or of which that cannot be seen."""
        pairs = zip(self._before, self._now(), strict=True)
        moved = {name for (name, before), (_, now) in pairs if before != now}
        drawn = dict(self._calls.drawn())
        moved = (moved | self._opaque | self._of_files() | self._of_locks()) - drawn.keys()
        return sorted(moved | {f"{what} ({place})" for what, place in drawn.items()})

    def put_back(self) -> list[str]:
        """Put back what has been taken; return the names of those of which that cannot be."""
        for back in self._back:
            with contextlib.suppress(Exception):  # a file that has been closed
                back()
        pairs = zip(self._before, self._now(), strict=True)
        moved = {name for (name, before), (_, now) in pairs if before != now}
        return sorted(moved | self._of_files())

    def read(self) -> list[str]:
        """Return what has been read that changes by itself, with the lines that did."""
        return [f"{what} ({place})" for what, place in self._calls.found.items() if what not in DRAWN]

    def _of_files(self) -> set[str]:
        """Return a name, if lines have been taken from an open file, which is no call, or that cannot be seen."""
        pairs = ((before, place_in(file)) for file, before in self._files if id(file) not in self._calls.written)
        taken = any(before != now or before == UNKNOWN for before, now in pairs)
        return {FILE} if taken and FILE not in self._calls.found else set()

    def _of_locks(self) -> set[str]:
        """Return the names of locks that this thread has left otherwise: others may take and give them at any time."""
        pairs = ((lock, before, read(lock)) for lock, read, before in self._locks if self._calls.turned[id(lock)])
        return {generator_name(lock) for lock, before, now in pairs if before != now}

    def shared(self) -> bool:
        """Return whether only generators of the process have moved, from which another thread may have drawn."""
        own = len(of_process())
        alone = self._before[own:] == self._now()[own:] and not self._opaque
        return alone and not (self._of_files() or self._of_locks() or self._calls.drawn())

    def _now(self) -> list[tuple[str, Any]]:
        states = [(generator_name(each), read(each)) for each, read in self._kept]
        return of_process() + [(generator_name(each), position(each)) for each in self._objects] + states


class Deferred:
    """A handler that takes note of signals while a loss is called on trial, which the user's might end half way.

    A second Ctrl-C does not wait.

    Attributes:
        numbers: The signals that have handlers on this thread: none but on the main one.
        came: Those that came.
        raised: What the user's handler has raised for a second Ctrl-C, which stands for the first one too.
    """

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self.came: list[int] = []
        self.raised: BaseException | None = None
        self._interrupt: Any = signal.getsignal(signal.SIGINT)

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        """Note a signal."""
        if number == signal.SIGINT and number in self.came:
            try:
                self._interrupt(number, frame)
            except BaseException as error:
                self.raised = error
                self.came.remove(number)
                raise
        self.came.append(number)


class HeldBack:
    """The process's random generators while other threads, which may draw from them too, are held back.

    Tells whether a loss draws that is called several times, and restores what it has drawn.
    """

    def __init__(self) -> None:
        self._interval, self._python = sys.getswitchinterval(), random.getstate()
        self._numpy = np.random.get_state(legacy=False)
        sys.setswitchinterval(0.1)
        time.sleep(0.02)  # threads that wait already do so for the interval from before
        self._last = of_process()

    def moved(self) -> bool:
        """Return whether a generator has moved since the last call."""
        before, self._last = self._last, of_process()
        return before != self._last

    def release(self) -> None:
        """Restore the generators, and let the threads go."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        sys.setswitchinterval(self._interval)


def _kept(known: list[Any], codes: Iterable[types.CodeType]) -> list[tuple[Any, Read]]:
    """Return objects of which a loss may change what they hold beside attributes and items, with how that is read."""
    names = {name for code in codes for name in code.co_names}
    return [(each, read) for each in known if (read := read_kept(each, names)) is not None]


def moving(reached: list[Any]) -> list[Any]:
    """Return generators and iterators among what is reached."""
    return [each for each in reached if moves(each)]


def blocking(reached: list[Any], changed: list[int]) -> str | None:
    """Return the name of an object by which threads wait for each other, if a part of it has one of these addresses."""
    for each in reached:
        if root_of(type(each)) in _BLOCKING:
            parts = getattr(each, "__dict__", {})
            if not {id(parts), *map(id, parts.values())}.isdisjoint(changed):
                return generator_name(each)
    return None
