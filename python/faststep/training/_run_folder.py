"""The folder of a run: its lock; and the counts of a model's parameters, for the log."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the folder of a run, so that no other process trains in it.

    Raises:
        RuntimeError: Another process does.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "unknown"
            raise RuntimeError(f"{run}: expected no other training in this folder, process {other} is at it") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def counts(model: nn.Module) -> dict[str, Any]:
    """Return the numbers of trainable and frozen parameters, in all and by module of the model's top level.

    Quantized weights count as the weights that are packed in them; their scales and biases do not count. Lists of
    modules count by their parts together.
    """
    modules: dict[str, dict[str, Any]] = {}
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    trainable: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    packed = _packed(model)
    for name, array in parameters.items():
        top = name.split(".")[0]
        entry = modules.setdefault(top, {"name": top, "trainable": 0, "frozen": 0})
        entry["trainable" if name in trainable else "frozen"] += packed.get(name, array.size)
    totals = {kind: sum(entry[kind] for entry in modules.values()) for kind in ("trainable", "frozen")}
    return {"modules": list(modules.values()), **totals}


def _packed(model: nn.Module) -> dict[str, int]:
    """Return how many weights are in the arrays of quantized modules, by path."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(bits := getattr(module, "bits", None), int) and "scales" in module:
            size = module.weight.size * module.weight.dtype.size * 8 // bits
            sizes = {"weight": size, "scales": 0, "biases": 0}
            found |= {f"{path}.{name}" if path else name: each for name, each in sizes.items()}
    return found
