"""The folder of a run: its lock, and what it has to be; and the counts of a model's parameters, for the log."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from faststep import _files
from faststep.training._errors import RunError

LOG = "log.jsonl"
_RECORD = b'{"kind": '  # as every line of a log begins


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the folder of a run, so that no other process trains in it.

    Raises:
        RunError: Another process does, or nothing can be written there.
    """
    with contextlib.ExitStack() as stack:
        try:
            run.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_files.locked(run / ".lock"))
        except _files.InUse as error:
            other = f"process {error.holder} trains in it"
            raise RunError(f"{run}: expected no other training in this folder, {other}") from None
        except (FileExistsError, NotADirectoryError):
            raise RunError(f"{run}: expected a folder for the run, got a file, or one in a file") from None
        except OSError as error:
            raise RunError(f"{run}: expected a folder that can be written to: {error.strerror}") from None
        yield


def check(run: Path, model: nn.Module, optimizer: Any) -> None:
    """Refuse a folder in which a training would fail later, at its log or at its first checkpoint.

    Raises:
        RunError: `log.jsonl` is not the log of a run, or the disk has no room for a checkpoint.
    """
    log = run / LOG
    if log.exists():
        with log.open("rb") as file:
            first = file.read(len(_RECORD))
        if not _RECORD.startswith(first):
            raise RunError(f"{log}: expected the log of a run or nothing, found something else: choose another run")
    arrays: Any = [*tree_flatten(model.parameters()), *tree_flatten(optimizer.state)]
    needed = sum(array.nbytes for _, array in arrays if isinstance(array, mx.array))
    free = shutil.disk_usage(run).free
    if free < needed:
        raise RunError(
            f"{run}: expected room for a checkpoint, which takes {needed / 1e6:.1f} MB or more, found "
            f"{free / 1e6:.1f} MB on the disk"
        )


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
