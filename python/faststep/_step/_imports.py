"""Modules of a user's that a loss imports first as it is traced: what they do then would be of the trace."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

from faststep._step._library import is_installed, is_standard


class FirstImport(BaseException):
    """Raised in place of such an import, past a user's `except Exception`."""


class Imports:
    """A finder of modules before all others, while this thread traces: it ends an import of the user's own."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Come before all others."""
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Go."""
        sys.meta_path[:] = [each for each in sys.meta_path if each is not self]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise `FirstImport` for a module that is neither installed nor of the standard library."""
        if threading.get_ident() != self._thread:
            return
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        file = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
        if file and not is_installed(file) and not is_standard(file) and not _is_importing():
            raise FirstImport(name)


def _is_importing() -> bool:
    """Return whether a library's module imports it, in its turn."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None and is_installed(frame.f_code.co_filename)
