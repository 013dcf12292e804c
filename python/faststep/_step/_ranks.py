"""The ranks of a group, and what they do together beside updates."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from faststep._command import HUNG
from faststep._native import core

Group = mx.distributed.Group
RankError = core.RankError
Rows = np.ndarray[Any, Any]
Kind = Literal["gradients", "validation", "checkpoint", "comparison", "parameters"]
_KINDS: dict[Kind, int] = {"gradients": 1, "validation": 2, "checkpoint": 3, "comparison": 4, "parameters": 5}
_SHORT = 64  # bytes that one exchange takes, with their number
_T = TypeVar("_T")


class Ranks:
    """The ranks of a step, and what they do together beside its updates; without a group, this process alone.

    They meet in turns. Each meeting, and each update, begins by telling all of them whether one has failed, and whether
    they are at the same place: an error on all of them if not, before anything else is exchanged.

    Attributes:
        group: The group, None without other ranks.
        rank: The number of this process, from 0 on.
        size: How many there are.
        same_batch: Whether they share one model, and take the same batches.
    """

    def __init__(self, native: core.Step, group: Group | None, same_batch: bool = False) -> None:
        self._native, self.same_batch = native, same_batch
        self.group = None if group is None or group.size() == 1 else group
        self.rank, self.size = (0, 1) if self.group is None else (self.group.rank(), self.group.size())

    @property
    def loaders(self) -> int:
        """The number of ranks with batches of their own: all, or where they share them, one."""
        return 1 if self.same_batch else self.size

    def gather(self, value: Any, kind: Kind) -> list[Any]:
        """Return the values of all ranks, plain JSON values, in their order; to be called on all of them.

        Raises:
            RankError: Another rank has failed, is gone, or is somewhere else.
        """
        if self.group is None:
            return [value]
        text, group = json.dumps(value).encode(), self.group

        def exchange() -> list[list[int]]:
            rows = _gathered([len(text), *text[:_SHORT].ljust(_SHORT)], group)
            longest = max(length for length, *_ in rows)
            return rows if longest <= _SHORT else _gathered([len(text), *text.ljust(longest)], group)

        return [json.loads(bytes(row[:length])) for length, *row in self.together(kind, exchange)]

    def gather_rows(self, rows: Rows | None, kind: Kind) -> list[Rows]:
        """Return the rows of all ranks, in their order; to be called on all of them.

        Args:
            rows: A NumPy array [rows, ...], as long as this rank likes; None: it has none, and does not know their
                shape.
            kind: What they meet for.

        Raises:
            RankError: As `gather` does.
        """
        if self.group is None:
            return [] if rows is None else [rows]
        about = self.gather(None if rows is None else [rows.dtype.str, rows.shape], kind)
        known: Any = next((each for each in about if each is not None), ["f4", [0]])
        empty = np.empty((0, *known[1][1:]), known[0])
        templates = [empty if each is None else np.broadcast_to(np.empty((), each[0]), each[1]) for each in about]
        mine = b"" if rows is None else rows.tobytes()
        row = np.frombuffer(mine.ljust(max(each.nbytes for each in templates), b"\0"), np.uint8)
        gather = partial(mx.distributed.all_gather, mx.array(row)[None], group=self.group)
        theirs = np.array(self.together(kind, partial(_exchanged, gather)))
        return [
            bits[: each.nbytes].view(each.dtype).reshape(each.shape)
            for bits, each in zip(theirs, templates, strict=True)
        ]

    def together(self, kind: Kind, exchange: Callable[[], _T]) -> _T:
        """Meet the other ranks, then exchange arrays with them; to be called on all of them.

        Args:
            kind: What they meet for.
            exchange: The exchange, in the same order on all ranks. It is watched, and its time counts, as that of an
                update's.

        Raises:
            RankError: As `gather` does.
        """
        return self._native.meet(_KINDS[kind], exchange)

    def sum(self, array: mx.array) -> mx.array:
        """Return the sum of an array over the ranks, evaluated; to be called `together`.

        Raises:
            RankError: The others are gone.
        """
        return _exchanged(lambda: mx.distributed.all_sum(array, group=self.group))

    def from_rank(self, array: mx.array, rank: int) -> mx.array:
        """Return an array as a rank has it, to the bit; to be called `together`, with one shape and dtype.

        Raises:
            RankError: The others are gone.
        """
        if self.group is None or array.size == 0:
            return array
        # bytes: the sum with zeros is exact, and -0.0 and NaN stay what they are
        bits = mx.contiguous(array).reshape(-1).view(mx.uint8)
        return self.sum(bits if self.rank == rank else mx.zeros_like(bits)).view(array.dtype).reshape(array.shape)

    def agree(self, wish: int) -> int:
        """Tell the others a number below 256 from the next meeting or update on.

        Returns:
            The largest that any rank had told by the last one, the same on all ranks; without a group `wish` itself.
        """
        return wish if self.group is None else self._native.wish(wish)

    @property
    def seconds(self) -> list[float]:
        """Seconds that each rank has spent outside of exchanges before its updates, but for the first one."""
        return [] if self.group is None else self._native.rank_seconds()

    def fail(self) -> None:
        """Tell the others that this rank has failed, unless they know; nothing is raised where they are gone."""
        with contextlib.suppress(RankError):
            self._native.fail()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tell the others of an error in the block, but for one that all ranks have."""
        try:
            yield
        except RankError:
            raise
        except BaseException:
            self.fail()
            raise


