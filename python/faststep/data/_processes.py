"""A dataset whose items are read in other processes, for those whose Python is slow."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mlx.core as mx

from faststep.data._draws import refuse_draws, states
from faststep.data._errors import about


class Processes:
    """A sequence, copies of which in other processes read its items.

    The processes are started afresh (`spawn`): they import what the dataset needs, and know nothing else of this one. A
    signal of the terminal ends this process, and they end with it, however it ends.

    Args:
        source: The sequence, which can be pickled.
        count: How many processes.

    Raises:
        TypeError: It cannot be pickled.
    """

    def __init__(self, source: Any, count: int) -> None:
        try:
            payload = pickle.dumps(source)
        except Exception as error:  # of as many kinds as there are ways not to be pickled
            raise TypeError(
                f"processes: the dataset cannot be sent to another process ({error}): open files and make locks when "
                "the first item is read, and define its class in a module"
            ) from error
        self._source, self._epoch = source, 0
        self._children = [_Child(payload) for _ in range(count)]
        self._free: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        for child in self._children:
            self._free.put(child)
        weakref.finalize(self, _stop, self._children)

    def __getattr__(self, name: str) -> Any:
        """Return what the dataset has beside its items: `lengths`, `tokens_per_item`, `summary`."""
        return getattr(self._source, name)

    def __repr__(self) -> str:
        """Name the dataset."""
        return f"Processes({type(self._source).__name__})"

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._source[index]

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the dataset, and to its copies before their next item; start those that do not run."""
        self._epoch = epoch
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        for child in self._children:
            child.start()

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read items, in the next process that is free.

        Raises:
            RuntimeError: The process has ended.
            Exception: What reading them raised, with the traceback from there as its cause.
        """
        child = self._free.get()
        try:
            return child.read(self._epoch, indices)
        finally:
            self._free.put(child)


class _Child:
    """One process with a copy of the dataset."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._process: Any = None
        self._connection: Any = None

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = theirs, _files(self._payload), self._payload
        self._process = context.Process(target=_serve, args=arguments, name="faststep-worker", daemon=True)
        with _uninterrupted():
            self._process.start()
        theirs.close()

    def read(self, epoch: int, indices: Sequence[int]) -> list[Any]:
        """Let the process read items."""
        self.start()
        try:
            self._connection.send((epoch, list(indices)))
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise RuntimeError(f"a worker process has ended ({self._ended()}) while it read an item") from None
        found, error, trace = pickle.loads(answer)
        if error is not None:
            error.__cause__ = RuntimeError(f"in a worker process:\n{trace}")
            raise error
        return found  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def _ended(self) -> str:
        """Say how the process has ended; another one is started for the next items."""
        self._process.join()
        code = self._process.exitcode
        self.stop()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _stop(children: list[_Child]) -> None:
    for child in children:
        child.stop()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a process begin with Ctrl-C ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _files(payload: bytes) -> dict[str, str]:
    """Return the files of modules that a pickle names: a config's `file.py` is on no import path."""
    named = {name: module for name, module in [*sys.modules.items()] if name.encode() in payload and "." not in name}
    files = {name: getattr(module, "__file__", None) for name, module in named.items() if name != "__main__"}
    return {name: file for name, file in files.items() if file is not None}


# in the process


def _serve(connection: Connection, files: dict[str, str], payload: bytes) -> None:
    """Read items until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a whole group of processes: the first one ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    dataset: Any = None
    told, drawn = None, states()
    while True:
        try:
            epoch, indices = connection.recv()
        except (EOFError, OSError):
            return
        try:
            dataset = _loaded(files, payload) if dataset is None else dataset
            if told != epoch and hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            told = epoch
            answer = _pickled(_read(dataset, indices))
            refuse_draws(drawn)
        except BaseException as error:
            answer = _refusal(error)
        with contextlib.suppress(OSError):
            connection.send_bytes(answer)


def _end_with_parent() -> None:
    """End the process when the one that started it has ended, even where an item is waited for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _loaded(files: dict[str, str], payload: bytes) -> Any:
    """Unpickle the dataset, with its modules out of their files where they are on no import path."""
    for name, file in files.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            sys.path.insert(0, str(Path(file).parent))
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    return pickle.loads(payload)


def _read(dataset: Any, indices: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    items = []
    for index in indices:
        with about("item", index):
            items.append(dataset[index])
    return items


class _Pickler(pickle.Pickler):
    """A pickler that refuses MLX arrays."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse one."""
        if isinstance(obj, mx.array):
            raise TypeError(
                "processes: expected items without MLX arrays, got one: return NumPy arrays, batches are made into "
                "MLX arrays anyway"
            )
        return NotImplemented


def _pickled(items: list[Any]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump((items, None, ""))
    return buffer.getvalue()


def _refusal(error: BaseException) -> bytes:
    """Return an error as bytes, as its words where it cannot be pickled."""
    trace = traceback.format_exc()
    try:
        answer = pickle.dumps((None, error, trace))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return answer
