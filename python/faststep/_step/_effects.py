"""What a loss writes as it is called on trial, for a call to come: files, log records, and lines on the screen."""

from __future__ import annotations

import builtins
import contextlib
import csv
import functools
import gc
import io
import logging
import os
import sys
import threading
import types
from typing import Any

import mlx.core as mx

from faststep._step._things import STREAMS, is_a

_SAVES = ("save", "savez", "savez_compressed", "save_safetensors", "save_gguf")
_WRITES = frozenset({"write", "writelines", "truncate", "writerow", "writerows"})
_CSV = type(csv.writer(io.StringIO()))
_OF_SYSTEM = frozenset(
    getattr(os, name)
    for name in ("mkdir", "remove", "rename", "replace", "rmdir", "system", "unlink", "write")
    if hasattr(os, name)
)


class Effect(BaseException):
    """Raised in place of what would be written, past a user's `except Exception`."""


class Effects:
    """Notices what this thread writes between `begin` and `end`, which appears nowhere, or stops the first of it.

    Args:
        stops: Raise `Effect` in the place of the first.
        silent: What is printed or logged is no such thing.

    Attributes:
        found: Whether something is, or would have been, written.
    """

    def __init__(self, stops: bool, silent: bool = False) -> None:
        self.found, self._stops, self._silent, self._thread = False, stops, silent, threading.get_ident()
        self._old: list[tuple[Any, str, Any]] = []
        self._files: dict[int, tuple[Any, int]] = {}  # open files that have been written to, and where they stood

    def begin(self) -> None:
        """Put functions that notice in the places of those that write."""
        self._put(sys, "stdout", io.StringIO())
        self._put(sys, "stderr", io.StringIO())
        self._put(builtins, "open", self._opening(builtins.open))
        self._put(io, "open", self._opening(io.open))
        for name in ("handle", "callHandlers"):  # the first asks the filters, which may count
            self._put(logging.Logger, name, self._logging(getattr(logging.Logger, name)))
        for name in _SAVES:
            if (save := getattr(mx, name, None)) is not None:
                self._put(mx, name, self._saving(save))
        if sys.getprofile() is None:
            sys.setprofile(self._profile)

    def end(self) -> None:
        """Put them back."""
        if sys.getprofile() == self._profile:
            sys.setprofile(None)
        while self._old:
            owner, name, old = self._old.pop()
            setattr(owner, name, old)
        while self._files:
            _, (file, place) = self._files.popitem()
            with contextlib.suppress(OSError, ValueError):
                file.flush()
                file.seek(place)
                file.truncate()

    def _put(self, owner: Any, name: str, new: Any) -> None:
        self._old.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _is_other(self) -> bool:
        return threading.get_ident() != self._thread

    def _opening(self, old: Any) -> Any:
        @functools.wraps(old)
        def opened(file: Any, mode: Any = "r", *rest: Any, **named: Any) -> Any:
            if self._is_other() or not is_a(mode, str) or not set(mode) & set("wax+"):
                return old(file, mode, *rest, **named)
            self._note()
            return io.BytesIO() if "b" in mode else io.StringIO()

        return opened

    def _saving(self, old: Any) -> Any:
        @functools.wraps(old)
        def saved(*args: Any, **named: Any) -> Any:
            if self._is_other():
                return old(*args, **named)
            self._note()
            return None

        return saved

    def _logging(self, old: Any) -> Any:
        @functools.wraps(old)
        def logged(logger: Any, record: Any) -> None:
            if self._is_other():
                old(logger, record)
            elif not self._silent:
                self._note()

        return logged

    def _profile(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event != "c_call" or not _writes(function) or (self._silent and function is print):
            return
        file: Any = getattr(function, "__self__", None)
        if type(file) is _CSV:  # which holds the method of its file
            files = (getattr(held, "__self__", None) for held in gc.get_referents(file))
            file = next((each for each in files if is_a(each, io.IOBase)), None)
        if is_a(file, io.IOBase) and id(file) not in self._files:
            with contextlib.suppress(OSError, ValueError):
                file.flush()
                self._files[id(file)] = file, file.tell()
        self._note()

    def _note(self) -> None:
        if self._is_other():
            return
        self.found = True
        if self._stops:
            raise Effect


def _writes(function: Any) -> bool:
    """Return whether a function of Python's writes something that stays."""
    if function is print or (is_a(function, types.BuiltinFunctionType) and function in _OF_SYSTEM):
        return True
    own = getattr(function, "__self__", None)
    is_file = type(own) is _CSV or (is_a(own, io.IOBase) and not is_a(own, STREAMS))
    return is_file and getattr(function, "__name__", "") in _WRITES
