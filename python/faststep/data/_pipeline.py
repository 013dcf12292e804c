"""The pipeline of one loop over a loader: tasks to batches, in the caller's thread or ahead of it in others."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait

from faststep.data._by_length import Made
from faststep.data._draws import States, refuse_draws, states
from faststep.data._epoch import Task
from faststep.data._workers import Workers

Result = tuple[Task, Made] | None  # None: no task is left
LOOK_SECONDS = 0.25  # while a worker is waited for
Make = Callable[[Task, Callable[[], None]], Made]


class Pipeline:
    """Batches in the order of their tasks.

    With workers, tasks of a stream are read by a thread of their own, since a stream is read in one place; those of a
    plan need no reading. At most `workers + prefetch` batches are being made or ready.
    """

    def __init__(
        self, tasks: Iterator[Task], make: Make, workers: int, prefetch: int, *, reads: bool, first: bool
    ) -> None:
        """Start the threads, if there are any, and their work.

        Args:
            tasks: What each batch is made of.
            make: Makes a batch; it calls its second argument between items, which raises when the loop was left.
            workers: Threads; 0 for none.
            prefetch: Batches that are ready ahead.
            reads: Whether to go on in `tasks` is work that waits for something.
            first: Whether no batch has been made before: workers then make the first one alone, while the caller waits
                for it, so that what it draws from the process's random states is seen, and refused.
        """
        self.tasks, self.make = tasks, make
        self.closed = False
        self.reading = False  # whether the caller's own thread is inside the user's code
        self.pools: list[Workers] = []
        self.ready: collections.deque[Future[Result]] = collections.deque()
        if workers:
            self.pools.append(Workers(workers, "worker"))
            if reads:
                self.pools.append(Workers(1, "reader"))
            self.ahead = workers + prefetch
            self._submit(states() if first else None)
            if not first:
                self._fill()

    def take(self, on_wait: Callable[[float], object] | None = None) -> Result:
        """Return the next batch with its task, when it is ready; None at the end.

        Args:
            on_wait: Called every `LOOK_SECONDS` while a worker is waited for, with the seconds so far; it may raise.

        Raises:
            RuntimeError: The loop was closed.
            Exception: What making the batch raised, with the traceback from there.
        """
        if self.closed:
            raise RuntimeError("this loop over the loader was closed, by loader.close() or by a later loop")
        if not self.pools:
            self.reading = True
            try:
                task = next(self.tasks, None)
                return None if task is None else (task, self.make(task, _go_on))
            finally:
                self.reading = False
        result = _wait(self.ready.popleft(), on_wait)
        if result is not None:
            self._fill()
        return result

    def close(self, *, seconds: float | None = None) -> None:
        """Make no more batches, and wait for the threads, which end after their item.

        Args:
            seconds: How long to wait for them; None: until they have ended.
        """
        self.closed = True
        for pool in self.pools:
            pool.stop()
        deadline = None if seconds is None else time.monotonic() + seconds
        for pool in self.pools:
            pool.join(deadline)
        self.ready.clear()

    def _fill(self) -> None:
        while len(self.ready) < self.ahead:
            self._submit()

    def _submit(self, before: States | None = None) -> None:
        """Submit one batch more to the workers; with random states, refuse what it draws from them."""
        workers, *readers = self.pools
        stopped, tasks, make = workers.stopped, self.tasks, self.make
        read = readers[0].submit(lambda: next(tasks, None)).result if readers else None
        task = None if readers else next(tasks, None)

        def go_on() -> None:
            if stopped.is_set():
                raise CancelledError

        def job() -> Result:
            mine = read() if read else task
            made = None if mine is None else (mine, make(mine, go_on))
            if before is not None:
                refuse_draws(before)
            return made

        self.ready.append(workers.submit(job))


def _wait(future: Future[Result], on_wait: Callable[[float], object] | None) -> Result:
    began = time.monotonic()
    while on_wait is not None and not wait([future], LOOK_SECONDS).done:
        on_wait(time.monotonic() - began)
    return future.result()


def _go_on() -> None:
    """Go on: the caller itself is waiting."""
