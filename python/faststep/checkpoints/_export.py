"""The weights of a checkpoint as a file of their own."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from faststep._files import replacing
from faststep.checkpoints import _tensors
from faststep.checkpoints._errors import CheckpointError
from faststep.checkpoints._folder import MODEL, STEP
from faststep.checkpoints._manifest import read_manifest, read_tensors
from faststep.checkpoints._snapshot import Arrays

_AVERAGE = "ema."


def export(path: Path, file: Path, average: bool) -> Path:
    """Write the weights of the checkpoint in this folder into a file: see `Checkpoint.export`."""
    if file.suffix != ".safetensors":
        raise CheckpointError(f"{file}: expected a name that ends in .safetensors, which model.load_weights needs")
    arrays = weights(path, average)
    mx.eval(arrays)
    try:
        with replacing(file, new=True) as out:
            _tensors.write(out.write, arrays, {"format": "mlx"})
    except FileExistsError:
        raise CheckpointError(f"{file}: expected a new file, got one that exists: nothing is written over it") from None
    except OSError as error:
        raise CheckpointError(f"{file}: not written: {error.strerror}") from error
    return file


def weights(path: Path, average: bool) -> Arrays:
    """Read the weights of the checkpoint in this folder: see `Checkpoint.weights`."""
    manifest = read_manifest(path)
    arrays = read_tensors(path, MODEL, manifest)[0]
    return arrays | _averages(path, arrays, read_tensors(path, STEP, manifest)[0]) if average else arrays


def _averages(path: Path, arrays: Arrays, kept: Arrays) -> Arrays:
    found = {name.removeprefix(_AVERAGE): array for name, array in kept.items() if name.startswith(_AVERAGE)}
    if not found:
        raise CheckpointError(
            f"{path}: expected a moving average, found none: the step had no `ema_decay`, or took no step"
        )
    if unknown := sorted(found.keys() - arrays.keys()):
        raise CheckpointError(f"{path}: expected averages of the model's parameters, found {unknown[:10]} beside them")
    return {name: array.astype(arrays[name].dtype) for name, array in found.items()}
