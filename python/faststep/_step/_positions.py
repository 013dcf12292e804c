"""Where generators and iterators stand."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import operator
import queue
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from faststep._step._things import PLAIN, STREAMS, is_a

_SimpleQueue = queue.SimpleQueue
_BY_OTHERS = (map, filter, zip, itertools.starmap)  # stand where those stand that they take from
_OVER_OTHERS = (
    *(*_BY_OTHERS, enumerate, reversed, itertools.chain, itertools.islice, itertools.cycle),
    *(itertools.accumulate, itertools.compress, itertools.takewhile, itertools.dropwhile, itertools.zip_longest),
    *(itertools.groupby, itertools.pairwise, getattr(itertools, "batched", map)),
)
_INDEXED = (np.flatiter, np.broadcast)
_CALLS = type(iter(int, 1))
_SHOWN = (itertools.count, itertools.repeat)  # `repr` has where they are
_RUNNING = {  # with the attribute that has their frame
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_NEVER = frozenset({type(None), bool, int, float, str})  # in modules, of which nothing is taken
_DRAWING = frozenset({"random", "next", "__next__"})  # names of what takes from generators and iterators
_POPS = frozenset({"pop", "remove"})  # of what takes from sets
UNKNOWN = "unknown"  # the place in a file that cannot tell it
FILE = "an open file"


def moves(value: Any) -> bool:
    """Return whether something is taken from an object as it is used."""
    cls: Any = type(value)
    known = _moving.get(cls)
    if known is None:
        known = _moving[cls] = _moves(cls)
    return known


_moving = weakref.WeakKeyDictionary[type, bool]()


def _moves(cls: type) -> bool:
    if issubclass(cls, (random.Random, _SimpleQueue, *_of_numpy())):
        return True
    return hasattr(cls, "__next__") and not hasattr(cls, "readline") and cls not in weakref.ProxyTypes


def is_taken_from(value: Any) -> bool:
    """Return whether something is taken from an object as it is used: an open file too."""
    return moves(value) or is_file(value)


def _may_be_file(value: Any) -> bool:
    return is_a(value, io.IOBase) and not is_a(value, STREAMS)


def _of_numpy() -> tuple[type, ...]:
    numpy = np.random
    return numpy.Generator, numpy.RandomState, numpy.BitGenerator, numpy.SeedSequence


def is_file(value: Any) -> bool:
    """Return whether it is an open file that can be read."""
    try:
        return _may_be_file(value) and bool(value.readable())
    except Exception:  # it is closed, or of a user's class
        return False


def place_in(file: io.IOBase) -> Any:
    """Return the position in a file; UNKNOWN: it does not tell."""
    try:
        return file.tell()
    except Exception:  # a pipe, or text out of which `next` has taken lines
        return UNKNOWN


def generator_name(value: Any) -> str:
    """Return what a user knows a generator by."""
    if is_file(value):
        return FILE
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _within(iterator: Any) -> list[Any]:
    """Return what an iterator takes from: `map`, `zip` and their kind; of one that goes round, where it is."""
    if is_a(iterator, itertools.cycle) and hasattr(iterator, "__reduce__"):
        with warnings.catch_warnings(), contextlib.suppress(TypeError):
            warnings.simplefilter("ignore")
            return [iterator.__reduce__()[1][0]]
    within = gc.get_referents(iterator) if is_a(iterator, _OVER_OTHERS) else []
    # of a tuple too: that of `zip_longest` has gaps, on which Python's own iteration would crash
    return [each for one in within for each in (gc.get_referents(one) if is_a(one, tuple) else [one])]


def frames(values: list[Any]) -> dict[int, types.FrameType]:
    """Return the frames of generators and coroutines, by their address: they run as something is taken."""
    found = (getattr(value, _RUNNING[type(value)]) for value in with_inner(values) if type(value) in _RUNNING)
    return {id(frame): frame for frame in found if frame is not None}


def with_inner(values: list[Any]) -> list[Any]:
    """Return iterators and those that they take from."""
    todo, found = [each for each in values if is_taken_from(each) or type(each) in _RUNNING], dict[int, Any]()
    while todo:
        value = todo.pop()
        if id(value) not in found:
            found[id(value)] = value
            todo += [each for each in _within(value) if is_taken_from(each)]
    return list(found.values())


def is_opaque(value: Any) -> bool:
    """Return whether an iterator is written in C and nothing tells what has been taken from it."""
    cls = type(value)
    taken = getattr(cls, "__next__", None)
    if type(taken) is not types.WrapperDescriptorType or cls in _RUNNING or is_a(value, (*_SHOWN, *_INDEXED)):
        return False
    if hasattr(cls, "__length_hint__") and operator.length_hint(value, -1) >= 0:
        return False
    if cls is not _CALLS and any(is_a(each, int) for each in _reduced(value)):
        return False
    within = [each for each in _within(value) if moves(each)]
    return not within or any(map(is_opaque, within))


def _reduced(iterator: Any) -> list[Any]:
    """Return the numbers, and what else, by which an iterator of Python's would be made again."""
    if type(iterator).__module__ not in ("builtins", "itertools") or is_a(iterator, itertools.cycle):
        return []
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        return list(_flat(iterator.__reduce__()[1:], 3))
    return []


