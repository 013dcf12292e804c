"""What a loss may change of the process or the thread as it is called on trial, and what it may not do then."""

from __future__ import annotations

import functools
import gc
import logging
import operator
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# of what these do, nothing can be taken back: by the names of their modules, which need not have been imported
_OUTSIDE = {
    "os": (
        "abort chmod chown copy_file_range execv execve fchmod fchown fork forkpty ftruncate kill killpg lchown "
        "link lseek mkfifo mknod nice pidfd_open posix_spawn posix_spawnp pwrite read readv remove removexattr "
        "rename replace rmdir sched_setaffinity sendfile setpriority setxattr symlink system truncate umask "
        "unlink utime wait waitid waitpid write writev"
    ),
    "subprocess": "Popen.__init__",
    "threading": "Thread.start",
    "multiprocessing.process": "BaseProcess.start",
    "concurrent.futures.thread": "ThreadPoolExecutor.submit",
    "concurrent.futures.process": "ProcessPoolExecutor.submit",
    "signal": "alarm pthread_kill raise_signal setitimer",
    "atexit": "register unregister",
    "faulthandler": "enable disable",
    "tracemalloc": "start stop",
    "resource": "setrlimit",
    "time": "tzset",
}
_CLOSED_OUTSIDE = {  # methods of classes in C, by the names of their modules; none: any
    "_socket": None,
    "_ssl": None,
    "sqlite3": frozenset({"execute", "executemany", "executescript", "commit", "rollback"}),
}


class State(NamedTuple):
    """A part of what belongs to the process or the thread."""

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], object]
    by: dict[str, str]  # the functions that change it


def _collecting() -> Any:
    return gc.isenabled(), gc.get_threshold(), gc.get_debug()


def _put_collecting(before: Any) -> None:
    enabled, thresholds, debug = before
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*thresholds)
    gc.set_debug(debug)


def _errors() -> Any:
    return np.geterr(), np.geterrcall(), np.getbufsize()


def _put_errors(before: Any) -> None:
    kinds, function, size = before
    np.seterr(**kinds)
    np.seterrcall(function)
    np.setbufsize(size)


_CONTEXT = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _context() -> Any:
    context = sys.modules["decimal"].getcontext()
    return [(name, getattr(context, name)) for name in _CONTEXT] + [("traps", dict(context.traps))]


def _put_context(before: Any) -> None:
    context = sys.modules["decimal"].getcontext()
    for name, value in before:
        setattr(context, name, value)


def _folder() -> Any:
    try:
        return os.getcwd()  # noqa: PTH109, a text
    except FileNotFoundError:  # it has been removed
        return None


def _put_folder(before: str | None) -> None:
    if before is not None:
        os.chdir(before)


def _put_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _put_filters(before: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = before  # type: ignore[index]


def _loggers() -> Any:
    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    states = {
        each: (each.level, each.disabled, each.propagate, [*each.handlers], [*each.filters])
        for each in (logging.root, *known)
    }
    return logging.root.manager.disable, states


def _put_loggers(before: Any) -> None:
    logging.disable(before[0])
    for logger in _loggers()[1]:  # those that have been made are as they are without a name of their own
        level, disabled, propagate, handlers, filters = before[1].get(logger, (logging.NOTSET, False, True, [], []))
        logger.setLevel(level)
        logger.disabled, logger.propagate = disabled, propagate
        logger.handlers[:], logger.filters[:] = handlers, filters


def _locale() -> Any:
    locale = sys.modules["locale"]
    return locale.setlocale(locale.LC_ALL)


def _put_locale(before: str) -> None:
    locale = sys.modules["locale"]
    locale.setlocale(locale.LC_ALL, before)


def _handlers() -> Any:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _put_handlers(before: dict[Any, Any]) -> None:
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


STATES = (
    State("the limit of recursion", sys.getrecursionlimit, sys.setrecursionlimit, {"sys": "setrecursionlimit"}),
    State("the interval of threads", sys.getswitchinterval, sys.setswitchinterval, {"sys": "setswitchinterval"}),
    State("the garbage collector", _collecting, _put_collecting, {"gc": "enable disable set_threshold set_debug"}),
    State("NumPy's errors", _errors, _put_errors, {"numpy": "seterr seterrcall setbufsize"}),
    State(
        "NumPy's print options",
        np.get_printoptions,
        lambda before: np.set_printoptions(**before),
        {"numpy": "set_printoptions"},
    ),
    State("decimal's context", _context, _put_context, {"decimal": "getcontext setcontext localcontext"}),
    State("the current directory", _folder, _put_folder, {"os": "chdir fchdir"}),
    State("the environment", lambda: dict(os.environ), _put_environment, {"os": "putenv unsetenv"}),
    State(
        "the filters of warnings",
        lambda: [*warnings.filters],
        _put_filters,
        {"warnings": "simplefilter filterwarnings resetwarnings"},
    ),
    State(
        "the state of logging",
        _loggers,
        _put_loggers,
        {
            "logging": "disable Logger.setLevel Logger.addHandler Logger.removeHandler "
            "Filterer.addFilter Filterer.removeFilter"
        },
    ),
    State("the locale", _locale, _put_locale, {"_locale": "setlocale"}),
    State("handlers of signals", _handlers, _put_handlers, {"_signal": "signal"}),
)


@functools.lru_cache(maxsize=1)
def watched(modules: int) -> dict[int, tuple[Any, State | str]]:
    """Return what changes such a state, or cannot be taken back, by its address: functions, and code of Python's.

    Args:
        modules: How many have been imported.
    """
    found: dict[int, tuple[Any, State | str]] = {}
    for state in STATES:
        found.update((id(each), (each, state)) for _, each in _known(state.by))
    found.update((id(each), (each, f"calls {name}")) for name, each in _known(_OUTSIDE))
    return found


def _known(functions: dict[str, str]) -> list[tuple[str, Any]]:
    """Return functions of modules that have been imported, with their names; of one in Python its code."""
    found = []
    for module, names in functions.items():
        for name in names.split() if module in sys.modules else ():
            try:
                function = operator.attrgetter(name)(sys.modules[module])
            except AttributeError:  # another system's
                continue
            found.append((f"{module}.{name}".removesuffix(".__init__"), getattr(function, "__code__", function)))
    return found


def _methods_outside(cls: Any) -> frozenset[str] | None:
    found = [_CLOSED_OUTSIDE[each.__module__] for each in cls.__mro__ if each.__module__ in _CLOSED_OUTSIDE]
    return found[0] if found else frozenset()


def reaches_out(function: Any) -> str | None:
    """Return what a method of an object in C does that cannot be taken back."""
    own = getattr(function, "__self__", None)
    if own is None or type(own) in (types.ModuleType, type):
        return None
    cls: Any = type(own)
    names, name = _methods_outside(cls), function.__name__
    return f"calls {cls.__qualname__}.{name}" if names is None or name in names else None
