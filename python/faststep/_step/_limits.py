"""Numbers that note what a loss compares them with, and how many calls later they come to that."""

from __future__ import annotations

import math
import operator
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from faststep._step._things import is_a

_Number = int | float
_Place = tuple[types.CodeType, int, _Number | None, _Number]  # where, with what, and within which period
_FAR = 1 << 40
_MAX = 192  # calls of a loss that tell
_FEW = 64  # numbers that may be what another one is compared with
_SEVERAL: tuple[type[Any], ...] = (tuple, list, set, frozenset, dict, type({}.keys()), types.MappingProxyType)
_CALLERS = 3  # functions that may compare what one returns
_ROUNDING = 1e-9


class Limits:
    """What numbers that a loss changes at every call are compared with.

    A loss is called with numbers by `noting` in the place of its own. What it computes of them by adding, subtracting,
    multiplying, dividing and rounding notes too; what else it makes of them are numbers of Python's.

    Where it comes to what it is compared with in one place (`n > 50`), it may be compared in others to which it has not
    come before, or where it has not decided anything (`and n % 20 == 0`): what is noted there, many calls later, counts
    from there.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Place] = {}
        self._given = 0
        self._later = 0
        self._from: _Place | None = None
        self._here: set[_Place] = set()
        self._followed: set[tuple[_Place | None, _Place]] = set()

    def begin(self, later: int) -> None:
        """Note from now on as so many calls later, at 0 or at one of `calls`."""
        self._followed |= {(self._from, place) for place in self._here}
        self._here.clear()
        self._later, self._from = later, self._calls.get(later)

    def noting(self, before: _Number, now: _Number) -> _Number:
        """Return a number that notes, of one that was another before a call."""
        change = now - before
        return self.of(now + change * self._later, change)

    def of(self, value: _Number, change: _Number, exact: _Number | None = None, period: _Number = 0) -> _Number:
        """Return a number that notes.

        Args:
            value: The number.
            change: What it changes by at each call.
            exact: A quotient before it is rounded.
            period: Of a remainder, the divisor: it begins anew there.
        """
        kind = _Int if type(value) is int else _Float
        number = kind(value)
        number.limits, number.change, number.exact = self, change, value if exact is None else exact
        number.period = abs(period)
        return number

    def note(self, other: Any, way: _Number, change: _Number, period: _Number = 0) -> None:
        """Note a number that is to change by `way`, within its period if it has one, and does by `change` at a call.

        Args:
            other: The number that it is compared with, or divided by.
            way: What it is short of that.
            change: What it changes by at each call.
            period: Of a remainder, the divisor.
        """
        place = (*_line(), None if isinstance(other, _Noting) else other, period)
        if place == self._from or (self._from, place) in self._followed:
            return
        try:
            if period and change > 0:
                way = way % period or period
            elif period:
                way = -(-way % period or period)
            times = way / change
        except (OverflowError, ZeroDivisionError):
            return
        if 0 < times < _FAR:
            first = math.floor(times + _ROUNDING)
            near = (self._later + each for each in (first - 1, first, first + 1) if each > 0)
            new = [each for each in near if each not in self._calls]
            self._calls |= dict.fromkeys(new, place)
            self._here |= {place} if new else set()

    def calls(self) -> list[int]:
        """Return how many calls later a number comes to what it has been compared with, without those given before."""
        found = list(self._calls)[self._given : _MAX]
        self._given += len(found)
        return found


def _caller() -> types.FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == _caller.__code__.co_filename:
        frame = frame.f_back
    return frame


def _line() -> tuple[types.CodeType, int]:
    frame = _caller()
    return frame.f_code, frame.f_lasti


def _numbers_of(frame: types.FrameType) -> list[_Number]:
    """Return numbers that code has, or reads by a name of its own: variables, globals and attributes of variables."""
    names, values = frame.f_code.co_names, list(frame.f_locals.values())
    values += [frame.f_globals[name] for name in names if name in frame.f_globals]
    of_values = [getattr(value, "__dict__", None) for value in values if not isinstance(value, type)]
    found: list[Any] = [*frame.f_code.co_consts, *values]
    for attributes in of_values:
        if isinstance(attributes, dict):
            found += [attributes[name] for name in names if name in attributes]
    several = [list(each)[:_FEW] for each in found if is_a(each, _SEVERAL)]
    found += [number for each in several for number in each]
    return list(dict.fromkeys(each for each in found if type(each) in (int, float)))[:_FEW]


def _numbers_near() -> list[_Number]:
    """Return the numbers of the code that computes, and of those that have called it."""
    frame: types.FrameType | None = _caller()
    found: list[_Number] = []
    for _ in range(_CALLERS):
        found += _numbers_of(frame) if frame is not None else []
        frame = frame and frame.f_back
    return list(dict.fromkeys(found))


def _change(other: Any) -> _Number:
    return other.change if isinstance(other, _Noting) else 0


def _exact(value: Any) -> _Number:
    return value.exact if isinstance(value, _Noting) else value


def _period(one: Any, other: Any) -> _Number:
    periods = [each.period for each in (one, other) if isinstance(each, _Noting) and each.period]
    return min(periods, default=0)


def _plain(value: Any) -> Any:
    """Return a number without notes; None: it is no number."""
    if isinstance(value, _Noting):
        return value.value()
    return value if type(value) in (int, float, bool) else None


def _method(compute: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a method of a number that notes: `compute(self, value, other)`, where the other one is a number."""

    def method(self: Any, other: Any) -> Any:
        number = _plain(other)
        return NotImplemented if number is None else compute(self, number, other)

    return method


