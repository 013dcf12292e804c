"""White list: constants, trusted functions and classes, and the package that something is from."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import gc
import math
import operator
import site
import sys
import sysconfig
import types
import typing
from typing import Any

import mlx.core as mx
import numpy as np

_PLAIN: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented)}
    | {mx.Dtype, mx.Device, mx.Stream, types.GenericAlias, types.UnionType}
)
_INTERNAL = (type(dataclasses.MISSING), type(getattr(dataclasses, "_HAS_DEFAULT_FACTORY", dataclasses.MISSING)))
TRANSFORMED: type = type(mx.checkpoint(lambda: None))  # what `mx.compile`, `mx.checkpoint` and `mx.grad` return
_BUILTINS = (
    *("len", "range", "zip", "enumerate", "min", "max", "sum", "abs", "isinstance", "issubclass", "float", "int"),
    *("bool", "str", "bytes", "complex", "tuple", "list", "dict", "set", "frozenset", "sorted", "reversed", "any"),
    *("all", "map", "filter", "round", "divmod", "pow", "repr", "type", "super", "slice", "object", "callable", "chr"),
    *("ord", "getattr", "hasattr", "format"),  # the search takes `getattr` with a constant name only
)
# of MLX: functions that read or change files and the process
_IMPURE = frozenset(
    {
        *("load", "save", "savez", "savez_compressed", "save_safetensors", "save_gguf", "seed", "export_function"),
        *("import_function", "export_to_dot", "exporter", "disable_compile", "enable_compile", "clear_cache"),
        *(
            "default_stream",
            "device_count",
            "get_memory_limit",
            "clear_streams",
            "set_printoptions",
            "get_printoptions",
        ),
        *("printoptions", "new_thread_unsafe_stream"),
        *("get_active_memory", "get_cache_memory", "get_peak_memory", "reset_peak_memory", "default_device"),
        *("device_info", "set_default_device", "set_default_stream", "set_memory_limit", "set_cache_limit"),
        *("set_wired_limit", "start_capture", "stop_capture", "new_stream", "new_thread_local_stream"),
    }
)
_IMPURE_NUMPY = frozenset(
    {
        *("load", "save", "savez", "savez_compressed", "loadtxt", "savetxt", "genfromtxt", "fromfile", "memmap"),
        *("seterr", "seterrcall", "geterr", "setbufsize", "getbufsize", "set_printoptions", "get_printoptions", "info"),
        *("show_config", "show_runtime", "test", "empty", "empty_like", "frompyfunc", "vectorize", "printoptions"),
        *("errstate", "nditer", "ndindex", "ndenumerate", "flatiter", "lib", "array2string", "get_include"),
    }
)
_LIBRARIES = frozenset({"math", "operator", "functools", "typing", "numpy"})
_MADE = frozenset({"dataclasses", "reprlib", "enum", "typing", "abc", "functools", "types", "collections"})
# methods of dataclasses, which read all fields: a call of the loss that runs one is not left out
_OF_DATACLASSES = frozenset(
    {
        *("__eq__", "__hash__", "__repr__", "__setattr__", "__delattr__", "__lt__", "__le__", "__gt__", "__ge__"),
        "__replace__",
    }
)
_FOLDERS = tuple(
    {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(), site.getusersitepackages()}
)


def is_a(value: Any, cls: Any) -> bool:
    """True if an object is of a class by its type: functions of `mx.compile` report another `__class__`."""
    return issubclass(type(value), cls)


def is_constant(value: Any) -> bool:
    """True if nothing in an object can change."""
    if type(value) in _PLAIN or is_a(value, (np.generic, np.dtype)) or type(value) in _INTERNAL:
        return True
    if type(value) is slice:
        return all(type(each) in _PLAIN for each in (value.start, value.stop, value.step))
    if type(value) is frozenset:
        return all(type(each) in _PLAIN for each in value)
    return type(value).__module__ == "typing" and not is_a(value, type)


def is_key(value: Any) -> bool:
    """True if an object is a dict's key that nobody's code compares."""
    if type(value) is tuple:
        return all(map(is_key, value))
    return type(value) in _PLAIN


@functools.lru_cache(maxsize=1)
def _trusted() -> dict[int, Any]:
    """Return the functions and classes of Python and NumPy that are not read, by their addresses."""
    found = [getattr(builtins, name) for name in _BUILTINS]
    found += (each for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, BaseException))
    found += (each for name, each in vars(math).items() if callable(each))
    getters = ("attrgetter", "methodcaller", "itemgetter")
    found += (each for name, each in vars(operator).items() if callable(each) and name not in getters)
    found += (functools.partial, functools.reduce, typing.cast, typing.Any, typing.Generic, typing.Protocol)
    for module in (np, np.linalg, np.fft):
        for name in set(module.__all__) - _IMPURE_NUMPY:
            each = vars(module).get(name)
            is_class = isinstance(each, type) and issubclass(each, (np.generic, np.dtype, np.ndarray))
            if is_class or (callable(each) and not isinstance(each, type)):
                found.append(each)
    return {id(each): each for each in found if type(each) is not types.FunctionType or is_of_library(each)}


def is_trusted(value: Any) -> bool:
    """True if an object is a function or class that is known to depend on its arguments alone."""
    if id(value) in _trusted():
        return True
    if type(value) is types.BuiltinFunctionType and value.__name__ == "__new__":
        return is_a(value.__self__, type)
    if type(value).__module__ == "nanobind" and type(value).__name__ in ("nb_func", "nb_method"):
        return owner(value.__module__ or "") == "mlx" and value.__name__ not in _IMPURE
    return is_a(value, type) and owner(value.__module__) == "mlx"


def is_trusted_call(function: Any) -> bool:
    """True if a function in C depends on its arguments and changes nothing but the object it is a method of."""
    own = getattr(function, "__self__", None)
    if own is None or is_a(own, types.ModuleType) or is_a(own, type):
        plain = any(own is each for each in (dict, int, float, bytes, str, tuple, object))
        return plain or id(function) in _trusted()
    kinds: tuple[type, ...] = (
        dict,
        list,
        tuple,
        set,
        frozenset,
        str,
        bytes,
        int,
        float,
        complex,
        range,
        slice,
        np.generic,
        np.ndarray,
    )
    views: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()), types.MappingProxyType, np.ufunc)
    return is_a(own, (*kinds, *views)) and function.__name__ not in ("tofile", "dump", "dumps", "__reduce__")


def owner(module: str) -> str:
    """Return who a module is from: "mlx", "library" (white-listed), "python", "installed" or "user"."""
    root = module.partition(".")[0]
    if root == "mlx":
        return root
    if root in _LIBRARIES:
        return "library"
    if root in sys.stdlib_module_names and root != "__main__":
        return "python"
    return "installed" if root == "nanobind" or _is_installed(root) else "user"


@functools.lru_cache(maxsize=4096)
def _is_installed(root: str) -> bool:
    """True if a package lies among the installed ones: an editable one lies elsewhere, and is the user's."""
    spec = getattr(sys.modules.get(root), "__spec__", None)
    paths = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(isinstance(path, str) and path.startswith(_FOLDERS) for path in paths)


def is_made(value: Any, name: str, cls: type) -> bool:
    """True if Python has made what a class has under a name: for an enumeration, a dataclass or a named tuple."""
    if type(value) is types.GetSetDescriptorType:
        return name in ("__dict__", "__weakref__")
    if type(value) in (types.WrapperDescriptorType, types.MethodDescriptorType):
        return value.__objclass__ in (object, int, float, str, tuple)  # of an enumeration
    if type(value).__name__ == "_tuplegetter":
        return True
    value = value.__func__ if type(value) is staticmethod else value
    if type(value) is not types.FunctionType:
        return False
    module = module_of(value)
    if module.partition(".")[0] in _MADE or module.startswith("namedtuple_"):
        return True
    return "__dataclass_params__" in vars(cls) and name in _OF_DATACLASSES and value.__code__.co_filename == "<string>"


def is_of_library(function: types.FunctionType) -> bool:
    """True if nobody has put a function of his own in a library's place."""
    return owner(module_of(function)) == "library"


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
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__name__)
    is_builtin = vars(builtins).get(str(name)) is value
    return str(name) if is_builtin or module in ("builtins", "__main__", "") else f"{module}.{name}"
