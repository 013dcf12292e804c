"""One checkpoint on the disk: its description, verification, export and restore."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from faststep._step import Step
from faststep.checkpoints import _tensors
from faststep.checkpoints._apply import restore
from faststep.checkpoints._errors import CheckpointError, Damaged
from faststep.checkpoints._export import export, weights
from faststep.checkpoints._folder import MODEL, OPTIMIZER, STEP, number_of
from faststep.checkpoints._manifest import opened, read_manifest, read_training
from faststep.checkpoints._snapshot import Stateful


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk.

    Attributes:
        path: Its folder.
        number: The number that it was saved with.
        metric: The metric that it was saved with, None where there was none.
        time: When it was saved, seconds since 1970.
        bytes: The bytes of its files.
        numbers: What was given to `Checkpoints.save` as `numbers`.
        problem: What is wrong with the manifest, the sizes of the files or `training.json`; None: nothing. `verify`
            reads everything.
    """

    path: Path
    number: int
    metric: float | None = None
    time: float = 0.0
    bytes: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Describe the checkpoint in a folder.

        Args:
            path: Such a folder: `checkpoints/step-00000200`.

        Raises:
            CheckpointError: It has another name, or does not exist.
        """
        path = Path(path)
        number = number_of(path)
        if number is None or not path.is_dir():
            raise CheckpointError(f"{path}: expected the folder of a checkpoint, as step-00000200")
        try:
            manifest = read_manifest(path)
            numbers = read_training(path, manifest)["numbers"]
        except Damaged as error:
            return cls(path, number, problem=str(error))
        return cls.of(path, manifest, numbers)

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any], numbers: dict[str, Any]) -> Checkpoint:
        """Describe a checkpoint by what has been read of it."""
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        return cls(path, manifest["number"], manifest["metric"], manifest["time"], size, numbers)

    def verify(self) -> None:
        """Read everything and compare it with the manifest.

        Raises:
            CheckpointError: Something is not what was written; it says which file, what was expected and what found.
        """
        manifest = read_manifest(self.path)
        for name in (MODEL, OPTIMIZER, STEP):
            with opened(self.path, name, manifest) as file:
                _tensors.read_header(file, manifest["files"][name]["bytes"])
        read_training(self.path, manifest)

    def export(self, file: str | os.PathLike[str], *, average: bool = False) -> Path:
        """Write the weights into a file of their own, which `model.load_weights` takes.

        Args:
            file: The file, which ends in ".safetensors" and does not exist yet.
            average: The moving average in place of the parameters, in their dtypes, as `Step.average` shows it.

        Returns:
            The file.

        Raises:
            CheckpointError: The checkpoint is damaged or has no average, or the file cannot be written.
        """
        return export(self.path, Path(file), average)

    def weights(self, *, average: bool = False) -> dict[str, mx.array]:
        """Return the weights by name, as `model.load_weights` takes them (a list of the items).

        Args:
            average: The moving average in place of the parameters, in their dtypes.

        Raises:
            CheckpointError: The checkpoint is damaged, or has no average.
        """
        return weights(self.path, average)

    def restore(self, step: Step, loader: Stateful | None = None) -> Checkpoint:
        """Put this checkpoint into a step and a loader; call it in the thread that will train.

        Args:
            step: A step made as the one that was saved.
            loader: A loader made as the one that was saved; None: it is left alone.

        Returns:
            The checkpoint, as it was read.

        Raises:
            CheckpointError: It is damaged, or of another model, optimizer or loader. Nothing has changed.
        """
        manifest, numbers = restore(self.path, step, loader)
        return Checkpoint.of(self.path, manifest, numbers)

    def digest(self) -> dict[str, Any]:
        """Return all that is equal in two checkpoints of equal trainings.

        Returns:
            The SHA-256 of each file of arrays by its name; "random": the states of `random` and `numpy.random`;
            "loader": the place in the data; "numbers": those given to `Checkpoints.save`.

        Raises:
            CheckpointError: It is damaged.
        """
        manifest = read_manifest(self.path)
        training = read_training(self.path, manifest)
        files = {name: manifest["files"][name]["sha256"] for name in (MODEL, OPTIMIZER, STEP)}
        return files | {name: training.get(name) for name in ("random", "loader", "numbers")}