def mean_gradients(
    compute: Callable[[], tuple[Any, dict[str, Any]]], weighted: bool, ranks: Ranks
) -> tuple[Any, dict[str, Any]]:
    """Compute loss and gradients, averaged over the ranks, by weight if `weighted`; to be called on all of them.

    Raises:
        RankError: Another rank has failed, or is gone.
    """
    with ranks.told():
        value, gradients = compute()
        loss = value[0] if isinstance(value, tuple) else value
        weight = mx.array(value[1] if weighted else 1.0, mx.float32)
        mine = mx.stack([weight, loss.astype(mx.float32) * weight])
        mx.eval(mine, gradients)

    def exchange() -> tuple[float, dict[str, Any]]:
        rows: Any = _exchanged(lambda: mx.distributed.all_gather(mine[None], group=ranks.group)).tolist()
        total, losses = (sum(each) for each in zip(*rows, strict=True))
        share = rows[ranks.rank][0] * ranks.size / total if total else float("nan")
        scaled = tree_map(lambda each: each * share, gradients)
        # evaluated here, on all ranks in one order, whatever is read of them first
        means: dict[str, Any] = _exchanged(lambda: nn.average_gradients(scaled, ranks.group))
        return losses / total if total else float("nan"), means

    mean, gradients = ranks.together("gradients", exchange)
    loss = mx.array(mean, loss.dtype)
    return ((loss, *value[1:]) if isinstance(value, tuple) else loss), gradients


def end_hung_rank() -> NoReturn:
    """End this process, whose wait for other ranks nothing else ends."""
    print(
        f"faststep: ending this rank, exit code {HUNG}: MLX waits for the others for ever", file=sys.stderr, flush=True
    )
    os._exit(HUNG)


def _gathered(numbers: list[int], group: Group) -> list[list[int]]:
    """Return a row of numbers for each rank."""
    mine = mx.array(numbers, mx.uint32)
    rows: Any = _exchanged(lambda: mx.distributed.all_gather(mine, group=group)).reshape(group.size(), -1).tolist()
    found: list[list[int]] = rows
    return found


def _exchanged(exchange: Callable[[], _T]) -> _T:
    """Return the arrays that MLX exchanges, evaluated: of a lost ring NumPy reads wrong numbers, without an error.

    Raises:
        RankError: It cannot be done.
    """
    try:
        found = exchange()
        mx.eval(found)
    except RuntimeError as error:
        raise rank_error([], f"the other ranks are lost: {error}") from None
    return found


def rank_error(ranks: list[int], what: str) -> RankError:
    """Make the error of ranks, which may be none that are known."""
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: " if ranks else ""
    error = RankError(f"{names}{what}")
    error.ranks = ranks
    return error