def _flat(parts: Any, depth: int) -> Any:
    for part in parts:
        if type(part) is tuple and depth:
            yield from _flat(part, depth - 1)
        else:
            yield part if type(part) is int else str(id(part))


def state_of(state: Any) -> Any:
    """Return the state of a bit generator, of which arrays compare as a whole."""
    if is_a(state, dict):
        return {name: state_of(value) for name, value in state.items()}
    return state.tobytes() if is_a(state, np.ndarray) else state


def returning(value: Any) -> Callable[[], None] | None:
    """Return a function that puts a generator, an iterator or a file back to where it is now; none if nothing can."""
    if is_file(value):
        place = place_in(value)
        return None if place == UNKNOWN else functools.partial(value.seek, place)
    if is_a(value, itertools.repeat) and operator.length_hint(value, -1) < 0:
        return lambda: None  # gives the same for ever
    if is_a(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if "numpy.random" in sys.modules and is_a(value, _of_numpy()) and not is_a(value, np.random.SeedSequence):
        if is_a(value, np.random.RandomState):
            return functools.partial(value.set_state, value.get_state(legacy=False))
        bits = value if is_a(value, np.random.BitGenerator) else value.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if type(value).__module__ == "builtins" and hasattr(value, "__setstate__"):  # of a list, a tuple, a range
        index = [each for each in value.__reduce__()[2:] if type(each) is int]
        return functools.partial(value.__setstate__, index[0]) if index else None
    return None


def may_draw(names: Set[str], values: Iterable[Any]) -> bool:
    """Return whether code with these names, which reaches these objects, may take from a generator or an iterator."""
    bound = (types.BuiltinFunctionType, types.MethodType)
    of = [each.__self__ if is_a(each, bound) else each for each in values]
    pops = not _POPS.isdisjoint(names) and any(is_a(each, set) for each in known_in(None, of))
    return pops or not _DRAWING.isdisjoint(names) or any(moves(each) or _may_be_file(each) for each in of)


def _stays(value: Any) -> bool:
    """Return whether what is taken from an object that no function puts back is neither in attributes nor in others."""
    taken = getattr(type(value), "__next__", None)
    return not is_a(value, _BY_OTHERS) and (taken is None or type(taken) is types.WrapperDescriptorType)


def known_in(model: nn.Module | None, reached: list[Any]) -> list[Any]:
    """Return what is in a model and in the models among what is reached, in dicts and lists too, and the latter."""
    within, met = list[Any](), set[int]()
    for whole in (model, *reached):
        if is_a(whole, nn.Module) and id(whole) not in met:
            modules = [module for module in whole.modules() if id(module) not in met]
            met.update(map(id, modules))
            within += [values for module in modules for values in (vars(module), module)]
    found = list[Any]()
    while within:
        for value in _items(within.pop()):
            cls = type(value)
            if cls is mx.array or cls in _NEVER:
                continue
            if not issubclass(cls, (dict, list, tuple)):
                found.append(value)
            elif id(value) not in met:
                met.add(id(value))
                within.append(value)
    return [*found, *reached]


def _items(container: Any) -> Iterable[Any]:
    return dict.values(container) if is_a(container, dict) else container


class Movable:
    """Generators and iterators that a loss may take from as it is called for its graph alone, and where they stand."""

    def __init__(self, model: nn.Module, reached: list[Any]) -> None:
        self._process = of_process()
        known = known_in(model, reached)
        self.kept = {id(each) for each in known if _may_be_file(each) or is_a(each, set)}
        self._objects = with_inner([each for each in known if is_taken_from(each) and not is_of_process(each)])
        self._before = [position(each) for each in self._objects]
        self._back, self.stay = returning_all(self._objects)

    def moved_of_process(self) -> list[str]:
        """Return the names of the process's generators that have moved since: another thread may have drawn."""
        return [name for (name, before), (_, now) in zip(self._process, of_process(), strict=True) if before != now]

    def moved(self, writes: bool) -> list[str]:
        """Return the names of those of the loss's that have moved since; `writes`: files by what it has written too."""
        pairs = zip(self._objects, self._before, strict=True)
        moved = [each for each, before in pairs if position(each) != before]
        return sorted({generator_name(each) for each in moved if not (writes and is_file(each) and each.writable())})

    def put_back(self) -> None:
        """Put back what can be, with the generators of the process."""
        for back in self._back:
            with contextlib.suppress(ValueError):  # a file that has been closed
                back()


def of_process() -> list[tuple[str, Any]]:
    """Return the generators of the process by name, with where they stand."""
    numpy = np.random.get_state(legacy=False)  # NumPy imports it as it is asked for: not in the loss
    return [("Python's random", random.getstate()), ("numpy.random", state_of(numpy))]


def is_of_process(value: Any) -> bool:
    """Return whether it is a generator behind the functions of a module, from which any thread may draw."""
    own = random.random.__self__  # type: ignore[attr-defined]
    return value is own or ("numpy.random" in sys.modules and value is np.random.mtrand._rand)


def returning_all(values: list[Any]) -> tuple[list[Callable[[], None]], bool]:
    """Return functions that put back these and the process's generators, and whether one of these has none."""
    found = [(each, returning(each)) for each in values]
    back = _returning_process() + [put for _, put in found if put is not None]
    return back, any(put is None and _stays(each) for each, put in found)


def _returning_process() -> list[Callable[[], None]]:
    """Return functions that put back the generators of the process."""
    return [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state(legacy=False)),
    ]


def position(value: Any) -> Any:
    """Return what changes in a generator or an iterator when something is taken from it, as far as that can be seen."""
    if is_a(value, random.Random):
        return value.getstate()
    if is_file(value):
        return place_in(value)
    if is_a(value, types.GeneratorType):
        frame = value.gi_frame
        values = frame.f_locals.values() if frame else ()
        return frame and frame.f_lasti, [each if is_a(each, PLAIN) else position(each) for each in values]
    if is_a(value, _SimpleQueue):
        return value.qsize()
    if is_a(value, _INDEXED):
        return value.index
    if hasattr(type(value), "__next__"):
        shown = repr(value) if type(value).__module__ == "itertools" else None
        within = [position(each) for each in _within(value) if is_taken_from(each)]
        length = operator.length_hint(value, -1)
        return length, shown, id(value), within, _reduced(value) if length < 0 else None
    if "numpy.random" in sys.modules and is_a(value, _of_numpy()):
        if is_a(value, np.random.SeedSequence):
            return value.n_children_spawned
        if is_a(value, np.random.RandomState):
            return state_of(value.get_state(legacy=False))
        return state_of((value if is_a(value, np.random.BitGenerator) else value.bit_generator).state)
    return id(value)
