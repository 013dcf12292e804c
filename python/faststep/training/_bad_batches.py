"""Bundles: a batch with a bad loss or gradient, and all that is needed to run it again."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from faststep._random import mlx_seed, seed_of
from faststep._records import number as value_of
from faststep._step import Step, call_with
from faststep.checkpoints import Checkpoints
from faststep.training._guard import Tried

_ARRAYS, _TREE, _CHECKPOINT = "batch.safetensors", "batch.json", "checkpoint"


@dataclass(frozen=True)
class Reproduction:
    """Loss and gradients of a bundle's batch, computed again.

    Attributes:
        loss: The loss.
        gradients: For every trainable parameter by its path: the 2-norm of its gradient, and how many of the gradient's
            elements are not finite, and how many there are.
    """

    loss: float
    gradients: dict[str, tuple[float, int, int]]

    @property
    def finite(self) -> bool:
        """True if the loss and all gradients are finite."""
        return math.isfinite(self.loss) and not any(bad for _, bad, _ in self.gradients.values())


def write(folder: Path, step: Step, tried: Tried, number: int, config: dict[str, Any] | None) -> Path:
    """Write a bundle: the batch, and a checkpoint of the step with the random state that the batch met.

    Returns:
        Its folder.
    """
    name = f"step-{number:08d}-batch-{tried.epoch}-{tried.position}"
    taken = itertools.count(2)  # the same batch may have been as bad before a resume
    place = folder / name
    while place.exists():
        place = folder / f"{name}-{next(taken)}"
    path = place.with_name(f".{place.name}.{os.getpid()}.partial")
    path.mkdir(parents=True)
    arrays: dict[str, mx.array] = {}
    tree = _encode(tried.batch, "batch", arrays)
    mx.save_safetensors(str(path / _ARRAYS), arrays)
    (path / _TREE).write_text(json.dumps({"batch": tree, "config": config}, indent=1), encoding="utf-8")
    now = mlx_seed()
    checkpoints = Checkpoints(path / _CHECKPOINT, background=False)
    mx.random.seed(seed_of(tried.key))
    try:
        checkpoints.save(step, None, number=number, numbers={"epoch": tried.epoch, "position": tried.position})
    finally:
        mx.random.seed(now)
        checkpoints.close()
    path.rename(place)
    return place


def config_of(path: Path) -> dict[str, Any] | None:
    """Return the configuration of the run from which a bundle is.

    Raises:
        ValueError: The folder is no bundle.
    """
    return _read(path)["config"]  # type: ignore[no-any-return]


def reproduce(path: str | Path, step: Step) -> Reproduction:
    """Compute loss and gradients of a bundle's batch again, with the weights and the random state that it met.

    Args:
        path: The bundle.
        step: A step like that of the run; its model, optimizer and state are replaced by the bundle's.

    Raises:
        ValueError: The folder is no bundle, or not one of such a model.
    """
    path = Path(path)
    batch = _decode(_read(path)["batch"], mx.load(str(path / _ARRAYS)))
    checkpoints = Checkpoints(path / _CHECKPOINT, background=False)
    if checkpoints.restore(step, None) is None:
        raise ValueError(f"{path}: expected a bundle, found no valid checkpoint in it")
    checkpoints.close()
    value, gradients = call_with(batch, step.gradients)
    named: dict[str, mx.array] = dict(tree_flatten(gradients))
    table = {name: _look(array.astype(mx.float32)) for name, array in named.items()}
    return Reproduction(value_of(value[0] if isinstance(value, tuple) else value), table)


def _look(gradient: mx.array) -> tuple[float, int, int]:
    bad = value_of((~mx.isfinite(gradient)).sum())
    return value_of(mx.linalg.norm(gradient.reshape(-1))), int(bad), gradient.size


def _read(path: Path) -> dict[str, Any]:
    file = path / _TREE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: expected the description of a bundle's batch: {error}") from error
    if not isinstance(found, dict) or found.keys() != {"batch", "config"}:
        raise ValueError(f"{file}: expected the description of a bundle's batch, got something else")
    return found


def _encode(value: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    if isinstance(value, mx.array):
        arrays[name] = value
        return {"array": name}
    if isinstance(value, dict):
        return {"dict": {key: _encode(part, f"{name}.{key}", arrays) for key, part in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(part, f"{name}.{index}", arrays) for index, part in enumerate(value)]}
    return {"value": value}


def _decode(tree: Any, arrays: Any) -> Any:
    ((kind, value),) = tree.items()
    if kind == "array":
        return arrays[value]
    if kind == "dict":
        return {key: _decode(part, arrays) for key, part in value.items()}
    if kind in ("list", "tuple"):
        parts = [_decode(part, arrays) for part in value]
        return parts if kind == "list" else tuple(parts)
    return value
