"""The ranks of a group: what they must have alike before the first update, and what they do together beside updates."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from faststep._command import HUNG
from faststep._native import core
from faststep._step._options import Options
from faststep._step._user_optimizer import OwnOptimizer

Group = mx.distributed.Group
RankError = core.RankError
_FREE = {"compile", "replay", "in_flight", "max_traces", "clear_cache_every"}  # each rank may have its own
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}
Kind = Literal["gradients", "validation", "checkpoint", "comparison"]
_KINDS: dict[Kind, int] = {"gradients": 1, "validation": 2, "checkpoint": 3, "comparison": 4}  # for `Step.meet`
_PLAIN = (bool, int, float, str, type(None))


class _Part(NamedTuple):
    """A part of the training that is to be the same on all ranks, as text."""

    name: str
    text: str
    remedy: str


class Ranks:
    """The ranks of a step, and what they do together beside its updates; without a group, this process alone.

    They meet in turns. Each meeting, and each update, begins by telling all of them whether one has failed, and whether
    they are at the same place: an error on all of them if not, before anything else is exchanged.

    Attributes:
        group: The group, None without other ranks.
        rank: The number of this process, from 0 on.
        size: How many there are.
    """

    def __init__(self, native: core.Step, group: Group | None) -> None:
        self._native = native
        self.group = None if group is None or group.size() == 1 else group
        self.rank, self.size = (0, 1) if self.group is None else (self.group.rank(), self.group.size())

    def gather(self, value: Any, kind: Kind) -> list[Any]:
        """Return the values of all ranks, plain JSON values, in their order; to be called on all of them.

        Raises:
            RankError: Another rank has failed, is gone, or is somewhere else.
        """
        if self.group is None:
            return [value]
        self._native.meet(_KINDS[kind])
        text = json.dumps(value).encode()
        lengths = [length for (length,) in _gathered([len(text)], self.group)]
        rows = _gathered([*text, *[0] * (max(lengths) - len(text))], self.group)
        return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]

    def agree(self, wish: int) -> int:
        """Tell the others a number below 256 from the next meeting or update on.

        Returns:
            The largest that any rank had told by the last one, the same on all ranks; without a group `wish` itself.
        """
        return wish if self.group is None else self._native.wish(wish)

    def fail(self) -> None:
        """Tell the others that this rank has failed, unless they know; nothing is raised where they are gone."""
        with contextlib.suppress(RankError):
            self._native.fail()


def check_ranks(model: nn.Module, optimizer: Any, options: Options, ranks: Ranks) -> None:
    """Compare model, optimizer and options with those of the other ranks; to be called on all of them.

    Raises:
        RankError: Versions, parameters, optimizer or options differ, or the first values of a parameter or a state, to
            the bit.
    """
    arrays = dict(_arrays(model, optimizer))
    parts = _parts(model, optimizer, options, arrays)
    theirs = ranks.gather([zlib.crc32(part.text.encode()) for part in parts], "comparison")
    for index, part in enumerate(parts):
        if others := _others(theirs, index):
            raise _error(others, f"{part.name} differ from rank 0's; here they are {part.text}. {part.remedy}")
    values = ranks.gather([_checksum(array) for array in arrays.values()], "comparison")
    for index, name in enumerate(arrays):
        if others := _others(values, index):
            raise _error(
                others,
                f"the values of {name} differ from rank 0's. Make the model from one seed on all ranks "
                "(mx.random.seed), or load the same weights, and the same state into the optimizer",
            )


def mean_gradients(
    compute: Callable[[], tuple[Any, dict[str, Any]]], weighted: bool, ranks: Ranks
) -> tuple[Any, dict[str, Any]]:
    """Compute loss and gradients, averaged over the ranks, by weight if `weighted`; to be called on all of them.

    Raises:
        RankError: Another rank has failed.
    """
    try:
        value, gradients = compute()
        loss = value[0] if isinstance(value, tuple) else value
        weight = mx.array(value[1] if weighted else 1.0, mx.float32)
        mine: Any = mx.stack([weight, loss.astype(mx.float32) * weight]).tolist()
        mx.eval(gradients)
    except BaseException:
        ranks.fail()
        raise
    total, losses = (sum(each) for each in zip(*ranks.gather(mine, "gradients"), strict=True))
    mean = mx.array(losses / total if total else float("nan"), loss.dtype)
    share = mine[0] * ranks.size / total if total else float("nan")
    gradients = nn.average_gradients(tree_map(lambda each: each * share, gradients), ranks.group)
    mx.eval(gradients)  # all ranks in one order, whatever is read of them first
    return ((mean, *value[1:]) if isinstance(value, tuple) else mean), gradients


def end_hung_rank() -> NoReturn:
    """End this process, whose wait for other ranks nothing else ends."""
    print(
        f"faststep: ending this rank, exit code {HUNG}: MLX waits for the others for ever", file=sys.stderr, flush=True
    )
    os._exit(HUNG)


def _parts(model: nn.Module, optimizer: Any, options: Options, arrays: dict[str, mx.array]) -> list[_Part]:
    shapes = [f"{name} {_dtype(array)} {list(array.shape)}" for name, array in arrays.items()]
    optimizer = optimizer.own if isinstance(optimizer, OwnOptimizer) else optimizer
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
    chosen = {name: value for name, value in options.plain().items() if name not in _FREE}
    kind = type(optimizer)
    return [
        _Part(
            "the versions",
            f"mlx {version('mlx')}, mlx-faststep {version('mlx-faststep')}",
            "Install the same on all machines",
        ),
        _Part("the options", repr(chosen), "Give all ranks the same"),
        _Part("the optimizers", f"{kind.__module__}.{kind.__qualname__} {numbers}", "Make it alike on all ranks"),
        _Part(
            "parameters and state",
            f"{len(shapes)} arrays with the checksum {zlib.crc32(repr(shapes).encode()):08x}",
            "Names, shapes, dtypes, and which parameters are frozen, are to be the same on all ranks, and so is "
            "whether the optimizer has a state",
        ),
    ]


def _arrays(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, mx.array]]:
    parameters: Any = tree_flatten(model.trainable_parameters())
    state: Any = tree_flatten(optimizer.attributes if isinstance(optimizer, OwnOptimizer) else optimizer.state)
    yield from parameters
    yield from ((f"optimizer.state.{name}", value) for name, value in state if isinstance(value, mx.array))


def _dtype(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _checksum(array: mx.array) -> int:
    """Return a number that other bits, or the same in another order, hardly have."""
    bits = mx.contiguous(array).reshape(-1).view(_BITS[array.dtype.size]).astype(mx.uint32)
    odd = 2 * mx.arange(bits.size, dtype=mx.uint32) + 1
    total: Any = (bits * odd).sum().item()
    return int(total)


def _gathered(numbers: list[int], group: Group) -> list[list[int]]:
    """Return a row of numbers for each rank."""
    mine = mx.array(numbers, mx.uint32)
    try:
        rows: Any = mx.distributed.all_gather(mine, group=group).reshape(group.size(), -1).tolist()
    except RuntimeError as error:
        raise _error([], f"the other ranks are lost: {error}") from None
    found: list[list[int]] = rows
    return found


def _others(rows: list[list[int]], index: int) -> list[int]:
    """Return the ranks that have another value than rank 0."""
    return [rank for rank, row in enumerate(rows) if row[index] != rows[0][index]]


def _error(ranks: list[int], what: str) -> RankError:
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: " if ranks else ""
    error = RankError(f"{names}{what}")
    error.ranks = ranks
    return error