def _linear(name: str, sign: int, *, turned: bool = False) -> Callable[[Any, Any], Any]:
    compute = getattr(operator, name)

    def result(self: Any, number: Any, other: Any) -> Any:
        one, two = (number, self.value()) if turned else (self.value(), number)
        change = _change(other) + sign * self.change if turned else self.change + sign * _change(other)
        exact = (_exact(other), self.exact) if turned else (self.exact, _exact(other))
        return self.limits.of(compute(one, two), change, compute(*exact), _period(self, other))

    return _method(result)


def _change_of_quotient(one: Any, other: Any) -> _Number:
    """Return what a quotient of two numbers changes by at a call, as near as its derivative tells."""
    return float((one.change - other.change * one.exact / other.exact) / other.exact)


def _scaled(name: str) -> Callable[[Any, Any], Any]:
    compute = getattr(operator, name)

    def result(self: Any, number: Any, other: Any) -> Any:
        if isinstance(other, _Noting):
            found = compute(self.value(), number)
            if name == "mul" or not number:
                return found
            return self.limits.of(found, _change_of_quotient(self, other), self.exact / other.exact)
        scaled = (compute(each, number) for each in (self.value(), self.change, self.exact, self.period))
        return self.limits.of(*scaled)

    return _method(result)


def _compared(name: str) -> Callable[[Any, Any], Any]:
    compute = getattr(operator, name)

    def result(self: Any, number: Any, other: Any) -> Any:
        way, change = _exact(other) - self.exact, self.change - _change(other)
        self.limits.note(other, way, change, _period(self, other))
        return compute(self.value(), number)

    return _method(result)


def _stepped(name: str) -> Callable[[Any, Any], Any]:
    """Return a method whose result changes where the number comes to a multiple of another one."""
    compute = getattr(operator, name) if name != "divmod" else divmod

    def result(self: Any, number: Any, other: Any) -> Any:
        is_mask = name == "and_" and number > 0 and not number & number + 1  # of the last bits
        if name == "rshift":
            width = 1 << number
        elif is_mask:
            width = number + 1
        elif name == "and_":
            width = number and 1 << number.bit_length() - 1
        else:
            width = number
        if width:
            self.limits.note(other, -self.exact % abs(width), self.change, width and abs(width))
        found = compute(self.value(), number)
        if name == "and_" and not is_mask:
            return found
        if isinstance(other, _Noting) and name == "floordiv":
            return self.limits.of(found, _change_of_quotient(self, other), self.exact / other.exact)
        both = found if name == "divmod" else (found, found)
        period = min(abs(width), self.period or abs(width))
        rest = self.limits.of(both[1], self.change, self.exact % width, period)
        quotient = self.limits.of(both[0], self.change / width, self.exact / width, self.period / width)
        return (quotient, rest) if name == "divmod" else rest if name in ("mod", "and_") else quotient

    return _method(result)


