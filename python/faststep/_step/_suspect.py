"""What a loss function draws and reads while it is traced, by which a trace may go wrong: generators, clocks, files."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import operator
import os
import queue
import random
import sys
import time
import types
import warnings
from typing import Any

import mlx.nn as nn
import numpy as np

from faststep._step._library import is_standard
from faststep._step._things import PLAIN, is_a

_COUNTERS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_CLOCKS = frozenset(
    {getattr(time, name + unit) for name in _COUNTERS for unit in ("", "_ns")}
    | {time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime}
)
_FILES = frozenset({open, os.open, os.stat, os.listdir, os.scandir, os.getcwd})
_ENTROPY = frozenset({os.urandom, getattr(os, "getrandom", os.urandom)})
_NOTICED = _CLOCKS | _FILES | _ENTROPY
_RANDOM = "the system's randomness"
_SimpleQueue = queue.SimpleQueue
_OVER_OTHERS = (map, filter, zip, enumerate, reversed, itertools.chain, itertools.islice, itertools.cycle)
_SILENT = frozenset({"logging", "warnings", "linecache", "traceback", "inspect", "tokenize", "importlib"})


class Calls:
    """Calls of the clock, of files and of the system's randomness, while `profile` is the thread's profile function."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}  # what is read, and the line that does

    def profile(self, frame: types.FrameType, event: str, function: Any) -> None:
        """Note a call."""
        if event == "c_call" and (function in _NOTICED or function.__name__ in _NAMES):
            what = _what(frame, function)
            place = _place(frame) if what else None
            if what and place:
                self.found.setdefault(what, place)


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
    if not isinstance(error, ValueError | RuntimeError) or not str(error).startswith(_READS):
        return None
    place = _IN_LIBRARY
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if "/mlx/" not in file and "/numpy/" not in file:
            place = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


_READS = (
    "[eval] Attempting to eval an array during function transformations",
    "[eval] Attempting to eval an array without a primitive",  # in an optimizer's update
)
_IN_LIBRARY = "in the loss"
_NAMES = frozenset({"now", "utcnow", "today", "seed", "generate_time_safe"})


def _what(frame: types.FrameType, function: Any) -> str | None:
    """Return what a function without Python code reads."""
    cls, name = getattr(function, "__self__", None), function.__name__
    if function in _FILES:
        return "files"
    if function in _ENTROPY or name == "generate_time_safe":
        return _RANDOM
    if name == "seed":  # without a seed, which a generator takes from the system
        return _RANDOM if isinstance(cls, random.Random) and _seeds_freely(frame) else None
    of_class = isinstance(cls, type) and issubclass(cls, datetime.date)
    return "the clock" if function in _CLOCKS or of_class else None


def _seeds_freely(frame: types.FrameType) -> bool:
    return frame.f_code is random.Random.seed.__code__ and frame.f_locals.get("a") is None


