"""Places where the arrays stand that a loss takes from where the step does not look."""

from __future__ import annotations

import collections
import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from faststep._step._library import is_library_class, is_library_module
from faststep._step._things import results

ArrayId = Callable[[mx.array], int]
Pin = tuple["weakref.ref[mx.array]", int]  # an array object, and what tells whether it still has its value
_CACHE = functools._lru_cache_wrapper
_CONTAINERS = (dict, list, tuple, collections.deque)
_MAX_MET = 10_000


def held(arrays: list[mx.array], array_id: ArrayId, loss_fn: Any) -> tuple[str | None, list[Pin]]:
    """Tell whether arrays that a loss uses could be others at the next step, unseen.

    Those in the cache of a function, and those that MLX's own layers keep in their classes, are what has been computed
    once: they stay. Such a cache's are looked at for changes in place. What no object of Python's holds stays too.

    Args:
        arrays: The arrays, of any shape and dtype.
        array_id: Tells which array objects have the same value.
        loss_fn: The loss function.

    Returns:
        Why the step cannot be compiled, if it cannot, and the arrays to look at.
    """
    found, pins = _Holders(arrays, array_id), list[Pin]()
    for array in arrays:
        holders = found.of.get(array_id(array), [])
        cached = [each for each, holder in holders if found.is_cache(holder) or found.caches_with(each)]
        pins += [(weakref.ref(each), array_id(each)) for each in cached]
        if holders and not cached and not any(id(holder) in found.library for _, holder in holders):
            return _reason(array, [place for each, holder in holders for place in _place(each, holder)], loss_fn), []
    return None, pins


def kept(arrays: list[mx.array], array_id: ArrayId) -> str:
    """Describe where arrays stand that a loss has computed while it was traced, for a warning; clear caches of them.

    Args:
        arrays: The arrays, or what they are computed into.
        array_id: Tells which array objects have the same value.
    """
    found, places = _Holders(arrays, array_id), list[str]()
    for each, holder in (pair for pairs in found.of.values() for pair in pairs):
        caches = [found.caches[id(holder)]] if id(holder) in found.caches else found.caches_with(each)
        for cache in caches:
            cache.cache_clear()
            places.append(f"in the cache of {getattr(cache, '__qualname__', 'a function')}")
        if caches:
            continue
        if type(holder) in (list, collections.deque):
            places.append(
                f"in a {type(holder).__name__}"
            )  # without the number, another one each time where it is appended
        else:
            places += _place(each, holder)
    return f" ({places[0]})" if places else " where the step does not look"


class _Holders:
    """The objects that refer to array objects with the values of some arrays."""

    def __init__(self, arrays: list[mx.array], array_id: ArrayId) -> None:
        wanted, own = {array_id(array) for array in arrays}, {id(array) for array in arrays}
        self.of: dict[int, list[tuple[mx.array, Any]]] = {}
        self.caches: dict[int, Any] = {}  # by the address of the cache, and of the dict of one without bounds
        self.library: set[int] = set()  # addresses of what classes and modules of libraries have
        todo = [each for each in gc.get_objects() if each is not arrays]
        while todo:
            holder = todo.pop()
            referents = gc.get_referents(holder)
            self._sort(holder, referents)
            for each in referents:
                kind = type(each)
                if kind is mx.array:
                    if id(each) not in own and array_id(each) in wanted:
                        self.of.setdefault(array_id(each), []).append((each, holder))
                elif (kind is dict or kind is tuple) and not gc.is_tracked(each):  # of arrays alone, say
                    todo.append(each)
                elif kind is np.ndarray and each.dtype == object:
                    todo.append(each.ravel().tolist())

    def _sort(self, holder: Any, referents: Iterable[Any]) -> None:
        kind = type(holder)
        if kind is _CACHE:
            self.caches[id(holder)] = holder
            self.caches.update((id(each), holder) for each in referents if type(each) is dict)
        elif (kind is types.ModuleType and is_library_module(holder)) or (
            issubclass(kind, type) and is_library_class(holder)
        ):
            self.library.add(id(holder))
            self.library.update(id(each) for each in referents if type(each) is dict)

    def caches_with(self, array: mx.array) -> list[Any]:
        """Return the functions in whose caches something leads to an array."""
        return [cache for cache in {id(each): each for each in self.caches.values()}.values() if _leads(cache, array)]

    def is_cache(self, holder: Any) -> bool:
        """Return whether it is the cache of a function."""
        return id(holder) in self.caches


def _leads(cache: Any, array: mx.array) -> bool:
    """Return whether what a function with a cache keeps leads to an array."""
    todo, met = results(cache), set[int]()
    while todo and len(met) < _MAX_MET:
        value = todo.pop()
        if value is array:
            return True
        if id(value) not in met and not isinstance(value, type | types.ModuleType):
            met.add(id(value))
            # not the globals of a function
            todo += [value.__closure__] if isinstance(value, types.FunctionType) else gc.get_referents(value)
    return False


def _place(array: mx.array, holder: Any) -> list[str]:
    """Return the place of an array in a container."""
    if type(holder) not in _CONTAINERS:
        return []
    pairs = holder.items() if isinstance(holder, dict) else enumerate(holder)
    keys = [key for key, item in list(pairs) if item is array]
    return [f"at {key!r} of a {type(holder).__name__}" for key in keys]


def _reason(array: mx.array, places: list[str], loss_fn: Any) -> str:
    code = getattr(getattr(loss_fn, "__func__", loss_fn), "__code__", None)
    line = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    place = f" ({places[0]})" if places else ""
    return (
        f"the loss{line} uses an array of shape {array.shape} and {array.dtype} that it takes from where the step does "
        f"not look{place}, so that another one there would not be seen: pass it as an argument of the step, or keep it "
        "in an attribute, a global, a dict or a list that the loss names"
    )
