"""What a loss does beside its result as it is called on trial, for a call to come: files, logs, lines on the screen."""

from __future__ import annotations

import builtins
import contextlib
import csv
import functools
import gc
import io
import logging
import os
import random
import sys
import threading
import types
import warnings
from collections.abc import Collection, Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from faststep._step._process import State, reaches_out, watched
from faststep._step._things import STREAMS, is_a

_SAVES = ("save", "savez", "savez_compressed", "save_safetensors", "save_gguf", "export_to_dot", "export_function")
_SETS = ("set_cache_limit", "set_memory_limit", "set_wired_limit", "set_default_device", "set_default_stream")
_SEEDED = ("SeedSequence", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_WRITES = frozenset({"write", "writelines", "truncate", "writerow", "writerows"})
_TAKES = {  # methods of files and sets that a loss reaches, of which nothing puts back what they do
    **dict.fromkeys(("close", "detach", "__exit__"), "closes a file"),
    **dict.fromkeys(("pop", "remove"), "takes from a set"),
}
_CSV = type(csv.writer(io.StringIO()))
_CREATES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PRINTS, _FILES, _LOGS, _WARNS = "prints", "writes to a file", "logs", "shows a warning"


class Effect(BaseException):
    """Raised in place of what would be done, past a user's `except Exception`."""


class Effects:
    """Notices what this thread does between `begin` and `end`: it appears nowhere, is put back, or is not done.

    Args:
        known: What is done at other calls too. Raise `Effect` in the place of anything else; None: only of what could
            not be taken back.
        silent: What is printed, logged or warned of is no such thing.
        kept: The addresses of open files that the loss reaches, which it may not close, and of sets.

    Attributes:
        outside: What would have been done that cannot be taken back.
    """

    def __init__(self, known: Iterable[str] | None, silent: bool, kept: Collection[int]) -> None:
        self._known = None if known is None else frozenset(known)
        self._found, self._silent, self._thread = set[str](), silent, threading.get_ident()
        self.outside: str | None = None
        self._kept = kept
        self._old: list[tuple[Any, str, Any]] = []
        self._files: dict[int, tuple[Any, int]] = {}  # open files that have been written to, and where they stood
        self._open = io.open
        self._watched = watched(len(sys.modules))
        self._states: dict[str, tuple[State, Any]] = {}  # that may have been changed, as they were before

    def begin(self) -> None:
        """Put functions that notice in the places of those that write."""
        self._put(sys, "stdout", io.StringIO())
        self._put(sys, "stderr", io.StringIO())
        self._put(builtins, "open", self._opening(builtins.open))
        self._put(io, "open", self._opening(io.open))
        if accessor := getattr(sys.modules.get("pathlib"), "_NormalAccessor", None):  # Python 3.10's
            self._put(accessor, "open", staticmethod(self._opening(accessor.open)))
        self._put(os, "open", self._opening_number(os.open))
        for name in ("handle", "callHandlers"):  # the first asks the filters, which may count
            self._put(logging.Logger, name, self._logging(getattr(logging.Logger, name)))
        self._put(warnings, "_showwarnmsg", self._warning(warnings._showwarnmsg))  # type: ignore[attr-defined]
        for name in _SAVES:
            if (save := getattr(mx, name, None)) is not None:
                self._put(mx, name, self._saving(save))
        for name in _SETS:
            self._put(mx, name, self._reaching(getattr(mx, name), f"calls mx.{name}"))
        if not self._silent:
            for name in ("default_rng", "seed"):
                self._put(np.random, name, self._seeding(getattr(np.random, name)))
            for name in _SEEDED:
                self._put(
                    np.random, name, _Standing(name, (), {"of": getattr(np.random, name), "noted": self._note_seeds})
                )
        if sys.getprofile() is None:
            sys.setprofile(self._profile)

    def end(self) -> None:
        """Put them back, and what has been changed of the process."""
        if sys.getprofile() == self._profile:
            sys.setprofile(None)
        while self._states:
            _, (state, before) = self._states.popitem()
            if state.read() != before:
                state.put(before)
        while self._old:
            owner, name, old = self._old.pop()
            setattr(owner, name, old)
        while self._files:
            _, (file, place) = self._files.popitem()
            with contextlib.suppress(OSError, ValueError):
                file.flush()
                file.seek(place)
                file.truncate()

    def found(self) -> list[str]:
        """Return what has been done, or would have been."""
        said = (own.getvalue() for owner, name, _ in self._old if is_a(own := getattr(owner, name), io.StringIO))
        if not self._silent and any(said):
            self._found.add(_PRINTS)
        changed = {f"changes {state.name}" for state, before in self._states.values() if state.read() != before}
        return sorted(self._found | changed)

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
            self._note(_FILES)
            return io.BytesIO() if "b" in mode else io.StringIO()

        return opened

    def _opening_number(self, old: Any) -> Any:
        @functools.wraps(old)
        def opened(path: Any, flags: int, *rest: Any, **named: Any) -> Any:
            if not self._is_other() and flags & _CREATES:
                self._reach_out("calls os.open")
            return old(path, flags, *rest, **named)

        return opened

    def _saving(self, old: Any) -> Any:
        @functools.wraps(old)
        def saved(*args: Any, **named: Any) -> Any:
            if self._is_other():
                return old(*args, **named)
            self._note(_FILES)
            return None

        return saved

    def _reaching(self, old: Any, what: str) -> Any:
        @functools.wraps(old)
        def reached(*args: Any, **named: Any) -> Any:
            if not self._is_other():
                self._reach_out(what)
            return old(*args, **named)

        return reached

    def _logging(self, old: Any) -> Any:
        @functools.wraps(old)
        def logged(logger: Any, record: Any) -> None:
            if self._is_other():
                old(logger, record)
            elif not self._silent:
                self._note(_LOGS)

        return logged

    def _seeding(self, old: Any) -> Any:
        @functools.wraps(old)
        def seeded(*args: Any, **named: Any) -> Any:
            self._note_seeds(*args, *named.values())
            return old(*args, **named)

        return seeded

    def _warning(self, old: Any) -> Any:
        before = _showing()

        @functools.wraps(old)
        def shown(message: Any) -> None:
            if self._is_other() or _showing() != before:  # the loss records them itself
                old(message)
                return
            _forget(message, sys._getframe(1))
            if not self._silent:
                self._note(_WARNS)

        return shown

    def _profile(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "call":
            self._note_watched(frame.f_code)
            if frame.f_code is random.Random.seed.__code__ and not self._silent:
                self._note_seeds(frame.f_locals["a"])
            return
        if event != "c_call":
            return
        self._note_watched(function)
        if function is self._open and frame.f_globals.get("__name__") not in (__name__, "tokenize"):
            self._reach_out("opens a file by another name than open")  # from io import open
        if (what := reaches_out(function)) is not None:
            self._reach_out(what)
        file: Any = getattr(function, "__self__", None)
        if id(file) in self._kept and function.__name__ in _TAKES:
            self._reach_out(_TAKES[function.__name__])
        if not (what := _written(function)) or (self._silent and function is print):
            return
        if type(file) is _CSV:  # which holds the method of its file
            files = (getattr(held, "__self__", None) for held in gc.get_referents(file))
            file = next((each for each in files if is_a(each, io.IOBase)), None)
        if is_a(file, io.IOBase) and id(file) not in self._files:
            with contextlib.suppress(OSError, ValueError):
                file.flush()
                self._files[id(file)] = file, file.tell()
        self._note(what)

    def _note_watched(self, called: Any) -> None:
        if (known := self._watched.get(id(called))) is None:
            return
        _, what = known
        if isinstance(what, str):
            self._reach_out(what)
        elif what.name not in self._states:
            self._states[what.name] = what, what.read()

    def _reach_out(self, what: str) -> None:
        self.outside = self.outside or what
        self._found.add(what)
        raise Effect

    def _note_seeds(self, *seeds: Any) -> None:
        """Note what seeds a generator: where the loss changes that itself, it is something else at each call."""
        if any(seed is not None for seed in seeds):
            self._note(f"seeds a generator with {', '.join(map(str, seeds))}")

    def _note(self, what: str) -> None:
        if self._is_other():
            return
        self._found.add(what)
        if self._known is not None and what not in self._known:
            raise Effect


class _Standing(type):
    """The class of what stands in the place of a class: its objects are made, and known, by that."""

    of: Any
    noted: Any

    def __call__(cls, *args: Any, **named: Any) -> Any:
        """Make an object of the other class."""
        cls.noted(*args, *named.values())
        return cls.of(*args, **named)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.of, name)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.of)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.of)


def _showing() -> tuple[Any, Any]:
    """Return what shows a warning."""
    return getattr(warnings, "_showwarnmsg_impl", None), warnings.showwarning


def _forget(message: Any, frame: types.FrameType | None) -> None:
    """Take a warning that has not been shown out of where Python keeps those that have been."""
    text, category = str(message.message), message.category
    keys = ((text, category, message.lineno), (text, category, 0), (text, category))
    registries = [warnings.onceregistry]  # type: ignore[attr-defined]
    while frame is not None:
        registries.append(frame.f_globals.get("__warningregistry__"))
        frame = frame.f_back
    for registry in registries:
        for key in keys if is_a(registry, dict) else ():
            registry.pop(key, None)


def _written(function: Any) -> str | None:
    """Return what a function of Python's writes that stays."""
    if function is print:
        return _PRINTS
    own = getattr(function, "__self__", None)
    is_file = type(own) is _CSV or (is_a(own, io.IOBase) and not is_a(own, STREAMS))
    writes = (is_file and getattr(function, "__name__", "") in _WRITES) or function is os.mkdir
    return _FILES if writes else None
