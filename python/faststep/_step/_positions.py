"""Where generators and iterators stand."""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import queue
import random
import sys
import types
import warnings
from typing import Any

import numpy as np

from faststep._step._things import PLAIN, is_a

_SimpleQueue = queue.SimpleQueue
_OVER_OTHERS = (map, filter, zip, enumerate, reversed, itertools.chain, itertools.islice, itertools.cycle)


def moves(value: Any) -> bool:
    """Return whether something is taken from an object as it is used."""
    if is_a(value, (random.Random, _SimpleQueue)):
        return True
    if "numpy.random" in sys.modules and is_a(value, (np.random.Generator, np.random.RandomState)):
        return True
    return hasattr(type(value), "__next__") and not hasattr(type(value), "readline")


def generator_name(value: Any) -> str:
    """Return what a user knows a generator by."""
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def _within(iterator: Any) -> list[Any]:
    """Return what an iterator takes from: `map`, `zip` and their kind; of one that goes round, where it is."""
    if is_a(iterator, itertools.cycle) and hasattr(iterator, "__reduce__"):
        with warnings.catch_warnings(), contextlib.suppress(TypeError):
            warnings.simplefilter("ignore")
            return [iterator.__reduce__()[1][0]]
    within = gc.get_referents(iterator) if is_a(iterator, _OVER_OTHERS) else []
    return [each for one in within for each in (one if is_a(one, tuple) else [one])]


def position(value: Any) -> Any:
    """Return what changes in a generator or an iterator when something is taken from it, as far as that can be seen."""
    if is_a(value, random.Random):
        return value.getstate()
    if is_a(value, types.GeneratorType):
        frame = value.gi_frame
        values = frame.f_locals.values() if frame else ()
        return frame and frame.f_lasti, [each if is_a(each, PLAIN) else position(each) for each in values]
    if is_a(value, _SimpleQueue):
        return value.qsize()
    if hasattr(type(value), "__next__"):
        shown = repr(value) if type(value).__module__ == "itertools" else None
        within = [position(each) for each in _within(value) if moves(each)]
        return operator.length_hint(value, -1), shown, id(value), within
    if "numpy.random" in sys.modules and is_a(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if "numpy.random" in sys.modules and is_a(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return id(value)
