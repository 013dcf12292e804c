"""Threads that make batches ahead of the caller."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import mlx.core as mx

EXIT_SECONDS = 2.0  # for which workers that are inside the user's code can hold up the end of a loop or of the process

Job = tuple["Future[Any]", Callable[[], Any]]

_streams: dict[mx.DeviceType, list[mx.Stream]] = {}  # that no worker is using
_streams_lock = threading.Lock()
_alive: weakref.WeakSet[Workers] = weakref.WeakSet()


class Workers:
    """So many threads that do jobs in the order in which they came.

    The threads are daemons, so that a loop that was left open does not hold up the interpreter's exit: they are stopped
    there. A thread refers to the queue only, so what uses the workers can be collected while they run.

    What a job computes with MLX runs on a stream that is lent to the thread. Streams of a thread's own would stay, with
    a thread of MLX's each, when the thread has ended.
    """

    def __init__(self, count: int, name: str) -> None:
        """Start the threads."""
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.stopped = threading.Event()
        device = mx.default_device()
        self.threads = [
            threading.Thread(
                target=_work, args=(self.jobs, self.stopped, device), name=f"faststep-{name}-{i}", daemon=True
            )
            for i in range(count)
        ]
        _alive.add(self)
        for thread in self.threads:
            thread.start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queue a job behind those before it."""
        future: Future[Any] = Future()
        self.jobs.put((future, job))
        return future

    def stop(self) -> None:
        """Cancel the jobs that have not begun; their futures raise CancelledError."""
        if self.stopped.is_set():
            return
        self.stopped.set()
        while True:
            try:
                job = self.jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in self.threads:
            self.jobs.put(None)

    def join(self, deadline: float | None = None) -> None:
        """Wait until the threads have ended; the one that calls is passed over, should it be one of them.

        Args:
            deadline: Of `time.monotonic`, in seconds, after which they are left to end by themselves.
        """
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _work(jobs: queue.SimpleQueue[Job | None], stopped: threading.Event, device: mx.Device) -> None:
    """Run jobs until there is a None."""
    stream = _lend(device)
    try:
        with mx.stream(stream):
            while (job := jobs.get()) is not None:
                _do(*job, stopped)
                del job  # or it would hold the batch while the thread waits
    finally:
        _take_back(stream)


def _do(future: Future[Any], job: Callable[[], Any], stopped: threading.Event) -> None:
    if stopped.is_set() or not future.set_running_or_notify_cancel():
        future.cancel()
        return
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    del future  # which an error's traceback would keep alive, in a circle


def _lend(device: mx.Device) -> mx.Stream:
    with _streams_lock:
        free = _streams.setdefault(device.type, [])
        return free.pop() if free else mx.new_thread_unsafe_stream(device)


def _take_back(stream: mx.Stream) -> None:
    with _streams_lock:
        _streams[stream.device.type].append(stream)


@atexit.register
def _stop_all() -> None:
    """Stop what a loop that was never left has running."""
    workers = list(_alive)
    for each in workers:
        each.stop()
    deadline = time.monotonic() + EXIT_SECONDS
    for each in workers:
        each.join(deadline)
