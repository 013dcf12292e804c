"""The replicas of a model on the ranks of a group: compared, or made equal, at the first call and at intervals."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from faststep._step._options import Options
from faststep._step._ranks import Ranks, rank_error
from faststep._step._state import Kept
from faststep._step._user_optimizer import OwnOptimizer

_FREE = {"compile", "replay", "in_flight", "max_traces", "clear_cache_every"}  # each rank may have its own
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}
_OPEN = ("window.", "weight", "losses")  # of a window, which each rank has its own of
_PLAIN = (bool, int, float, str, type(None))
_MAKE_ALIKE = (
    "Make the model from one seed on all ranks (mx.random.seed), or load the same weights, and the same state into the "
    'optimizer; sync="broadcast" takes those of rank 0'
)
_LEAVE_OUT = (
    "group: expected replicas, got modules of nn.fully_shard, which have a part of the model on each rank: leave the "
    "group of these ranks out of the step, since MLX averages their gradients itself"
)
_HAVE_DRIFTED = (
    "The replicas have drifted apart: something other than the step has changed them on these ranks. Start all ranks "
    "again from a checkpoint that is older"
)


class _Part(NamedTuple):
    """A part of the training that is to be the same on all ranks, as text."""

    name: str
    text: str
    remedy: str


class Replicas:
    """Parts of a training that the ranks have alike: model, optimizer, options and state of the step.

    Args:
        kept: What the native step keeps.
        is_sharded: Whether each rank has a part of the optimizer's state.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, options: Options, kept: Kept | None, is_sharded: bool = False
    ) -> None:
        self._is_sharded = is_sharded
        self._model, self._optimizer, self._options = model, optimizer, options
        arrays = {} if kept is None else kept[0]
        self._kept = {name: array for name, array in arrays.items() if not name.startswith(_OPEN)}

    def check(self, ranks: Ranks) -> None:
        """Compare them, to the bit; to be called on all ranks.

        Raises:
            RankError: Versions, options or optimizers differ; or a parameter, or a state, in its name, shape, dtype or
                values.
        """
        self._check_parts(ranks)
        self._check_values(ranks, _HAVE_DRIFTED)

    def begin(self, ranks: Ranks) -> None:
        """Compare them before the first update, or take rank 0's values where `sync` says so.

        Frozen parameters that differ are told in a warning: they cannot be told from buffers, which may differ.

        Raises:
            RankError: As `check` does; with `sync="broadcast"` not for values of model and optimizer.
            ValueError: Modules of `nn.fully_shard`, which are no replicas.
        """
        self._check_parts(ranks)
        if any(isinstance(module, nn.FullyShardedModule) for module in self._model.modules()):
            raise ValueError(_LEAVE_OUT)
        if self._options.sync == "broadcast":
            self._broadcast(ranks)
        self._check_values(ranks, _MAKE_ALIKE)
        others = {name: _described(array) for name, array in self._others().items()}
        for rank, theirs in enumerate(ranks.gather(others, "comparison")):
            differ = [name for name in others if theirs.get(name) not in (None, others[name])]
            if differ:
                warnings.warn(
                    f"faststep: {differ[0]} and {len(differ) - 1} more arrays that are not trained differ from rank "
                    f"{rank}'s: buffers may, frozen weights should not. {_MAKE_ALIKE}",
                    RuntimeWarning,
                    stacklevel=5,
                )
                return

    def _check_parts(self, ranks: Ranks) -> None:
        parts = self._parts()
        theirs = ranks.gather([zlib.crc32(part.text.encode()) for part in parts], "comparison")
        for index, part in enumerate(parts):
            if others := _unlike_first(theirs, index):
                raise rank_error(others, f"{part.name} differ from rank 0's; here they are {part.text}. {part.remedy}")

    def _check_values(self, ranks: Ranks, remedy: str) -> None:
        arrays = dict(self._arrays())
        sums: Any = mx.stack([_checksum(array) for array in arrays.values()]).tolist()
        theirs = ranks.gather(sums, "comparison")
        for index, name in enumerate(arrays):
            if others := _unlike_first(theirs, index):
                raise rank_error(others, f"the values of {name} differ from rank 0's. {remedy}")

    def _broadcast(self, ranks: Ranks) -> None:
        names = sorted(self._others())
        theirs = ranks.gather(names, "comparison")
        if others := [rank for rank, each in enumerate(theirs) if each != theirs[0]]:
            raise rank_error(others, "the model has other arrays than rank 0's, though it trains the same parameters")
        self._model.update(_from_first(self._model.parameters(), ranks))
        optimizer = self._optimizer
        if isinstance(optimizer, OwnOptimizer):
            arrays = {name: each for name, each in optimizer.attributes.items() if _has_array(each)}
            optimizer.attributes.update(_from_first(arrays, ranks))
        else:
            optimizer.state = _from_first(optimizer.state, ranks)

    def _parts(self) -> list[_Part]:
        shapes = [f"{name} {_dtype(array)} {list(array.shape)}" for name, array in self._arrays()]
        optimizer = self._optimizer.own if isinstance(self._optimizer, OwnOptimizer) else self._optimizer
        numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
        chosen = {name: value for name, value in self._options.plain().items() if name not in _FREE}
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
                "whether the optimizer, and the step, have a state",
            ),
        ]

    def _arrays(self) -> Iterator[tuple[str, mx.array]]:
        optimizer = self._optimizer
        parameters: Any = tree_flatten(self._model.trainable_parameters())
        state: Any = tree_flatten(optimizer.attributes if isinstance(optimizer, OwnOptimizer) else optimizer.state)
        yield from parameters
        for name, value in state:
            if isinstance(value, mx.array) and not (self._is_sharded and "." in name):  # each rank has a part
                yield f"optimizer.state.{name}", value
        yield from sorted(self._kept.items())

    def _others(self) -> dict[str, mx.array]:
        """Return the arrays of the model that are not trained, by name."""
        everything: Any = dict(tree_flatten(self._model.parameters()))
        trained: Any = dict(tree_flatten(self._model.trainable_parameters()))
        return {name: array for name, array in everything.items() if name not in trained}


def _from_first(tree: Any, ranks: Ranks) -> Any:
    """Return the arrays of a tree as rank 0 has them, one after another in the order of their names."""
    arrays = {name: each for name, each in _flat(tree) if isinstance(each, mx.array)}
    found = ranks.together("parameters", lambda: {name: ranks.from_rank(arrays[name], 0) for name in sorted(arrays)})
    return tree_map_with_path(lambda name, each: found.get(name, each), tree)


def _flat(tree: Any) -> list[tuple[str, Any]]:
    flat: Any = tree_flatten(tree)
    return flat  # type: ignore[no-any-return]


def _has_array(value: Any) -> bool:
    return any(isinstance(each, mx.array) for _, each in _flat(value))


def _dtype(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _described(array: mx.array) -> str:
    return f"{_dtype(array)} {list(array.shape)} {_checksum(array).item()}"


def _checksum(array: mx.array) -> mx.array:
    """Return a number, uint32, that other bits, or the same in another order, hardly have."""
    bits = mx.contiguous(array).reshape(-1).view(_BITS[array.dtype.size]).astype(mx.uint32)
    odd = 2 * mx.arange(bits.size, dtype=mx.uint32) + 1
    return (bits * odd).sum()


def _unlike_first(rows: list[list[int]], index: int) -> list[int]:
    """Return the ranks that have another value than rank 0."""
    return [rank for rank, row in enumerate(rows) if row[index] != rows[0][index]]