def _place(frame: types.FrameType | None) -> str | None:
    """Return the line from which the standard library is called; none where that only writes a log or a warning.

    None also where Python calls it by itself, as it collects garbage.
    """
    collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in collecting:
            return None
        if frame.f_globals.get("__name__", "").split(".")[0] in _SILENT:
            return None
        if not is_standard(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


class Positions:
    """Where random generators and iterators stand: those of the process, of the model, and that a loss reaches.

    Calls of what is as good as a generator, and of clocks and files, are noticed by `profile`.
    """

    def __init__(self, model: nn.Module, reached: list[Any]) -> None:
        wholes = [model, *(each for each in reached if is_a(each, nn.Module))]
        within = (value for whole in wholes for module in whole.modules() for value in vars(module).values())
        self._objects = [each for each in (*within, *reached) if _moves(each) and not _is_of_process(each)]
        self._before = self._now()
        self._calls = Calls()
        self.profile = self._calls.profile

    def moved(self) -> list[str]:
        """Return the names of those that have moved since."""
        pairs = zip(self._before, self._now(), strict=True)
        moved = {name for (name, before), (_, now) in pairs if before != now}
        return sorted(moved | {f"{what} ({place})" for what, place in self._calls.found.items() if what == _RANDOM})

    def read(self) -> list[str]:
        """Return what has been read that changes by itself, with the lines that did."""
        return [f"{what} ({place})" for what, place in self._calls.found.items() if what != _RANDOM]

    def shared(self) -> bool:
        """Return whether only generators of the process have moved, from which another thread may have drawn."""
        pairs = zip(self._before[-len(self._objects) :], self._now()[-len(self._objects) :], strict=True)
        alone = not self._objects or all(before == now for before, now in pairs)
        return alone and _RANDOM not in self._calls.found

    def _now(self) -> list[tuple[str, Any]]:
        return _of_process() + [(_generator_name(each), _position(each)) for each in self._objects]


class HeldBack:
    """The process's random generators while other threads, which may draw from them too, are held back.

    Tells whether a loss draws that is called several times, and restores what it has drawn.
    """

    def __init__(self) -> None:
        self._interval, self._python = sys.getswitchinterval(), random.getstate()
        self._numpy = np.random.get_state(legacy=False) if "numpy.random" in sys.modules else None
        sys.setswitchinterval(0.1)
        time.sleep(0.02)  # threads that wait already do so for the interval from before
        self._last = _of_process()

    def moved(self) -> bool:
        """Return whether a generator has moved since the last call."""
        before, self._last = self._last, _of_process()
        return before != self._last

    def release(self) -> None:
        """Restore the generators, and let the threads go."""
        random.setstate(self._python)
        if self._numpy is not None:
            np.random.set_state(self._numpy)
        sys.setswitchinterval(self._interval)


def _of_process() -> list[tuple[str, Any]]:
    states: list[tuple[str, Any]] = [("Python's random", random.getstate())]
    if "numpy.random" in sys.modules:
        states.append(("numpy.random", repr(np.random.get_state(legacy=False)["state"])))
    return states


def _is_of_process(value: Any) -> bool:
    """Return whether it is a generator behind the functions of a module, which stand for it here."""
    own = random.random.__self__  # type: ignore[attr-defined]
    return value is own or ("numpy.random" in sys.modules and value is np.random.mtrand._rand)


def _moves(value: Any) -> bool:
    if is_a(value, (random.Random, _SimpleQueue)):
        return True
    if "numpy.random" in sys.modules and is_a(value, (np.random.Generator, np.random.RandomState)):
        return True
    return hasattr(type(value), "__next__") and not hasattr(type(value), "readline")


def _generator_name(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def _within(iterator: Any) -> list[Any]:
    """Return what an iterator takes from: `map`, `zip` and their kind; of one that goes round, where it is."""
    if is_a(iterator, itertools.cycle) and hasattr(iterator, "__reduce__"):
        with warnings.catch_warnings(), contextlib.suppress(TypeError):
            warnings.simplefilter("ignore")
            return [iterator.__reduce__()[1][0]]
    within = gc.get_referents(iterator) if is_a(iterator, _OVER_OTHERS) else []
    return [each for one in within for each in (one if is_a(one, tuple) else [one])]


def _position(value: Any) -> Any:
    """Return what changes in a generator or an iterator when something is taken from it, as far as that can be seen."""
    if is_a(value, random.Random):
        return value.getstate()
    if is_a(value, types.GeneratorType):
        frame = value.gi_frame
        values = frame.f_locals.values() if frame else ()
        return frame and frame.f_lasti, [each if is_a(each, PLAIN) else _position(each) for each in values]
    if is_a(value, _SimpleQueue):
        return value.qsize()
    if hasattr(type(value), "__next__"):
        shown = repr(value) if type(value).__module__ == "itertools" else None
        within = [_position(each) for each in _within(value) if _moves(each)]
        return operator.length_hint(value, -1), shown, id(value), within
    if "numpy.random" in sys.modules and is_a(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if "numpy.random" in sys.modules and is_a(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return id(value)
