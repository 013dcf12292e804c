"""Check of one call of a loss: no unknown function runs in it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

from faststep._reach import _code
from faststep._reach._kinds import NAMING, described, is_trusted_call

# packages whose own code may run: the search takes only those of their functions that depend on their arguments alone
_TRUSTED = frozenset({"functools", "typing", "enum", "abc", "types", "operator", "mlx.utils"})


class Calls:
    """Context of one call of a loss.

    Attributes:
        reason: Why the call may not be left out later; None if only known functions ran. Read it afterwards.
    """

    def __init__(self, codes: Iterable[types.CodeType]) -> None:
        self.reason: str | None = None
        self._codes = frozenset(codes) | {Calls.__enter__.__code__, Calls.__exit__.__code__}
        self._is_on = False

    def __enter__(self) -> Calls:
        if sys.getprofile() is not None:
            self.reason = "runs under a profiler"
        else:
            self._is_on = True
            sys.setprofile(self._meet)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_on:
            if sys.getprofile() != self._meet:
                self.reason = self.reason or "changes the profiler"
            else:
                sys.setprofile(None)
            self._is_on = False

    def _meet(self, frame: types.FrameType, event: str, function: Any) -> None:
        """Look at one call."""
        if self.reason is not None or frame.f_code is Calls.__exit__.__code__ or _is_trusted(frame):
            return
        if event == "call" and frame.f_code not in self._codes:
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            module = frame.f_globals.get("__name__", "")
            name = name if module in ("", "__main__") else f"{module}.{name}"
            self.reason = f"calls {name} ({_place(frame.f_back or frame)})"
        elif event == "c_call" and not (is_trusted_call(function) or _is_by_name(function, frame)):
            self.reason = f"calls {described(function)} ({_place(frame)})"


def _is_trusted(frame: types.FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return type(module) is str and (module in _TRUSTED or module.startswith("namedtuple_"))


def _is_by_name(function: Any, frame: types.FrameType) -> bool:
    return function in NAMING and function.__name__ in frame.f_code.co_names


def _place(frame: types.FrameType) -> str:
    return _code.place(frame.f_code, frame.f_lineno or 0)
