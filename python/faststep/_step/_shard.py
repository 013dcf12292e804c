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
_JOINED = 32 << 20  # bytes of one exchange, as in `nn.average_gradients`


class ShardedOptimizer:
    """The part of an optimizer's work that this rank does: whole parameters, so that the update is the same.

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
        self._rank = 0
        self.is_whole = False

    def share_out(self, model: nn.Module, ranks: Ranks, options: Options) -> None:
        """Share the trainable parameters out, and drop the state of those of other ranks.

        Raises:
            ValueError: Masters would be kept, or a parameter has no name of its own.
        """
        arrays = _named(model.trainable_parameters())
        if listed := [name for name in arrays if name.rpartition(".")[2].isdigit()]:
            raise ValueError(f"shard_optimizer: expected parameters in attributes, got {listed[0]} in a list of arrays")
        if options.compute_dtype is not None and any(each.dtype in _HALF for each in arrays.values()):
            raise ValueError("shard_optimizer: expected float32 parameters with compute_dtype, got half precision")
        loads = [0] * ranks.size
        self._owners, self._rank = {}, ranks.rank
        for name in sorted(arrays, key=lambda name: (-arrays[name].nbytes, name)):
            rank = loads.index(min(loads))
            self._owners[name], loads[rank] = rank, loads[rank] + arrays[name].nbytes
        if any(name in self._owners for name in _owners_of(self.optimizer.state)):
            self.optimizer.state = self._part(self.optimizer.state)

    def update(self, model: nn.Module, gradients: dict[str, Any]) -> None:
        """Update this rank's part of the parameters.

        Raises:
            ValueError: A parameter has been unfrozen since they were shared out.
        """
        for name in _named(gradients):
            if name not in self._owners:
                raise ValueError(f"shard_optimizer: {name} was frozen at the first step: make a new Step")
        self.optimizer.update(model, self._part(gradients))

    def gather(self, model: nn.Module, ranks: Ranks) -> None:
        """Give the model the parameters that other ranks have updated.

        Raises:
            RankError: Another rank has failed, or is gone.
        """
        arrays = _named(model.trainable_parameters())
        found = ranks.together("parameters", lambda: self._exchanged(arrays, ranks))
        model.update(tree_map_with_path(lambda name, _: found[name], model.trainable_parameters()))

    def _exchanged(self, arrays: dict[str, mx.array], ranks: Ranks) -> dict[str, mx.array]:
        """Return the sums over the ranks, of which each has its own part and zeros."""
        lists: list[list[str]] = []
        for name, array in arrays.items():
            size = sum(arrays[each].nbytes for each in lists[-1]) if lists else _JOINED
            if size >= _JOINED or arrays[lists[-1][0]].dtype != array.dtype:
                lists.append([])
            lists[-1].append(name)
        found: dict[str, mx.array] = {}
        for names in lists:
            own = [arrays[name] if self._owners[name] == ranks.rank else mx.zeros_like(arrays[name]) for name in names]
            whole, at = ranks.sum(mx.concatenate([each.reshape(-1) for each in own])), 0
            for name in names:
                found[name] = whole[at : at + arrays[name].size].reshape(arrays[name].shape)
                at += arrays[name].size
        mx.eval(found)
        return found

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

    def _part(self, tree: Any, path: str = "") -> Any:
        """Return a tree of parameters, or of their states, without those of other ranks."""
        if isinstance(tree, dict) and path not in self._owners:
            paths = {key: f"{path}.{key}" if path else key for key in tree}
            mine = [key for key in tree if self._owners.get(paths[key], self._rank) == self._rank]
            return {key: self._part(tree[key], paths[key]) for key in mine}
        if isinstance(tree, list):
            return [self._part(each, f"{path}.{index}") for index, each in enumerate(tree)]
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
