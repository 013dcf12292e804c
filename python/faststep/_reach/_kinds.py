"""White list: constants, trusted functions and classes, and the package that something is from."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import functools
import gc
import math
import operator
import sys
import types
import typing
from typing import Any

import mlx.core as mx
import numpy as np

from faststep._native import core

_PLAIN: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented)}
    | {mx.Dtype, mx.DtypeCategory, mx.Device, mx.Stream, types.GenericAlias}
    | {type(dataclasses.MISSING), type(getattr(dataclasses, "_HAS_DEFAULT_FACTORY", None)), type(int | str)}
)
TRANSFORMED: type = type(mx.compile(lambda: None))  # the results of `mx.compile` and `mx.grad`
NAMING = (getattr, hasattr)  # which are taken by these names and with constant ones only
_BUILTINS = (
    "len range zip enumerate min max sum abs isinstance issubclass float int bool str bytes complex tuple list dict "
    "set frozenset sorted reversed any all map filter round divmod pow repr type super slice object callable format"
)
# of MLX: functions that read or change files and the process
_IMPURE = (
    *("load", "save", "seed", "export", "import_", "default_", "device_", "get_", "set_", "reset_", "new_", "clear_"),
    *("disable_", "enable_", "start_", "stop_capture", "print"),
)
_GETTERS = frozenset({"attrgetter", "methodcaller", "itemgetter", "call"})
_FIELD = type(collections.namedtuple("_Field", "x").x)  # type: ignore[attr-defined]
_WITH_METHODS: tuple[type, ...] = (
    *(dict, list, tuple, set, frozenset, str, bytes, int, float, complex, range, slice),
    *(type({}.keys()), type({}.values()), type({}.items()), types.MappingProxyType),
)


def is_a(value: Any, cls: Any) -> bool:
    """True if an object is of a class by its type: functions of `mx.compile` report another `__class__`."""
    return issubclass(type(value), cls)


def is_constant(value: Any) -> bool:
    """True if nothing in an object can change."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is frozenset:
        return all(type(each) in _PLAIN for each in value)
    if is_a(value, np.dtype):
        return bool(value.isbuiltin == 1)
    if kind.__module__ == "numpy":
        return issubclass(kind, (np.number, np.bool_))
    return kind.__module__ == "typing" and not is_a(value, type)


def is_key(value: Any) -> bool:
    """True if an object is a dict's key that nobody's code compares."""
    return all(map(is_key, value)) if type(value) is tuple else type(value) in _PLAIN


@functools.lru_cache(maxsize=1)
def _trusted() -> dict[int, Any]:
    """Return the functions and classes of Python and NumPy that are not read, by their addresses."""
    found = [getattr(builtins, name) for name in _BUILTINS.split()]
    found += (each for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, BaseException))
    found += (each for each in vars(math).values())
    found += (each for name, each in vars(operator).items() if name not in _GETTERS)
    found += (functools.partial, functools.reduce, typing.Any, typing.Generic, typing.Protocol, np.ndarray)
    found.append(core.current_state)  # `Optimizer.state`
    found += (each for each in vars(np).values() if isinstance(each, type) and issubclass(each, (np.number, np.bool_)))
    return {id(each): each for each in found if isinstance(each, (type, types.BuiltinFunctionType))}


def is_trusted(value: Any) -> bool:
    """True if an object is a function or class that is known to depend on its arguments alone."""
    kind = type(value)
    if id(value) in _trusted() or kind is _FIELD:
        return True
    if kind is types.BuiltinFunctionType and value.__name__ == "__new__":
        return is_a(value.__self__, type)
    if kind.__module__ == "nanobind" and kind.__name__ in ("nb_func", "nb_method"):
        is_of_mlx = owner(value.__module__ or "mlx") == "mlx"  # none: of a property such as `mx.array.shape`
        return is_of_mlx and not value.__name__.startswith(_IMPURE)
    return is_a(value, type) and value.__module__.startswith("mlx.core")


def is_trusted_call(function: Any) -> bool:
    """True if a function in C depends on its arguments and changes nothing but the object it is a method of."""
    own = getattr(function, "__self__", None)
    if own is None or is_a(own, types.ModuleType) or is_a(own, type):
        plain = any(own is each for each in (dict, int, float, bytes, str, tuple, object))
        return plain or id(function) in _trusted()
    return is_a(own, _WITH_METHODS) and function.__name__ != "__reduce__"


def owner(module: str) -> str:
    """Return who a module is from: "mlx", "python" (and NumPy), "installed" or "user"."""
    root = module.partition(".")[0]
    if root == "mlx":
        return root
    if root in ("numpy", "nanobind") or (root in sys.stdlib_module_names and root != "__main__"):
        return "python"
    return "installed" if _is_installed(root) else "user"


@functools.lru_cache(maxsize=4096)
def _is_installed(root: str) -> bool:
    """True if a package lies among the installed ones: an editable one lies elsewhere, and is the user's."""
    spec = getattr(sys.modules.get(root), "__spec__", None)
    paths = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any("site-packages" in str(path) or "dist-packages" in str(path) for path in paths)


def is_made(function: types.FunctionType) -> bool:
    """True if a function is Python's own code in a class: of an enumeration, a named tuple or a protocol."""
    module = module_of(function)
    return module in ("enum", "typing", "abc", "collections") or module.startswith("namedtuple_")


def module_of(function: Any) -> str:
    """Return the name of the module whose globals a function reads, whatever `functools.wraps` makes of it."""
    return str(function.__globals__.get("__name__", ""))


def inner_functions(value: Any) -> list[Any] | None:
    """Return the functions inside one that MLX has transformed; None if there is more inside it."""
    found = [each for each in gc.get_referents(value) if each is not None and each is not type(value)]
    return found if found and all(callable(each) for each in found) else None


def described(value: Any) -> str:
    """Return the name of a function or class as it is called: `time.time`."""
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__self__", None), "__name__", "")
    name = getattr(value, "__qualname__", type(value).__name__)
    return name if module in ("builtins", "__main__", "") else f"{module}.{name}"
