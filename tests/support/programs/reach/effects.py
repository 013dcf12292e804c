"""What a loss writes, prints, or sets in the process, at one of its calls, at some, or at each."""

from __future__ import annotations

import csv
import decimal
import gc
import importlib
import io
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from support.programs.reach.registry import (
    Around,
    Made,
    Make,
    add,
    program,
    squares,
)

LOGGER = logging.getLogger("of a loss that changes it")
CAME: list[int] = []


def cache_limit() -> int:
    limit: int = mx.set_cache_limit(1 << 30)
    mx.set_cache_limit(limit)
    return limit


def starts(path: Path) -> None:
    thread = threading.Thread(target=path.mkdir)
    thread.start()
    thread.join()


# what a loss does with a path that is not there yet, and what is seen of it
EFFECTS: dict[str, tuple[Callable[[Path], object], Callable[[], object]]] = {
    "a process": (lambda path: subprocess.run(["mkdir", str(path)], check=True), lambda: None),
    "a thread": (starts, lambda: None),
    "touch": (Path.touch, lambda: None),
    "a link": (lambda path: path.symlink_to("elsewhere"), lambda: None),
    "a graph": (lambda path: mx.export_to_dot(str(path), mx.zeros(2)), lambda: None),
    "a mode": (lambda path: path.parent.chmod(0o711), lambda: None),
    "a signal": (lambda path: signal.raise_signal(signal.SIGUSR1), lambda: len(CAME)),
    "a handler": (lambda path: LOGGER.addHandler(logging.NullHandler()), lambda: len(LOGGER.handlers)),
    "a level": (lambda path: LOGGER.setLevel(logging.DEBUG), lambda: LOGGER.level),
    "no logs": (lambda path: logging.disable(10), lambda: logging.root.manager.disable),
    "a filter": (lambda path: warnings.simplefilter("ignore", ResourceWarning), lambda: warnings.filters[0]),
    "no garbage": (lambda path: gc.disable(), gc.isenabled),
    "NumPy's errors": (lambda path: np.seterr(over="ignore"), np.geterr),
    "NumPy's texts": (lambda path: np.set_printoptions(precision=3), lambda: np.get_printoptions()["precision"]),
    "decimal": (lambda path: setattr(decimal.getcontext(), "prec", 9), lambda: decimal.getcontext().prec),
    "a folder": (lambda path: os.chdir(path.parent), Path.cwd),
    "a variable": (lambda path: os.environ.update(OF_A_LOSS="1"), lambda: os.environ.get("OF_A_LOSS")),
    "recursion": (lambda path: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    "a cache": (lambda path: mx.set_cache_limit(10**7), cache_limit),
    "a warning": (lambda path: warnings.warn("warm-up is over", UserWarning, stacklevel=1), lambda: None),
    "a line": (lambda path: sys.stdout.write("said"), lambda: None),
}


def once(name: str) -> Make:
    """What is done at one call."""

    def make(around: Around) -> Made:
        state, (act, see) = types.SimpleNamespace(n=0), EFFECTS[name]
        made = around.folder / "made"
        CAME.clear()
        LOGGER.handlers.clear()
        LOGGER.setLevel(logging.NOTSET)
        signal.signal(signal.SIGUSR1, lambda *_: CAME.append(1))

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            state.n += 1
            if state.n == 5:
                act(made)
            return squares(model, x)

        return Made(
            loss_fn, lambda: (state.n, around.folder.stat().st_mode, os.path.lexists(made), repr(see())), calls=8
        )

    return make


# another folder in each of two runs is no difference
EFFECTS["a folder"] = (lambda path: os.chdir(path.parent), lambda: Path.cwd().name.startswith("tmp"))
for name in EFFECTS:
    add("process", f"what is done at one call: {name}", once(name))


def quiet(path: Path) -> None:
    with np.errstate(over="ignore"), decimal.localcontext() as context, warnings.catch_warnings():
        context.prec = 9
        warnings.simplefilter("error")
    gc.disable()
    gc.enable()


def recorded(path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("of the loss's own", UserWarning, stacklevel=1)
    assert len(caught) == 1


def at_each(act: Callable[[Path], object]) -> Make:
    """What is done at each call."""

    def make() -> Made:
        state = types.SimpleNamespace(n=0)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            state.n += 1
            act(Path())
            return squares(model, x)

        return Made(loss_fn, lambda: (state.n, np.geterr(), decimal.getcontext().prec, LOGGER.level))

    return make


AT_EACH: dict[str, Callable[[Path], object]] = {
    **{name: EFFECTS[name][0] for name in ("a level", "no logs", "NumPy's errors", "decimal", "a warning")},
    "what is put back": quiet,
    "warnings that are recorded": recorded,
    "a process": lambda path: subprocess.run(["true"], check=True),
}
for name, act in AT_EACH.items():
    add("process", f"what is done at each call: {name}", at_each(act))


OPEN = io.open


def written_at_some(by: str) -> Make:
    """What is written at some calls."""

    def make(around: Around) -> Made:
        state = types.SimpleNamespace(n=0)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            state.n += 1
            if state.n % 5 == 0:
                if by == "print":
                    print(state.n)
                elif by == "a file":
                    with (around.folder / str(state.n)).open("w") as file:
                        file.write("written")
                elif by == "an alias":
                    with OPEN(around.folder / str(state.n), "w") as file:
                        file.write("written")
                else:
                    mx.save(str(around.folder / str(state.n)), mx.array(1.0))
            return squares(model, x)

        return Made(loss_fn, lambda: (state.n, sorted(path.stem for path in around.folder.iterdir())))

    return make


for by in ("print", "a file", "an alias", "an array"):
    add("process", f"what is written at some calls: {by}", written_at_some(by))


def written_at_each(by: str) -> Make:
    """What is written at each call."""

    def make(around: Around) -> Made:
        state, logger = types.SimpleNamespace(n=0), logging.Logger("of a loss")
        file = around.opened.enter_context((around.folder / "log").open("w"))
        handler, rows, filtered = logging.StreamHandler(file), csv.writer(file), list[int]()

        def keep(record: logging.LogRecord) -> bool:
            filtered.append(record.lineno)
            return True

        logger.addHandler(handler)
        if by == "a filter":
            logger.addFilter(keep)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            state.n += 1
            if by == "print":
                print(state.n)
            elif by == "an open file":
                file.write(f"{state.n}\n")
            elif by == "a table":
                rows.writerow([state.n])
            else:
                logger.warning("%d", state.n)
            return squares(model, x)

        def seen() -> Any:
            file.flush()
            return state.n, len(filtered), (around.folder / "log").read_text()

        return Made(loss_fn, seen)

    return make


for by in ("print", "an open file", "a table", "a log", "a filter"):
    add("process", f"what is written at each call: {by}", written_at_each(by))


@program("process")
def what_a_loss_prints_of_numpy_arrays() -> Made:
    def printing(model: nn.Module, x: Any) -> mx.array:
        print("called")
        return squares(model, mx.array(x))

    return Made(printing, batch=lambda number: (np.ones((3, 4), np.float32),))


# modules that a loss imports first


def imported(first: int, keeps: bool) -> Make:
    """A module that the loss imports, which keeps arrays and counts."""

    def make(around: Around) -> Made:
        around.patch.syspath_prepend(str(around.folder))
        around.opened.callback(sys.modules.pop, "memory_of_a_loss", None)
        sys.modules.pop("memory_of_a_loss", None)
        (around.folder / "memory_of_a_loss.py").write_text(
            "import mlx.core as mx\nmean, calls, scale = mx.zeros(2), 0, 1.0\n"
            "def update(out):\n    global mean, calls\n    calls += 1\n"
            "    mean = 0.9 * mean + 0.1 * mx.stop_gradient(out).mean(0)\n    return mean\n"
        )
        importlib.invalidate_caches()
        state = types.SimpleNamespace(uses=False)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            if not state.uses:
                return mx.square(out).mean()
            import memory_of_a_loss  # type: ignore[import-not-found]

            if keeps:
                return mx.square(out - memory_of_a_loss.update(out)).mean()
            memory_of_a_loss.calls += 1
            return mx.square(out).mean() * memory_of_a_loss.scale

        def between(number: int) -> None:
            state.uses = number >= first
            if "memory_of_a_loss" in sys.modules and number > 8:
                sys.modules["memory_of_a_loss"].scale = 3.0  # type: ignore[attr-defined]

        def seen() -> Any:
            memory: Any = sys.modules.get("memory_of_a_loss")
            return memory and (memory.calls, memory.mean)

        return Made(loss_fn, seen, between)

    return make


for first, keeps in itertools.product((0, 3), (False, True)):
    add(
        "process",
        f"a module that the loss imports at call {first}{', with an array' if keeps else ''}",
        imported(first, keeps),
    )
