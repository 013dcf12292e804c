"""A model of which each rank of a group has shards: MLX's `shard_linear` and `fully_shard`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from faststep._native import core
from faststep._step._options import Options
from faststep._step._ranks import Ranks

_TO_SHARDED = (nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear)
_TO_ALL = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)
_REMEDY = {
    "shard_optimizer": "each rank has the optimizer's state of its shards alone already",
    "state_bits": "codes of a shard are no part of the whole one's",
    "weighted": "MLX averages the gradients of nn.fully_shard over the ranks before a weight is known",
}


class Cut(NamedTuple):
    """A cut of an array: of each of its segments, into as many parts as there are ranks.

    Attributes:
        axis: Along which axis.
        segments: Their number, or where each but the first begins: `shard_linear` tells nobody, a layer's attribute of
            that name does.
    """

    axis: int
    segments: int | list[int] | list[float] = 1

    def joined(self, parts: list[mx.array]) -> mx.array:
        """Return the whole of the parts of all ranks."""
        split = [self._split(part, len(parts)) for part in parts]
        return mx.concatenate([part for segment in zip(*split, strict=True) for part in segment], axis=self.axis)

    def part(self, whole: mx.array, rank: int, size: int) -> mx.array:
        """Return a rank's part."""
        parts = [mx.split(segment, size, axis=self.axis)[rank] for segment in self._split(whole, 1)]
        return mx.contiguous(mx.concatenate(parts, axis=self.axis))

    def _split(self, array: mx.array, size: int) -> list[mx.array]:
        at, length = self.segments, array.shape[self.axis]
        if not isinstance(at, int):
            at = [each // size if isinstance(each, int) else int(each * length) for each in at]
        parts: Any = mx.split(array, at, axis=self.axis)  # a list, though typed as an array
        return list(parts)


class ModelShards:
    """The shards of a model that this rank has.

    Attributes:
        cuts: How each array is cut, by name; the others are the same on all ranks.
        group: The ranks that have the others.
        same_batch: Whether all ranks compute the loss of the same batch (tensor parallel), with the same random
            numbers; otherwise each has its own (`fully_shard`).
        whole: Parameters, optimizer state and `Step.state` of all ranks together, while they are shown.
    """

    def __init__(self, cuts: dict[str, Cut], group: mx.distributed.Group, same_batch: bool) -> None:
        self.cuts, self.group, self.same_batch = cuts, group, same_batch
        self.whole: tuple[Any, Any, dict[str, Any]] | None = None

    @classmethod
    def of(cls, model: nn.Module, group: mx.distributed.Group | None) -> ModelShards | None:
        """Find the shards of a model, if it has some.

        Args:
            model: The model.
            group: That of the step.

        Raises:
            ValueError: They are shared by another group, or in two ways.
        """
        cuts: dict[str, Cut] = {}
        linear = False
        named: Any = model.named_modules()
        for path, module in named:
            if isinstance(module, (*_TO_SHARDED, *_TO_ALL)) and module.group.size() > 1:
                group, linear = _same(path, module.group, group), True
            elif not isinstance(module, nn.FullyShardedModule) or group is None:
                continue  # nn.fully_shard does not tell its group
            cuts |= {f"{path}.{name}" if path else name: cut for name, cut in _cuts(module)}
        if not cuts or group is None or group.size() == 1:
            return None
        if linear and any(isinstance(module, nn.FullyShardedModule) for module in model.modules()):
            raise ValueError(
                "group: expected a model with modules of shard_linear or of nn.fully_shard, got one with both: the "
                "first take the same batch on all ranks, the others another one on each"
            )
        return cls(cuts, group, linear)

    def check(self, options: Options, shard_optimizer: bool) -> None:
        """Refuse options that go with replicas alone.

        Raises:
            ValueError: There is one.
        """
        given = {
            "shard_optimizer": shard_optimizer,
            "state_bits": options.state_bits is not None,
            "weighted": options.weighted and not self.same_batch,
        }
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"{name}: expected a step without it where the model is sharded: {_REMEDY[name]}")

    def parameter_of(self, name: str) -> str | None:
        """Return the name of the shard to which an array belongs, by its own: `layers.0.weight.m`, `ema.weight`."""
        parts = name.split(".")
        spans = ((begin, end) for begin in range(len(parts)) for end in range(len(parts), begin, -1))
        return next((each for begin, end in spans if (each := ".".join(parts[begin:end])) in self.cuts), None)

    def replicas(self, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return those of the arrays that all ranks have alike."""
        return {name: array for name, array in arrays.items() if self.parameter_of(name) is None}

    @contextlib.contextmanager
    def shown(self, parts: tuple[Any, ...], ranks: Ranks) -> Iterator[None]:
        """Have trees of all ranks' parts in `whole`, on rank 0; to be entered on all of them."""
        whole: Any = ranks.together("checkpoint", lambda: tuple(self._gathered(tree, ranks) for tree in parts))
        self.whole = whole if ranks.rank == 0 else parts
        try:
            yield
        finally:
            self.whole = None

    def _gathered(self, tree: Any, ranks: Ranks) -> Any:
        leaves: Any = tree_flatten(tree)
        whole = {}
        for name, array in sorted(leaves, key=lambda leaf: leaf[0]):
            parameter = self.parameter_of(name)
            if isinstance(array, mx.array) and array.ndim > 0 and parameter is not None:
                parts = [ranks.from_rank(array, rank) for rank in range(ranks.size)]
                if ranks.rank == 0:
                    whole[name] = self.cuts[parameter].joined(parts)
        return tree_map_with_path(lambda name, leaf: whole.get(name, leaf), tree)

    def part(self, name: str, array: mx.array) -> mx.array:
        """Return this rank's part of a whole array of that name; an array that all have as it is."""
        parameter = self.parameter_of(name)
        if parameter is None or array.ndim == 0:
            return array
        cut, size = self.cuts[parameter], self.group.size()
        if array.shape[cut.axis] % size:
            return array  # not of this model, as its shape will tell
        return cut.part(array, self.group.rank(), size)


def _same(path: str, theirs: mx.distributed.Group, group: mx.distributed.Group | None) -> mx.distributed.Group:
    """Return the group of a module's shards, which is that of the step."""
    if group is None or core.same_group(theirs, group):
        return theirs
    raise ValueError(
        f"group: expected that of the model's shards, got another one than {path or 'the model'} has: a step is over "
        "the ranks that share one model; replicas of a sharded model, with a group of their own, are not supported"
    )


def _cuts(module: Any) -> Iterator[tuple[str, Cut]]:
    if isinstance(module, nn.FullyShardedModule):
        yield from ((f"module.{name}", Cut(0)) for name in module._paths)
        return
    segments = getattr(module, "segments", 1)
    for name, array in module.items():
        if not isinstance(array, mx.array):
            continue
        if isinstance(module, _TO_SHARDED):
            yield name, Cut(array.ndim - 1 if name == "bias" else max(array.ndim - 2, 0), segments)
        elif name != "bias":
            yield name, Cut(array.ndim - 1, segments)
