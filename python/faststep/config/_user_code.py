"""The user's own code: `module:attribute` and `file.py:attribute`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path as File
from types import ModuleType
from typing import Any

from faststep._files import expanded
from faststep.config._errors import unknown


class NotThere(LookupError):
    """There is no such module, file or attribute."""


def attribute(use: str, folder: File) -> Any:
    """Find what `module:attribute` or `file.py:attribute` names.

    A file's folder is importable while it is loaded, so that it finds its neighbours as if it ran as a program.

    Raises:
        NotThere: Nothing has that name.
    """
    place, _, names = use.rpartition(":")
    value: Any = _file(folder, place) if place.endswith(".py") else _module(place, folder)
    for name in names.split("."):
        if not hasattr(value, name):
            there = [each for each in dir(value) if not each.startswith("_")]
            raise NotThere(f"{place}: {unknown(name, there, 'name')}")
        value = getattr(value, name)
    return value


@contextlib.contextmanager
def importable(folder: File) -> Iterator[None]:
    """Put a folder on the import path."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def _module(name: str, folder: File) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise NotThere(f"expected module:attribute or file.py:attribute, got {name!r} for the module")
    with importable(folder):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # of an import in it
            raise NotThere(f"expected a module that can be imported, got {name!r}: {error}") from None


def _file(folder: File, place: str) -> ModuleType:
    """Load a file, once: model and loss of one file are of one module."""
    try:
        file = (folder / expanded(place)).resolve()
        if not file.is_file():
            raise NotThere(f"expected a file, got {file}")
    except ValueError as error:
        raise NotThere(f"expected a file, got {place!r}: {error}") from None
    name = file.stem
    if name in sys.stdlib_module_names or not _is_of(sys.modules.get(name), file):
        name = f"{name}_{zlib.crc32(os.fsencode(file)):08x}"  # another module has the plain name
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise NotThere(f"expected Python code, got {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with importable(file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_of(module: ModuleType | None, file: File) -> bool:
    """Return whether a module name is free, or is this file's."""
    there = getattr(module, "__file__", None)
    return module is None or (there is not None and File(there).resolve() == file)
