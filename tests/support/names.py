"""Losses that reach something by names made as they run, by functions under other names, or in subclasses' objects."""

from __future__ import annotations

import collections
import copy
import ctypes
import functools
import importlib
import inspect
import operator
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

A, LOSS = "".join(["a"]), "".join(["_l", "oss"])  # no code has these names in one piece
RATE_OF_FOCAL, RATE_OF_HUBER = 1.0, 1.0
module = types.ModuleType("names_of_a_test")


def focal_loss(value: mx.array) -> mx.array:
    return value * RATE_OF_FOCAL


class Kinds:
    """Losses that are chosen by a text."""

    kind = "huber"

    def huber_loss(self, value: mx.array) -> mx.array:
        return value * RATE_OF_HUBER

    @staticmethod
    def focal_loss(value: mx.array) -> mx.array:
        return value * RATE_OF_FOCAL


class Held:
    """An object with a number."""

    __match_args__ = ("a",)

    def __init__(self) -> None:
        self.a = 1.0


class OfClass:
    """A class with a number."""

    a = 1.0


class Inherited(OfClass):
    pass


class Missing(dict[str, float]):
    """A dict that has any key."""

    default = 1.0

    def __missing__(self, key: str) -> float:
        return self.default


class Scaled(dict[str, float]):
    """A dict whose items are attributes, times a global."""

    def __getattr__(self, key: str) -> float:
        return self[key] * RATE_OF_FOCAL


class Items(list[float]):
    pass


class Members(set[float]):
    pass


class Pair(tuple[float, ...]):
    pass


class Ordered(collections.OrderedDict[str, float]):
    pass


def by_match(held: Held) -> float:
    match held:
        case Held(value):
            return value
    raise AssertionError


Change = Callable[[float], object]
Factor = Callable[[], Any]


def setting(held: Any, name: str = "a") -> Change:
    return lambda value: setattr(held, name, value)


def rebinding(name: str) -> Change:
    return lambda value: globals().__setitem__(name, value)


def programs() -> dict[str, tuple[Factor, Change]]:
    """Return factors of a loss, and what changes them."""
    held, kinds, inherited = Held(), Kinds(), Inherited()
    look, get, get_own, get_attribute = vars, getattr, object.__getattribute__, operator.attrgetter
    members = inspect.getmembers
    evaluate, known, import_, table = eval, globals, importlib.import_module, {"look": vars}
    functions = types.SimpleNamespace(look=vars)
    of_name, missing, scaled = functools.partial(getattr, held), Missing(), Scaled(b=1.0)
    made = collections.defaultdict(lambda: RATE_OF_FOCAL)
    part = functools.partial(pow, 2.0)
    part.a = 1.0  # type: ignore[attr-defined]
    containers = {kind.__name__: kind() for kind in (Items, Members, Pair, Ordered, Missing)}
    of_none: dict[Any, Any] = {None: OfClass, "again": OfClass}
    for each in containers.values():
        each.a = 1.0  # type: ignore[attr-defined]
    return {
        "vars": (lambda: look(held)["a"], setting(held)),
        "vars in a dict": (lambda: table["look"](held)["a"], setting(held)),
        "vars as an attribute": (lambda: functions.look(held)["a"], setting(held)),
        "getattr": (lambda: get(held, A), setting(held)),
        "getattr in part": (lambda: of_name(A), setting(held)),
        "__getattribute__": (lambda: get_own(held, A), setting(held)),
        "attrgetter": (lambda: get_attribute(A)(held), setting(held)),
        "getmembers": (lambda: dict(members(held))[A], setting(held)),
        "copy": (lambda: copy.copy(held).__dict__[A], setting(held)),
        "pickle": (lambda: float(sum(pickle.dumps(held))), setting(held)),
        "eval": (lambda: evaluate("RATE_OF_" + "FOCAL"), rebinding("RATE_OF_FOCAL")),
        "globals": (lambda: known()["RATE_OF_" + "FOCAL".upper()], rebinding("RATE_OF_FOCAL")),
        "import_module": (lambda: import_(f"names_of_{A}_test").a, setting(module)),
        "of a class": (lambda: getattr(OfClass, A), setting(OfClass)),
        "of a class, by vars": (lambda: vars(OfClass)[A], setting(OfClass)),
        "inherited": (lambda: getattr(inherited, A), setting(OfClass)),
        "of a module": (lambda: getattr(module, A), setting(module)),
        "of a module, by vars": (lambda: vars(module)[A], setting(module)),
        "a method": (lambda: getattr(kinds, f"{kinds.kind}{LOSS}")(1.0), rebinding("RATE_OF_HUBER")),
        "a static method": (lambda: getattr(Kinds, f"focal{LOSS}")(1.0), rebinding("RATE_OF_FOCAL")),
        "a function of a module": (lambda: getattr(module, f"focal{LOSS}")(1.0), rebinding("RATE_OF_FOCAL")),
        "a global function": (lambda: globals()[f"focal{LOSS}"](1.0), rebinding("RATE_OF_FOCAL")),
        "a function that is evaluated": (lambda: eval(f"focal{LOSS}")(1.0), rebinding("RATE_OF_FOCAL")),
        "a module": (lambda: importlib.import_module(f"names_of_{A}_test").a, setting(module)),
        "the module itself": (lambda: getattr(sys.modules[__name__], f"focal{LOSS}")(1.0), rebinding("RATE_OF_FOCAL")),
        "a pattern": (lambda: by_match(held), setting(held)),
        "a dict that makes values": (lambda: made.default_factory(), rebinding("RATE_OF_FOCAL")),  # type: ignore[misc]
        "a dict that has any key": (lambda: missing["any"], setting(missing, "default")),
        "a dict with methods": (lambda: scaled.b, rebinding("RATE_OF_FOCAL")),
        "a part of a function": (lambda: part(2.0) * part.a, setting(part)),  # type: ignore[attr-defined]
        "a dict with a key None": (lambda: of_none["again"].a, setting(OfClass)),
        **{
            f"an attribute of {name}": (lambda each=each: each.a, setting(each))  # type: ignore[attr-defined, misc]
            for name, each in containers.items()
        },
    }


def loss_of(factor: Factor) -> Callable[[nn.Module, mx.array], mx.array]:
    """Return a loss that is multiplied by a factor."""

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        loss: mx.array = model(x).square().mean() * factor()
        return loss

    return loss_fn


class Net(nn.Module):
    """A model with containers of subclasses in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer, self.table, self.items_ = nn.Linear(4, 1), Missing(b=1.0), Items([1.0])

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 4] to [batch, 1]."""
        y: mx.array = self.layer(x) * self.table["any"] * getattr(self.items_, A, 1.0)
        return y


def by_address() -> float:
    """Return a number that changes."""
    return RATE_OF_FOCAL


ADDRESS = id(by_address)


def called_by_address() -> float:
    """Call a function of which only a number is there."""
    return ctypes.cast(ADDRESS, ctypes.py_object).value()  # type: ignore[no-any-return]