def _rounded(compute: Callable[[_Number], Any], step: float) -> Callable[[Any], Any]:
    """Return a method that rounds to a whole number, which changes at each `step` behind one."""

    def method(self: Any) -> Any:
        self.limits.note(step, step - self.exact, self.change, 1)
        return self.limits.of(compute(self.value()), self.change, self.exact, self.period)

    return method


class _Noting:
    """A number of `Limits`."""

    limits: Limits
    change: _Number
    exact: _Number
    period: _Number

    def value(self) -> Any:
        """Return it as a number of Python's."""
        return int.__int__(self) if isinstance(self, int) else float.__float__(self)  # type: ignore[arg-type]

    __add__, __radd__ = _linear("add", 1), _linear("add", 1)
    __sub__, __rsub__ = _linear("sub", -1), _linear("sub", -1, turned=True)
    __mul__, __rmul__, __truediv__ = _scaled("mul"), _scaled("mul"), _scaled("truediv")
    __eq__, __ne__ = _compared("eq"), _compared("ne")
    __lt__, __le__, __gt__, __ge__ = _compared("lt"), _compared("le"), _compared("gt"), _compared("ge")
    __mod__, __floordiv__, __divmod__ = _stepped("mod"), _stepped("floordiv"), _stepped("divmod")
    __and__, __rand__, __rshift__ = _stepped("and_"), _stepped("and_"), _stepped("rshift")
    __floor__, __ceil__, __trunc__ = _rounded(math.floor, 0), _rounded(math.ceil, 0), _rounded(math.trunc, 0)

    def __round__(self, digits: Any = None) -> Any:
        unit = 10 ** -(digits or 0)
        self.limits.note(digits, 0.5 * unit - self.exact, self.change, unit)
        return self.limits.of(round(self.value(), digits), self.change, self.exact, self.period)

    def __int__(self) -> int:
        self.limits.note(1, -self.exact, self.change, 1)
        self._note_all(_numbers_near())  # one of them, perhaps, is what it is compared with: it notes no more
        return int(self.value())

    def _note_all(self, numbers: Iterable[_Number], period: _Number = 0) -> None:
        for number in numbers:
            self.limits.note(number, number - self.exact, self.change, period or self.period)

    def _text(self) -> None:
        self._note_all(range(10), 10)  # the last digit

    def __str__(self) -> str:
        self._text()
        return str(self.value())

    def __repr__(self) -> str:
        self._text()
        return repr(self.value())

    def __format__(self, spec: str) -> str:
        self._text()
        return format(self.value(), spec)

    def __neg__(self) -> Any:
        return self.limits.of(-self.value(), -self.change, -self.exact, self.period)

    def __bool__(self) -> bool:
        self.limits.note(0, -self.exact, self.change, self.period)
        return bool(self.value())

    def __hash__(self) -> int:
        self._note_all(_numbers_near())  # of a dict or a set, in which it is looked up
        return hash(self.value())


class _Int(_Noting, int):
    """An integer that notes."""

    def __invert__(self) -> Any:
        return -self - 1

    def __lshift__(self, other: Any) -> Any:
        return self * (1 << other)

    def __xor__(self, other: Any) -> Any:
        if (mask := _plain(other)) is None:
            return NotImplemented
        self._note_all(number ^ mask for number in _numbers_near() if type(number) is int)
        return self.value() ^ mask

    __rxor__ = __xor__

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if type(other) is int and other > 0:
            self._note_all(number ** (1 / other) for number in _numbers_near() if number > 0)
        return pow(self.value(), other, modulus)

    def __float__(self) -> float:
        self._note_all(value for number in _numbers_near() for value in (number, number * number))  # of a root
        return float(self.value())


class _Float(_Noting, float):
    """A float that notes."""
