"""The ranks of a group: what they must have alike before the first update, and gradients averaged over them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from faststep._native import core
from faststep._step._options import Options

Group = mx.distributed.Group
RankError = core.RankError
_FREE = {"compile", "replay", "in_flight", "max_traces", "clear_cache_every"}  # each rank may have its own
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}
_PLAIN = (bool, int, float, str, type(None))


class _Part(NamedTuple):
    """A part of the training that is to be the same on all ranks, as text."""

    name: str
    text: str
    remedy: str


def check_ranks(model: nn.Module, optimizer: Any, options: Options, group: Group) -> None:
    """Compare model, optimizer and options with those of the other ranks; to be called on all of them.

    Raises:
        RankError: Versions, parameters, optimizer or options differ, or the first values of a parameter or a state, to
            the bit.
    """
    arrays = dict(_arrays(model, optimizer))
    parts = _parts(model, optimizer, options, arrays)
    theirs = _gathered([zlib.crc32(part.text.encode()) for part in parts], group)
    for index, part in enumerate(parts):
        if others := _others(theirs, index):
            raise _error(others, f"{part.name} differ from rank 0's; here they are {part.text}. {part.remedy}")
    values = _gathered([_checksum(array) for array in arrays.values()], group)
    for index, name in enumerate(arrays):
        if others := _others(values, index):
            raise _error(
                others,
                f"the values of {name} differ from rank 0's. Make the model from one seed on all ranks "
                "(mx.random.seed), or load the same weights, and the same state into the optimizer",
            )


def mean_gradients(
    compute: Callable[[], tuple[Any, dict[str, Any]]], weighted: bool, group: Group
) -> tuple[Any, dict[str, Any]]:
    """Compute loss and gradients, averaged over the ranks, by weight if `weighted`; to be called on all of them.

    Raises:
        RankError: Another rank has failed.
    """
    try:
        value, gradients = compute()
        loss = value[0] if isinstance(value, tuple) else value
        weight = mx.array(value[1] if weighted else 1.0, mx.float32)
        row = mx.stack([mx.array(0.0), weight, loss.astype(mx.float32) * weight])
        mx.eval(row, gradients)
    except BaseException:
        mx.eval(_sum(mx.array([1.0, 0.0, 0.0]), group))
        raise
    failed, total, losses = _sum(row, group)
    if failed.item():
        raise _error([], "gradients: another rank failed, whose own error says why")
    mean = (losses / total).astype(loss.dtype)
    share = weight * group.size() / total
    gradients = nn.average_gradients(tree_map(lambda each: each * share.astype(each.dtype), gradients), group)
    return ((mean, *value[1:]) if isinstance(value, tuple) else mean), gradients


def _parts(model: nn.Module, optimizer: Any, options: Options, arrays: dict[str, mx.array]) -> list[_Part]:
    shapes = [f"{name} {_dtype(array)} {list(array.shape)}" for name, array in arrays.items()]
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
    chosen = {name: value for name, value in options._asdict().items() if name not in _FREE}
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
    state: Any = tree_flatten(optimizer.state)
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


def _sum(array: mx.array, group: Group) -> mx.array:
    try:
        total = mx.distributed.all_sum(array, group=group)
        mx.eval(total)
    except RuntimeError as error:
        raise _error([], f"the other ranks are lost: {error}") from None
    return total


def _others(rows: list[list[int]], index: int) -> list[int]:
    """Return the ranks that have another value than rank 0."""
    return [rank for rank, row in enumerate(rows) if row[index] != rows[0][index]]


def _error(ranks: list[int], what: str) -> RankError:
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: " if ranks else ""
    error = RankError(f"{names}{what}")
    error.ranks = ranks
    return error
