"""What belongs to the process or the thread and is asked for by functions of libraries: switches, limits, levels."""

from __future__ import annotations

import abc
import functools
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

Read = Callable[[Any], Any] | None  # of the function that is asked; None: what it returns

_ERRORS = frozenset({"FloatingPointError", "ArithmeticError", "Exception", "BaseException", "suppress"})
_WARNINGS = frozenset({"Warning", "UserWarning", "RuntimeWarning", "DeprecationWarning", "FutureWarning"})
_LEVELS = frozenset({"isEnabledFor", "getEffectiveLevel", "disable", "hasHandlers", "getLogger", "manager"})
_TEXTS = frozenset({"array2string", "array_repr", "array_str", "printoptions", "repr"})
_TIMES = frozenset({"fromtimestamp", "astimezone", "mktime", "localtime"})
_MAX_LOGGERS = 16
_CHECKS = frozenset({"isinstance", "issubclass", "singledispatch", "dispatch"})
_ENVIRONMENT = frozenset({"expandvars", "expanduser", "home", "gettempdir"})
_FOLDERS = frozenset({"getcwd", "getcwdb", "cwd", "abspath", "absolute", "resolve", "realpath"})


def _context(_: object) -> Any:
    """Return decimal's context, but for the flags that results set."""
    context = sys.modules["decimal"].getcontext()
    numbers = context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp
    return *numbers, *context.traps.values()


def _thread(_: object) -> Any:
    thread = threading.current_thread()
    return thread.name, thread.ident, thread.daemon


def _threads(_: object) -> Any:
    return tuple(thread.name for thread in threading.enumerate())


def _process(_: object) -> Any:
    multiprocessing = sys.modules["multiprocessing"]
    process = multiprocessing.current_process()
    return process.name, process.pid, multiprocessing.get_start_method(allow_none=True)


def _handlers(_: object) -> Any:
    return tuple(id(signal.getsignal(number)) for number in sorted(signal.valid_signals()))


def _locale(_: object) -> Any:
    locale = sys.modules["locale"]
    return locale.setlocale(locale.LC_ALL)


def _errors(_: object) -> Any:
    return np.geterr()


def _options(_: object) -> Any:
    return repr(np.get_printoptions())


def _filters(_: object) -> Any:
    return tuple(warnings.filters)


def _zone(_: object) -> Any:
    return time.tzname, time.timezone


def _folder(_: object) -> Any:
    try:
        return os.getcwd()  # noqa: PTH109, a text
    except FileNotFoundError:  # it has been removed
        return None


def _abstract(_: object) -> Any:
    return abc.get_cache_token()


def _environment(_: object) -> Any:
    return tuple(os.environ.items())


def _streams(_: object) -> Any:
    kinds = (mx.cpu, mx.gpu) if mx.default_device() == mx.gpu else (mx.cpu,)
    return tuple(str(mx.default_stream(kind)) for kind in kinds)


def _levels(_: object) -> Any:
    return logging.root.manager.disable, logging.root.level


def _level(name: str, _: object) -> Any:
    logger = logging.root.manager.loggerDict.get(name)
    return (logger.level, logger.disabled, logger.propagate) if isinstance(logger, logging.Logger) else None


def _callback(get: Any) -> Any:
    return id(get())


def _state(get: Any) -> Any:
    kept = get(legacy=False)
    parts = (*kept.pop("state").values(), *kept.values())
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in parts)


# of functions and classes by the names of their modules, which need not have been imported
_READ: dict[Read, dict[str, str]] = {
    None: {
        "sys": "getrecursionlimit getswitchinterval getdlopenflags get_int_max_str_digits",
        "gc": "isenabled get_threshold get_debug",
        "os": "getpid getppid",
        "threading": "active_count stack_size get_ident",
        "numpy": "geterr getbufsize",
        "mlx.core": "default_device",
        "tracemalloc": "is_tracing get_traceback_limit",
        "faulthandler": "is_enabled",
        "socket": "getdefaulttimeout",
        "random": "getstate",
        "ctypes": "get_errno",
        "atexit": "_ncallbacks",
    },
    _context: {"decimal": "getcontext localcontext Decimal Context"},
    _thread: {"threading": "current_thread main_thread"},
    _threads: {"threading": "enumerate"},
    _process: {"multiprocessing": "current_process get_start_method"},
    _handlers: {"signal": "getsignal"},
    _locale: {
        "locale": "localeconv setlocale getlocale str format_string atof atoi currency strcoll strxfrm delocalize"
    },
    _errors: {"numpy": "errstate"},
    _callback: {"numpy": "geterrcall"},
    _options: {"numpy": "get_printoptions"},
    _streams: {"mlx.core": "default_stream"},
    _state: {"numpy.random": "get_state"},
}


def switches() -> dict[int, tuple[Any, Read]]:
    """Return the functions of libraries that tell of the process, by their address, and how that is read."""
    found: dict[int, tuple[Any, Read]] = {id(sys.modules): (sys.modules, len)}
    for read, modules in _READ.items():
        for module, names in modules.items():
            have = vars(sys.modules[module]) if module in sys.modules else {}
            known = (have[name] for name in names.split() if name in have)
            found |= {id(function): (function, read) for function in known}
    return found


def by_names(names: set[str], texts: set[str], kinds: set[type]) -> list[Callable[[Any], Any]]:
    """Return what tells of those switches on which code may depend that does not ask for them by their own functions.

    Args:
        names: Names of globals and attributes in the code.
        texts: Strings that it has, or reaches: the names of loggers are among them.
        kinds: The classes of the objects that it reaches.
    """
    has_numpy = any(issubclass(kind, (np.ndarray, np.generic)) for kind in kinds) or "np" in names or "numpy" in names
    found: list[Callable[[Any], Any]] = []
    if has_numpy and names & (_ERRORS | _WARNINGS | {"catch_warnings", "seterr"}):
        found.append(_errors)
    if has_numpy and names & _TEXTS:
        found.append(_options)
    if "filters" in names or ("warn" in names and names & (_ERRORS | _WARNINGS)):
        found.append(_filters)
    if "decimal" in sys.modules and sys.modules["decimal"].Decimal in kinds:
        found.append(_context)
    if names & _CHECKS and any(issubclass(kind, abc.ABCMeta) for kind in kinds):
        found.append(_abstract)
    if names & _ENVIRONMENT:
        found.append(_environment)
    if names & _TIMES:
        found.append(_zone)
    if names & _FOLDERS:
        found.append(_folder)
    if names & _LEVELS:
        found.append(_levels)
    if "getLogger" in names:
        found += [functools.partial(_level, text) for text in sorted(texts)[:_MAX_LOGGERS]]
    return found
