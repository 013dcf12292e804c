"""What belongs to MLX, NumPy or the standard library, whose own state is taken for constant."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types

_LIBRARIES = ("mlx", "numpy", "faststep", "builtins", "pydantic", "pydantic_core")
_INSTALLED = ("site-packages", "dist-packages")  # the latter on Debian
_STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


def is_installed(file: str) -> bool:
    """Return whether a file is one of an installed package."""
    return any(name in file for name in _INSTALLED)


@functools.lru_cache(maxsize=4096)
def is_standard(file: str) -> bool:
    """Return whether a file is one of the standard library."""
    if file.startswith("<frozen"):
        return True
    return os.path.realpath(file).startswith(_STANDARD) and not is_installed(file)


@functools.lru_cache(maxsize=4096)
def _is_library_name(name: str) -> bool:
    if name.split(".")[0] in _LIBRARIES or name in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and is_standard(file)


def is_library_module(module: types.ModuleType) -> bool:
    """Return whether a module is a library's."""
    name = vars(module).get("__name__")
    return isinstance(name, str) and _is_library_name(name)


def is_library_class(cls: type) -> bool:
    """Return whether a class is a library's."""
    name = cls.__module__
    return isinstance(name, str) and _is_library_name(name)


def is_own(name: object) -> bool:
    """Return whether a module of this name is neither a library's nor installed."""
    file = getattr(sys.modules.get(name), "__file__", None) if isinstance(name, str) else None
    return not (isinstance(name, str) and _is_library_name(name)) and not is_installed(str(file))


def is_library_function(function: types.FunctionType) -> bool:
    """Return whether a function with Python code is a library's."""
    name = function.__globals__.get("__name__")
    if isinstance(name, str) and name.split(".")[0] in _LIBRARIES:
        return True
    return is_standard(function.__code__.co_filename)


def is_mlx(name: object) -> bool:
    """Return whether a module of this name is one of MLX's."""
    return isinstance(name, str) and name.split(".")[0] == "mlx"
