"""An optimizer of which each rank of a group updates a part of the parameters, and keeps the state of that part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_flatten, tree_map_with_path

from faststep._step._options import Options
from faststep._step._ranks import Ranks

_HALF = (mx.float16, mx.bfloat16)


class ShardedOptimizer:
    """The part of an optimizer's state that this rank has: that of whole parameters, so that the update is the same.

    Attributes:
        optimizer: The user's own, with the state of this part.
        is_whole: Whether it shows the state of all parts.
    """

    def __init__(self, optimizer: Any, options: Options) -> None:
        """Check that it can be.

        Raises:
            ValueError: The optimizer has parts itself or is none of MLX's, or an option does not go with it.
        """
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, MultiOptimizer):
            raise ValueError(
                f"shard_optimizer: expected one optimizer of MLX's class Optimizer, got {type(optimizer).__name__}"
            )
        if options.ema_decay is not None or options.sync != "check":
            raise ValueError('shard_optimizer: expected neither ema_decay nor sync="broadcast" with it')
        self.optimizer = optimizer
        self._owners: dict[str, int] = {}
        self.is_whole = False

    def share_out(self, model: nn.Module, ranks: Ranks, options: Options) -> dict[str, int]:
        """Share the trainable parameters out, and drop the state of those of other ranks.

        Returns:
            The rank that updates each parameter, by name.

        Raises:
            ValueError: Masters would be kept.
        """
        arrays = _named(model.trainable_parameters())
        if options.compute_dtype is not None and any(each.dtype in _HALF for each in arrays.values()):
            raise ValueError("shard_optimizer: expected float32 parameters with compute_dtype, got half precision")
        loads = [0] * ranks.size
        owners: dict[int, int] = {}  # by array: one of several names is updated once
        for name in sorted(arrays, key=lambda name: (-arrays[name].nbytes, name)):
            if id(arrays[name]) not in owners:
                rank = loads.index(min(loads))
                owners[id(arrays[name])], loads[rank] = rank, loads[rank] + arrays[name].nbytes
        self._owners = {name: owners[id(array)] for name, array in arrays.items()}
        if any(self._owners.get(name, ranks.rank) != ranks.rank for name in _owners_of(self.optimizer.state)):
            self.optimizer.state = self._part(self.optimizer.state, ranks.rank)
        return self._owners

    @contextlib.contextmanager
    def whole(self, model: nn.Module, ranks: Ranks) -> Iterator[None]:
        """Show the state of all parts in the optimizer, on rank 0."""
        part: Any = self.optimizer.state
        kept = _owners_of(part)
        mine = {name: {key: kept[name][key] for key in kept[name]} for name in self._owners if name in kept}
        plain = {
            name: {key: [list(each.shape), str(each.dtype)] for key, each in arrays.items()}
            for name, arrays in mine.items()
        }
        plans = ranks.gather(plain, "checkpoint")
        states: dict[str, dict[str, mx.array]] = {}

        def exchange() -> None:
            for rank, name, key, (shape, dtype) in _listed(plans):
                empty = mx.zeros(shape, getattr(mx, dtype.removeprefix("mlx.core.")))
                array = ranks.from_rank(mine[name][key] if rank == ranks.rank else empty, rank)
                if ranks.rank == 0:
                    states.setdefault(name, {})[key] = array

        ranks.together("checkpoint", exchange)
        numbers = {name: each for name, each in part.items() if isinstance(each, mx.array)}
        tree = tree_map_with_path(lambda name, _: states.get(name, {}), model.trainable_parameters())
        if states:
            self.optimizer._state = numbers | tree  # not by its property, after which it would be initialised again
        self.is_whole = True
        try:
            yield
        finally:
            self.optimizer._state, self.is_whole = part, False

    def _part(self, tree: Any, rank: int, path: str = "") -> Any:
        """Return the states of parameters with empty ones in the place of those of other ranks."""
        if self._owners.get(path, rank) != rank:
            return {}
        if isinstance(tree, dict):
            return {key: self._part(tree[key], rank, f"{path}.{key}" if path else key) for key in tree}
        if isinstance(tree, list):
            return [self._part(each, rank, f"{path}.{index}") for index, each in enumerate(tree)]
        return tree


def _listed(plans: list[dict[str, dict[str, Any]]]) -> Iterator[tuple[int, str, str, Any]]:
    """Yield rank, parameter, name, and shape with dtype, of each array of all states."""
    for rank, plan in enumerate(plans):
        for name, keys in plan.items():
            for key, about in keys.items():
                yield rank, name, key, about


def _named(tree: Any) -> dict[str, mx.array]:
    flat: Any = tree_flatten(tree)
    return dict(flat)


def _owners_of(state: Any) -> dict[str, dict[str, mx.array]]:
    """Return the arrays of an optimizer's state by parameter, then by name."""
    found: dict[str, dict[str, mx.array]] = {}
    for name, array in _named(state).items():
        parameter, _, key = name.rpartition(".")
        found.setdefault(parameter, {})[key] = array
    return found
