"""The replicas of a model on the ranks of a group: compared, or made equal, at the first call and at intervals."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from faststep._step._model_shards import ModelShards
from faststep._step._options import Options
from faststep._step._ranks import Ranks, rank_error
from faststep._step._state import Kept
from faststep._step._user_optimizer import OwnOptimizer

_FREE = {"replay", "in_flight", "clear_cache_every"}  # each rank may have its own
_FREE_WITHOUT_SHARDS = {"compile", "max_traces"}  # by which a part is tried out, and exchanges what it does once more
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}
_OPEN = ("window.", "weight", "losses")  # of a window, which each rank has its own of
_PLAIN = (bool, int, float, str, type(None))
_MAKE_ALIKE = (
    "Make the model from one seed on all ranks (mx.random.seed), or load the same weights, and the same state into the "
    'optimizer; sync="broadcast" takes those of rank 0'
)
_SAME_BATCH = (
    "ranks that share a model train on the same batches, with the same random numbers. Give all of them the same data, "
    "a Loader without rank and world_size say, and seed mx.random alike"
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
        shards: The shards of the model, which are no replicas.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        options: Options,
        kept: Kept | None,
        is_sharded: bool = False,
        shards: ModelShards | None = None,
    ) -> None:
        self._is_sharded, self._shards = is_sharded, shards
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
        """
        self._check_parts(ranks)
        if self._options.sync == "broadcast":
            self._broadcast(ranks)
        self._check_values(ranks, _MAKE_ALIKE)
        others = {name: _described(array) for name, array in self._alike(self._others()).items()}
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

    def check_batch(self, ranks: Ranks, batch: Any) -> None:
        """Compare the first batch, and the random state, of ranks that take the same; to be called on all of them.

        Raises:
            RankError: They differ.
        """
        random: Any = mx.random.state
        given = {"batches": [_described_leaf(leaf) for _, leaf in _flat(batch)], "random states": random[0].tolist()}
        for name, mine in given.items():
            theirs = ranks.gather(mine, "comparison")
            if others := [rank for rank, each in enumerate(theirs) if each != theirs[0]]:
                raise rank_error(others, f"the {name} differ from rank 0's, but {_SAME_BATCH}")

    def _alike(self, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        return arrays if self._shards is None else self._shards.replicas(arrays)

    def _check_parts(self, ranks: Ranks) -> None:
        parts = self._parts()
        theirs = ranks.gather([zlib.crc32(part.text.encode()) for part in parts], "comparison")
        for index, part in enumerate(parts):
            if others := _unlike_first(theirs, index):
                raise rank_error(others, f"{part.name} differ from rank 0's; here they are {part.text}. {part.remedy}")

    def _check_values(self, ranks: Ranks, remedy: str) -> None:
        arrays = self._alike(dict(self._arrays()))
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
        self._model.update(self._from_first(self._model.parameters(), ranks))
        optimizer = self._optimizer
        if isinstance(optimizer, OwnOptimizer):
            arrays = {name: each for name, each in optimizer.attributes.items() if _has_array(each)}
            optimizer.attributes.update(self._from_first(arrays, ranks))
        else:
            optimizer.state = self._from_first(optimizer.state, ranks)

    def _from_first(self, tree: Any, ranks: Ranks) -> Any:
        """Return the arrays of a tree as rank 0 has them, one after another in the order of their names."""
        arrays = self._alike({name: each for name, each in _flat(tree) if isinstance(each, mx.array)})
        found = ranks.together(
            "parameters", lambda: {name: ranks.from_rank(arrays[name], 0) for name in sorted(arrays)}
        )
        return tree_map_with_path(lambda name, each: found.get(name, each), tree)

    def _parts(self) -> list[_Part]:
        shapes = [f"{name} {_dtype(array)} {list(array.shape)}" for name, array in self._arrays()]
        optimizer = self._optimizer.own if isinstance(self._optimizer, OwnOptimizer) else self._optimizer
        numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
        free = _FREE | _FREE_WITHOUT_SHARDS if self._shards is None else _FREE
        chosen = {name: value for name, value in self._options.plain().items() if name not in free}
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


def _flat(tree: Any) -> list[tuple[str, Any]]:
    flat: Any = tree_flatten(tree)
    return flat  # type: ignore[no-any-return]


def _has_array(value: Any) -> bool:
    return any(isinstance(each, mx.array) for _, each in _flat(value))


def _dtype(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _described(array: mx.array) -> str:
    return f"{_dtype(array)} {list(array.shape)} {_checksum(array).item()}"


def _described_leaf(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)} {zlib.crc32(np.ascontiguousarray(value).tobytes())}"
    return _described(value) if isinstance(value, mx.array) else ""


def _checksum(array: mx.array) -> mx.array:
    """Return a number, uint32, that other bits, or the same in another order, hardly have."""
    bits = mx.contiguous(array).reshape(-1).view(_BITS[array.dtype.size]).astype(mx.uint32)
    odd = 2 * mx.arange(bits.size, dtype=mx.uint32) + 1
    return (bits * odd).sum()


def _unlike_first(rows: list[list[int]], index: int) -> list[int]:
    """Return the ranks that have another value than rank 0."""
    return [rank for rank, row in enumerate(rows) if row[index] != rows[0][index]]
