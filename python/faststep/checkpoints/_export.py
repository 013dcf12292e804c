"""The weights of a checkpoint as a file of their own."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx

from faststep.checkpoints import _tensors
from faststep.checkpoints._errors import CheckpointError
from faststep.checkpoints._folder import MODEL, STEP, sync
from faststep.checkpoints._manifest import read_manifest, read_tensors
from faststep.checkpoints._snapshot import Arrays

_AVERAGE = "ema."


def export(path: Path, file: Path, average: bool) -> Path:
    """Write the weights of the checkpoint in this folder into a file: see `Checkpoint.export`."""
    if file.suffix != ".safetensors":
        raise CheckpointError(f"{file}: expected a name that ends in .safetensors, which model.load_weights needs")
    if os.path.lexists(file):
        raise CheckpointError(f"{file}: expected a new file, got one that exists: nothing is written over it")
    manifest = read_manifest(path)
    arrays = read_tensors(path, MODEL, manifest)[0]
    if average:
        arrays |= _averages(path, arrays, read_tensors(path, STEP, manifest)[0])
    try:
        _write(file, arrays)
    except OSError as error:
        raise CheckpointError(f"{file}: not written: {error.strerror}") from error
    return file


def _averages(path: Path, arrays: Arrays, kept: Arrays) -> Arrays:
    found = {name.removeprefix(_AVERAGE): array for name, array in kept.items() if name.startswith(_AVERAGE)}
    if not found:
        raise CheckpointError(
            f"{path}: expected a moving average, found none: the step had no `ema_decay`, or took no step"
        )
    if unknown := sorted(found.keys() - arrays.keys()):
        raise CheckpointError(f"{path}: expected averages of the model's parameters, found {unknown[:10]} beside them")
    return {name: array.astype(arrays[name].dtype) for name, array in found.items()}


def _write(file: Path, arrays: Arrays) -> None:
    mx.eval(arrays)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as out:
            _tensors.write(out.write, arrays, {"format": "mlx"})
            out.flush()
            os.fsync(out.fileno())
        partial.rename(file)
        sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)
