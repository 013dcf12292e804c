"""When a loss that counts its calls may decide something by that: at numbers in its code, and at those it reads."""

from __future__ import annotations

import collections
import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.nn as nn
import numpy as np

from faststep._step._named import codes_of
from faststep._step._things import is_a

_Number = int | float
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CONST")
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF")
_DIVIDES = ("%", "//")
_DECIDES = ("BINARY_MODULO", "BINARY_FLOOR_DIVIDE", "BINARY_SUBSCR")
_MAX = 32  # calls of a loss that tell, beside those for items of lists, sets and dicts
_MAX_ITEMS = 128  # and for these
_FEW = 12  # divisors of a length
_FAR = 1 << 40
_MAX_IN_MODULES, _MAX_IN_ARRAY = 4096, 64


def calls_later(
    codes: Iterable[types.CodeType],
    changed: list[tuple[str, _Number, _Number, bool]],
    read: list[tuple[str, _Number]],
) -> list[int]:
    """Return how many calls later a number that a loss changes comes to one with which the loss may compare it.

    A number that nothing but its own `+= 1` reads comes to none.

    Args:
        codes: Code of the loss and of what it calls.
        changed: The names of the numbers, with what they were before a call and are behind it, and whether they are
            lengths of lists, which cannot note by what they are divided.
        read: The names of other numbers that the loss reads, and these.

    Returns:
        Numbers of calls, at the last of which the code sees the number before or behind its own change.
    """
    every = list(dict.fromkeys(inner for code in codes for inner in codes_of(code)))
    found: dict[int, None] = {}
    items: dict[int, None] = {}
    several = collections.Counter(name for name, _ in read)
    for name, before, now, is_length in changed:
        naming = [code for code in every if name in _names(code)]
        if now == before or (not is_length and naming and all(_reads(code, name) <= 0 for code in naming)):
            continue  # it only counts
        comparing = [code for code in (*naming, *every) if _compares(code)]
        names = frozenset().union(*map(_names, comparing))
        limits = [number for each, number in read if not each or (each in names and several[each] > 1)]
        for limit in limits:
            items |= dict.fromkeys(_calls(before, now, limit))
        limits += [limit for code in comparing for limit in _limits(code, read)]
        if is_length:
            limits += list(_remainders(now, limits))
        for limit in limits:
            found |= dict.fromkeys(_calls(before, now, limit))
    first = list(items)[:_MAX_ITEMS]
    return first + [each for each in found if each not in items][:_MAX]


def keys_in(reached: list[Any]) -> list[tuple[str, _Number]]:
    """Return the numbers in dicts, sets and NumPy arrays of modules among what a loss reaches, with their names.

    Those of other NumPy arrays that it reaches have none: "".
    """
    modules = {id(each): each for whole in reached if is_a(whole, nn.Module) for each in whole.modules()}
    todo = [item for module in modules.values() for values in (vars(module), module) for item in dict.items(values)]
    todo += [("", each) for each in reached if is_a(each, np.ndarray)]
    found: list[tuple[str, _Number]] = []
    while todo and len(found) < _MAX_IN_MODULES:
        name, value = todo.pop()
        if is_a(value, np.ndarray) and value.size <= _MAX_IN_ARRAY and value.dtype.kind in "iuf":
            found += [(name, each) for each in value.ravel().tolist()]
        if is_a(value, nn.Module) or not is_a(value, (dict, set, frozenset)):
            continue
        found += [(name, each) for each in value if type(each) in (int, float)]
        if is_a(value, dict):
            todo += [(key if is_a(key, str) else name, each) for key, each in value.items()]
    return found


def _calls(before: _Number, now: _Number, limit: _Number) -> list[int]:
    times = _times(before, now, limit)
    return [each for each in (times - 1, times) if each > 0]


def may_read(codes: Iterable[types.CodeType], names: list[str]) -> bool:
    """Return whether code of a loss, or of what it calls, does more with numbers of these names than add to them."""
    every = dict.fromkeys(inner for code in codes for inner in codes_of(code))
    return any(_reads(code, name) > 0 for code in every for name in names if name in _names(code))


def _remainders(now: _Number, limits: list[_Number]) -> Iterator[_Number]:
    """Give out the next numbers that have one of the limits, or 0, as remainder by another one, or 0 behind one."""
    whole = list(dict.fromkeys(int(limit) for limit in limits if 0 < limit < _FAR and limit == int(limit)))[:_FEW]
    yield from (now - now % width + width for width in whole)
    yield from (now + (rest - now % width) % width for width in whole for rest in whole if rest < width)
    yield from (each - each % width + width for each in whole for width in whole if now < each != width)


def _times(before: _Number, now: _Number, limit: _Number) -> int:
    """Return in how many changes like the last one a number comes to another one; 0: in none."""
    try:
        times = (limit - now) / (now - before)
    except OverflowError:  # of integers that no float can hold
        return 0
    return int(times) if 0 < times < _FAR and times == int(times) else 0


def _limits(code: types.CodeType, read: list[tuple[str, _Number]]) -> Iterator[_Number]:
    yield from _numbers(code.co_consts)
    names = _names(code)
    yield from (number for name, number in read if name in names)


def _numbers(constants: Iterable[object]) -> Iterator[_Number]:
    for constant in constants:
        if isinstance(constant, int | float) and not isinstance(constant, bool):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _numbers(constant)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    return frozenset({*code.co_names, *code.co_freevars, *code.co_cellvars, *texts})


def _reads(code: types.CodeType, name: str) -> int:
    """Return how often code reads what has a name, less how often it assigns it: `x += 1` is one of each."""
    own = [each for each in dis.get_instructions(code) if each.argval == name]
    loads = sum(each.opname in _LOADS for each in own)
    stores = sum(each.opname in _STORES for each in own)
    into = any(each.opname == "LOAD_CONST" for each in own)  # an item: `x["calls"] += 1`
    return loads - stores - (into and any(each.opname == "STORE_SUBSCR" for each in dis.get_instructions(code)))


@functools.lru_cache(maxsize=4096)
def _compares(code: types.CodeType) -> bool:
    def decides(each: dis.Instruction) -> bool:
        if each.opname.startswith("BINARY_"):
            return each.argrepr.rstrip("=") in (*_DIVIDES, "[]") or each.opname in _DECIDES
        return each.opname in ("COMPARE_OP", "CONTAINS_OP") or each.argval in ("divmod", "remainder", "get")

    return any(decides(each) for each in dis.get_instructions(code))
