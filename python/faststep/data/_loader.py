"""Batches out of a dataset: evaluated, in an order that can be resumed, made ahead of the training step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any

from faststep.data._by_length import ByLength, Made
from faststep.data._epoch import Epoch, Sharing, Task
from faststep.data._lengths import Lengths
from faststep.data._make import Collate, Maker
from faststep.data._options import check_options
from faststep.data._order import Keys
from faststep.data._pack import Pack
from faststep.data._pipeline import Pipeline
from faststep.data._processes import Processes
from faststep.data._reader import Reader
from faststep.data._source import Columns, Items, Stream, open_source
from faststep.data._stack import stack
from faststep.data._state import VERSION, check_same, checksum, name_of, place_of
from faststep.data._stats import LoaderStats
from faststep.data._tree import Tree
from faststep.data._workers import EXIT_SECONDS


class Loader:
    """An iterable over a dataset in batches.

    `for batch in loader` is one epoch, or what is left of it: after a loop that was left early, or a state that was
    loaded, the next loop goes on after the last batch that was taken. A batch is an `mx.array`, a tuple (for
    `step(*batch)`) or a dict (for `step(**batch)`), and every array in it is evaluated.

    **Sources.** A sequence (`__len__` and `__getitem__`: a list, a Hugging Face or PyTorch dataset; `__getitems__` is
    used where there is one); numpy or MLX arrays, or tuples and dicts of them, whose first axis is the items; a
    DataFrame of pandas or polars, whose batches are dicts by column; or an iterable, which may be endless. An array in
    a list is an item. A source that has `set_epoch` is told each epoch; one whose items are of one length may have
    `tokens_per_item`, which is counted in `stats`.

    **Order.** The order of a shuffled epoch is a function of `seed`, the number of the epoch and the length, the same
    on every machine and with every number of workers. Nothing else in the process has a part in it, `mx.random` and
    `numpy.random` included. An iterable has the order that it has.

    **Workers.** Threads that read items and collate them; batches come in the same order as without. They help where
    that work lets the GIL go: files, network, decoding, large numpy operations. A source must bear being read by
    several threads; an iterable is read by one. Leave `mx.random` alone in items and collate: its state is each
    thread's own. One that draws from `random` or `numpy.random` is refused: threads draw in another order each time;
    a generator of the item's own, `numpy.random.default_rng([seed, epoch, index])`, resumes exactly. An item or collate
    may make MLX arrays: they are evaluated in the thread that made them. One that waits for another thread (an array
    that the dataset holds and never evaluated) is an error that names it.

    **Processes.** A dataset whose items are slow in Python keeps the GIL; free-threaded Python is one way out, worker
    processes are the other. With `processes=True` each worker has a process with a copy of the dataset, which reads the
    items; order, collate, resume and everything else stay. The dataset is pickled, its items are NumPy arrays and plain
    values, and a script that makes the loader begins below `if __name__ == "__main__":`, since a process imports it.

    **Ranks.** Each rank makes a loader with its `rank` and the same other arguments. A round takes the next
    `world_size * batch_size` items, rank r the r-th part of it, so all ranks together see the batches that one process
    with the larger `batch_size` sees. Every rank has the same number of batches, since a collective operation would
    wait for ever otherwise: the items left for the last round are dropped (`drop_last`), or divided evenly over it, or,
    where they are fewer than the ranks, over the last two rounds. No item is given out twice and none is left out, but
    the last batches can be smaller, of sizes that differ by one: a mean over ranks is exact with weights only.

    **Resuming.** `state` is plain JSON and says which batch comes next, however many are made ahead; `load_state` goes
    there. Nothing that was taken before is read again, except the lengths for `Pad` and `Pack` (see `lengths`). An
    iterable with a state of its own (`state` and `load_state`, or `state_dict` and `load_state_dict`) goes on from the
    state that it had before the batch's items were read; another is iterated again. A state of rank 0 serves all.

    Example:
        >>> import numpy as np
        >>> from faststep.data import Loader
        >>> data = {"x": np.arange(10.0), "y": np.arange(10) % 2}
        >>> loader = Loader(data, batch_size=4, shuffle=True, seed=1, workers=2)
        >>> len(loader)
        3
        >>> for batch in loader:
        ...     print(batch["x"], batch["y"])
        ...     break
        array([9, 2, 4, 7], dtype=float32) array([1, 0, 0, 1], dtype=int64)
        >>> again = Loader(data, batch_size=4, shuffle=True, seed=1)
        >>> again.load_state(loader.state)
        >>> [batch["x"].tolist() for batch in again] == [batch["x"].tolist() for batch in loader]
        True
        >>> loader.epoch, loader.position
        (1, 0)

    Attributes:
        batch_size: As given.
        workers: As given.
        prefetch: As given.
        world_size: As given.
        on_wait: Called four times a second while a worker is waited for, with the seconds so far; None: nothing. It may
            raise `faststep.data.Interrupted`, which ends the loop at once, whatever the worker is doing.
    """

    on_wait: Callable[[float], object] | None = None

    def __init__(
        self,
        source: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate: Collate = stack,
        workers: int = 0,
        prefetch: int = 2,
        processes: bool = False,
        rank: int = 0,
        world_size: int = 1,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Check the arguments; nothing is read yet.

        Args:
            source: What the items come from; see above.
            batch_size: Items of a batch, or rows of packed items; for each rank.
            shuffle: Whether each epoch has another random order.
            seed: Of the order, 0 or more.
            drop_last: Whether items that fill no batch of every rank are left out at the end of an epoch.
            collate: Makes a batch out of a list of items: `stack`, a `Pad`, a `Pack`, or a function of your own.
            workers: Threads that make batches; 0 to make them in the caller's thread.
            prefetch: With workers, how many batches wait ready, beside one that each worker makes.
            processes: With workers, whether each reads the items in a process of its own.
            rank: This process among those that train together.
            world_size: How many those are.
            lengths: The length of each item of a sequence, which `Pack` and a `Pad` with a window have to know before
                an epoch. Default: `source.lengths`; if there is no such thing, every item is read once for it.

        Raises:
            TypeError: The source cannot be read, or an argument has another type.
            ValueError: An argument is out of its range, the source is empty, or it makes no full batch.
        """
        self._source = open_source(source)
        options = {"batch_size": batch_size, "seed": seed, "workers": workers, "prefetch": prefetch, "rank": rank}
        flags = {"shuffle": shuffle, "drop_last": drop_last, "processes": processes}
        check_options(self._source, {**options, "world_size": world_size}, flags, collate, lengths)
        if processes and not isinstance(self._source, Columns):  # arrays are no Python to be slow
            self._source = Items(Processes(source, workers))
        self.batch_size, self.workers, self.prefetch = batch_size, workers, prefetch
        self._shuffle, self._seed, self._collate = shuffle, seed, collate
        self._sharing = Sharing(batch_size, rank, world_size, drop_last)
        self.world_size = world_size
        self._arranger = collate if isinstance(collate, ByLength) and collate.arranges else None
        self._lengths: Lengths | None = None
        if isinstance(self._source, Items) and self._arranger:
            given = lengths if lengths is not None else getattr(source, "lengths", None)
            self._lengths = Lengths(self._source, self._arranger, given)
        self._make = Maker(self._source, collate, self._lengths)
        self._plan: tuple[int, int, Epoch] | None = None  # epoch, length, and the batches planned for them
        self._epoch = self._position = 0
        self._resume: dict[str, Any] | None = None
        self._run: Pipeline | None = None
        self._begun = False
        self._tokens_per_item = int(getattr(source, "tokens_per_item", 0))
        self._stats = LoaderStats()
        if isinstance(self._source, Items):
            self._check_size(len(self._source))

    def __repr__(self) -> str:
        """Name the source, the options that are not the defaults, and the place; nothing is read."""
        collate = None if self._collate is stack else getattr(self._collate, "__name__", repr(self._collate))
        options = {"shuffle": self._shuffle, "seed": self._seed, "workers": self.workers, "collate": collate}
        if self._sharing.world_size > 1:
            options |= {"rank": self._sharing.rank, "world_size": self._sharing.world_size}
        given = "".join(f", {name}={value}" for name, value in options.items() if value or name == "rank")
        inner = self._source.source
        source = repr(inner) if isinstance(inner, Processes) else type(inner).__name__
        return f"Loader({source}, batch_size={self.batch_size}{given}) at batch {self._position} of epoch {self._epoch}"

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """The number of batches taken in this epoch."""
        return self._position

    @property
    def reading(self) -> bool:
        """True if a batch is being made in the thread of the loop, without workers; an exception there loses none."""
        return self._run is not None and self._run.reading

    @property
    def summary(self) -> dict[str, Any] | None:
        """The source's description for logs: plain values; None if it has none."""
        return getattr(self._source.source, "summary", None)

    @property
    def stats(self) -> LoaderStats:
        """Counts of the batches so far."""
        return self._stats

    def __len__(self) -> int:
        """Return the number of batches of the current epoch, from its beginning; `Pack` may have another in the next.

        Raises:
            TypeError: The source is an iterable.
        """
        if isinstance(self._source, Stream):
            raise TypeError("an iterable has as many batches as it gives: a Loader over one has no len()")
        return self._planned(self._source, self._epoch).rounds.count

    def __iter__(self) -> Generator[Tree, None, None]:
        """Iterate over the rest of the epoch; an earlier loop is closed, and its threads are waited for."""
        self.close()
        return self._loop()

    def close(self) -> None:
        """End the loop that is open, if there is one; when this returns no thread of the last loop is left."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def __enter__(self) -> Loader:
        """Return the loader; leaving closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the loader."""
        self.close()

    @property
    def state(self) -> dict[str, Any]:
        """The place after the last batch that was taken, and which loader it is a place of: plain JSON values."""
        return {
            "version": VERSION,
            "epoch": self._epoch,
            "position": self._position,
            "stream": self._resume,
            "of": {**self._fingerprint(), "lengths": self._arranged_by() if self._position else None},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a place; an open loop is closed.

        The place may be one of a loader with other ranks, and with a batch size over all ranks that this one's divides,
        where nothing is arranged by length: then the items go on behind those that were taken.

        Raises:
            ValueError: It is no state, or one of a loader over other data or with other arguments; nothing has changed.
        """
        epoch, position, stream = place_of(state)
        theirs = dict(state["of"])
        arranged = theirs.pop("lengths", None)
        batches = self._batches_of(theirs)
        check_same(theirs, self._fingerprint())
        if position and isinstance(self._source, Items):
            count = self._planned(self._source, epoch).rounds.count
            check_same({"lengths": arranged}, {"lengths": self._arranged_by()})
            if position > count and batches == 1:
                raise ValueError(f"load_state: position: expected at most {count}, got {position}")
            position = min(batches * position, count)  # the last batch of theirs may have made fewer of ours
        if (stream is not None) != (position > 0 and isinstance(self._source, Stream)):
            raise ValueError(f"load_state: stream: expected the place of an iterable, and of that alone, got {stream}")
        self.close()
        self._epoch, self._position, self._resume = epoch, position, stream

    def _batches_of(self, theirs: dict[str, Any]) -> int:
        """Return how many batches of all ranks make one of theirs; their sizes count as ours then."""
        sizes = theirs.get("batch_size"), theirs.get("world_size")
        if not isinstance(self._source, Items) or self._arranger is not None:
            return 1
        if not all(isinstance(size, int) for size in sizes):
            return 1
        block, rest = divmod(math.prod(sizes), self._sharing.block)  # type: ignore[arg-type]
        if rest or not block:
            return 1
        theirs |= {"batch_size": self.batch_size, "world_size": self.world_size}
        return block

    def _fingerprint(self) -> dict[str, Any]:
        """Return what makes this loader another than others."""
        sharing = self._sharing
        return {
            "length": self._length(self._source, self._epoch) if isinstance(self._source, Items) else None,
            "batch_size": sharing.batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": sharing.drop_last,
            "collate": name_of(self._collate),
            "world_size": sharing.world_size,
        }

    def _arranged_by(self) -> str | None:
        """Return a checksum of the lengths that the epoch was planned by."""
        known = self._lengths.known if self._lengths else None
        return None if known is None else checksum(known)

    def _loop(self) -> Generator[Tree, None, None]:
        """Yield the rest of the epoch."""
        last = before = time.perf_counter()
        run = self._run = self._begin()
        try:
            while (taken := run.take(self.on_wait)) is not None:
                task, made = taken
                now = time.perf_counter()
                self._count(made, now - before, now - last)
                last = now
                self._position, self._resume = self._position + 1, task.resume
                yield made.batch
                del taken, task, made  # or the batch would be held while the next one is made
                before = time.perf_counter()
            self._epoch, self._position, self._resume = self._epoch + 1, 0, None
        except KeyboardInterrupt:
            self._run = None  # the next loop does not wait for the item that was waited for
            raise
        finally:
            if not run.closed:
                run.close(seconds=EXIT_SECONDS)  # an item may wait for something, and Ctrl-C come anywhere

    def _begin(self) -> Pipeline:
        """Start to make batches."""
        source = self._source
        if hasattr(source.source, "set_epoch"):
            source.source.set_epoch(self._epoch)
        if isinstance(source, Items):
            plan = self._planned(source, self._epoch)
            tasks: Iterator[Task] = map(plan.task, range(self._position, plan.rounds.count))
        else:
            if source.one_shot and not source.stateful and self._begun:
                raise ValueError(
                    "source: a one-shot iterator was read before and cannot be iterated again: give an object "
                    "whose __iter__ starts again, such as a list or a class with a generator as its __iter__"
                )
            tasks = Reader(source, self._sharing, self._arranger, self._resume).tasks()
        first, self._begun = not self._begun, True
        reads = isinstance(source, Stream)
        return Pipeline(tasks, self._make, self.workers, self.prefetch, reads=reads, first=first)

    def _planned(self, source: Items, epoch: int) -> Epoch:
        """Return the plan of an epoch; once it has begun its length stays."""
        n = self._length(source, epoch)
        if self._plan is None or self._plan[:2] != (epoch, n):
            self._check_size(n)
            keys = Keys(self._seed, epoch) if self._shuffle else None
            lengths = self._lengths.all(n) if self._lengths else None
            plan = Epoch(n, keys, self._sharing, self._arranger, lengths)
            if not plan.rounds.count:
                raise ValueError(f"source: {n} items make {len(plan.units)} rows, which fill no batch of every rank")
            self._plan = epoch, n, plan
        return self._plan[2]

    def _length(self, source: Items, epoch: int) -> int:
        """Return the length of an epoch: what it began with, or else what the source has now."""
        begun = self._plan is not None and self._position > 0 and self._plan[0] == epoch == self._epoch
        return self._plan[1] if begun and self._plan else len(source)

    def _check_size(self, n: int) -> None:
        """Refuse sources that give no batch."""
        if n == 0:
            raise ValueError("source: it is empty: there is nothing to make batches of")
        if isinstance(self._arranger, Pack):
            return  # its rows are not known yet
        if not self._sharing.rounds(n).count:
            raise ValueError(
                f"drop_last: no batch is full: {n} items for {self._sharing.world_size} x {self.batch_size}; use a "
                "smaller batch_size or drop_last=False"
            )

    def _count(self, made: Made, wait: float, seconds: float) -> None:
        """Add a batch to the statistics."""
        stats = self._stats
        self._stats = dataclasses.replace(
            stats,
            batches=stats.batches + 1,
            items=stats.items + made.items,
            tokens=stats.tokens + (made.real or made.items * self._tokens_per_item),
            wait=stats.wait + wait,
            seconds=stats.seconds + seconds,
            real=stats.real + made.real,
            elements=stats.elements + made.elements,
        )
