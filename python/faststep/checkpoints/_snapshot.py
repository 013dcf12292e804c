"""Snapshots: the contents of a checkpoint, taken in the thread of the training, written by another."""

from __future__ import annotations

import json
import math
import time
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from faststep import _random
from faststep._native import versions
from faststep._step import Step, shows_average
from faststep.checkpoints import _tensors
from faststep.checkpoints._errors import CheckpointError, CheckpointWarning
from faststep.checkpoints._folder import MODEL, OPTIMIZER, STEP

Arrays = dict[str, mx.array]


class Stateful(Protocol):
    """An object whose state goes into a checkpoint as plain JSON values: a `faststep.data.Loader`."""

    @property
    def state(self) -> Any:
        """The state."""

    def load_state(self, state: Any) -> None:
        """Go on from there."""


@dataclass
class Snapshot:
    """Contents of a checkpoint that is to be written.

    Attributes:
        number: The number of the checkpoint.
        metric: Its metric, None where there is none or it is not finite.
        healthy: Whether nothing is known against it.
        time: When it was taken, seconds since 1970.
        tensors: Arrays, evaluated and not shared with the model, and metadata, by file.
        training: The text of `training.json`.
    """

    number: int
    metric: float | None
    healthy: bool
    time: float
    tensors: dict[str, tuple[Arrays, dict[str, str]]]
    training: bytes


def split(tree: Any, what: str) -> tuple[Arrays, dict[str, Any]]:
    """Flatten a tree into its arrays and its other values, by the names that MLX gives them.

    Raises:
        CheckpointError: Two of them have the same name.
    """
    leaves: Any = tree_flatten(tree)
    arrays = {name: leaf for name, leaf in leaves if isinstance(leaf, mx.array)}
    values = {name: leaf for name, leaf in leaves if not isinstance(leaf, mx.array)}
    if len(arrays) + len(values) < len(leaves):
        names = [name for name, _ in leaves]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{what}: expected one value for every path, got two that are called {twice!r}")
    return arrays, values


def _attributes(step: Step) -> tuple[dict[str, Any], Arrays]:
    """Return what the optimizer keeps in attributes, as plain JSON and the arrays that it names."""
    attributes, held = dict[str, Any](), Arrays()
    for name, value in step.attributes.items():
        arrays = Arrays()
        try:
            attributes[name] = _encoded(value, f"@{name}", arrays)
        except TypeError as error:
            warnings.warn(
                f"the optimizer's attribute {name} has changed and is not in the checkpoint: expected numbers, texts "
                f"and mx.arrays, in dicts with texts as keys, lists and tuples, got {error}. Keep it in one of these",
                CheckpointWarning,
                stacklevel=4,
            )
        held |= arrays if name in attributes else {}
    return attributes, held


def _encoded(value: Any, name: str, arrays: Arrays) -> Any:
    if isinstance(value, mx.array):
        arrays[name] = value
        return {"array": name}
    if type(value) in (list, tuple):
        parts = [_encoded(each, f"{name}.{number}", arrays) for number, each in enumerate(value)]
        return {type(value).__name__: parts}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encoded(each, f"{name}.{key}", arrays) for key, each in value.items()}}
    if type(value) not in (type(None), bool, int, float, str):
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")
    return value


def decoded(value: Any, arrays: Arrays) -> Any:
    """Return the value of an attribute as a checkpoint has it."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "array":
        return arrays[inner]
    if kind == "dict":
        return {key: decoded(each, arrays) for key, each in inner.items()}
    parts = [decoded(each, arrays) for each in inner]
    return tuple(parts) if kind == "tuple" else parts


def take(
    step: Step, loader: Stateful | None, number: int, numbers: dict[str, Any], metric: float | None, healthy: bool
) -> Snapshot:
    """Take the snapshot; it waits for the steps in flight.

    Raises:
        CheckpointError: Something cannot be written to such files.
    """
    if shows_average(step.model):
        raise CheckpointError("the model shows its average: expected a save after the `with step.average()` block")
    if not step.has_whole_optimizer:
        raise CheckpointError(
            "the model is sharded, or the optimizer's state is shared out (shard_optimizer): expected a save in a "
            "`with step.whole_optimizer()` block, which all ranks enter"
        )
    model, optimizer, own = step.parts
    kept, counts = split(own, "step")
    parameters, others = split(model, "model")
    if others:
        raise CheckpointError(f"model: expected arrays as parameters, got {sorted(others)}")
    state, values = split(optimizer, "optimizer")
    attributes, held = _attributes(step)
    texts = {name: str(count) for name, count in (counts | {"random": _random.mlx_seed()}).items()}
    now = time.time()
    training = {
        "number": number,
        "time": now,
        "numbers": numbers,
        "loader": None if loader is None else loader.state,
        "random": _random.states(),
        "values": values,
        "attributes": attributes,
        "versions": versions(),
    }
    tensors = {
        MODEL: (_own(parameters, "model"), {"format": "mlx"}),
        OPTIMIZER: (_own(state | held, "optimizer"), {"format": "mlx"}),
        STEP: (_own(kept, "step"), texts),
    }
    mx.eval([arrays for arrays, _ in tensors.values()])
    finite = None if metric is None or not math.isfinite(metric) else float(metric)
    return Snapshot(number, finite, healthy, now, tensors, _text(training))


def _own(arrays: Arrays, what: str) -> Arrays:
    """Return arrays of the same values that later steps do not overwrite.

    In the processor's memory an array is never overwritten as long as somebody holds it, so that another one may share
    it. On CUDA, reading an array on the host moves its memory there under the steps that use it, so that it is copied.
    """
    try:
        _tensors.check(arrays)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from None
    if _tensors.moves_when_read():
        return {name: _tensors.copied(array) for name, array in arrays.items()}
    return {name: array.astype(array.dtype) for name, array in arrays.items()}


def _text(training: dict[str, Any]) -> bytes:
    for name in ("numbers", "loader", "values"):
        try:
            json.dumps(training[name])
        except (TypeError, ValueError, RecursionError) as error:
            what = "optimizer" if name == "values" else name
            raise CheckpointError(f"{what}: expected plain JSON values, got others ({error})") from error
    return json.dumps(training).encode()
