"""Writing a snapshot: beside its place, to the disk, put there by one rename; then old ones are removed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from faststep._files import sync
from faststep.checkpoints import _folder, _tensors
from faststep.checkpoints._errors import CheckpointError, CheckpointWarning
from faststep.checkpoints._manifest import VERSION, manifest_text, read_manifest
from faststep.checkpoints._snapshot import Snapshot

Fill = Callable[[_tensors.Write], None]


@dataclass(frozen=True)
class Keep:
    """Rules by which checkpoints are kept.

    Attributes:
        last: How many of the newest; None: all.
        best: How many of the best by their metric.
        order: Whether a small metric is good, or a large one.
    """

    last: int | None
    best: int
    order: Literal["min", "max"]

    def best_of(self, metrics: Mapping[Path, float], count: int) -> list[Path]:
        """Return the best so many of them, the best first; of equal ones that which is named first."""
        return sorted(metrics, key=lambda path: metrics[path] if self.order == "min" else -metrics[path])[:count]


def write(folder: Path, snapshot: Snapshot, keep: Keep) -> int:
    """Write a snapshot into the folder; return its bytes.

    Raises:
        CheckpointError: It could not be written. What was there before is there still.
    """
    place = _folder.path_of(folder, snapshot.number)
    try:
        _make_folder(folder)
        with _folder.locked(folder, _folder.PATIENCE) as alone:
            if alone:
                _folder.clean(folder)
            size = _write(place, snapshot)
            _retain(folder, place, keep)
    except OSError as error:
        raise CheckpointError(f"{place}: not written, the earlier ones are as they were: {error.strerror}") from error
    finally:
        snapshot.tensors.clear()
    return size


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)


def _write(place: Path, snapshot: Snapshot) -> int:
    partial = _folder.hidden(place, "partial")
    _folder.remove(partial)  # of one that died, where the file system has no locks
    partial.mkdir()
    try:
        size = _fill(partial, snapshot)
        _put(partial, place)
    finally:
        with contextlib.suppress(OSError):
            _folder.remove(partial)
    return size


def _fill(partial: Path, snapshot: Snapshot) -> int:
    files: dict[str, dict[str, Any]] = {}
    for name, (arrays, metadata) in snapshot.tensors.items():
        files[name] = _file(partial / name, lambda write: _tensors.write(write, arrays, metadata))  # noqa: B023
    files[_folder.TRAINING] = _file(partial / _folder.TRAINING, lambda write: write(memoryview(snapshot.training)))
    manifest = {
        "version": VERSION,
        "number": snapshot.number,
        "metric": snapshot.metric,
        "healthy": snapshot.healthy,
        "time": snapshot.time,
        "files": files,
    }
    _file(partial / _folder.MANIFEST, lambda write: write(memoryview(manifest_text(manifest))))
    sync(partial)
    return sum(entry["bytes"] for entry in files.values())


def _file(path: Path, fill: Callable[[_tensors.Write], object]) -> dict[str, Any]:
    """Fill a new file and bring it to the disk; return what the manifest says of it."""
    hashed = hashlib.sha256()
    with path.open("xb", buffering=1 << 20) as file:

        def write(part: memoryview) -> None:
            file.write(part)
            hashed.update(part)

        fill(write)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": hashed.hexdigest()}


def _put(partial: Path, place: Path) -> None:
    """Put a complete checkpoint in its place; one of the same number makes room for it."""
    aside = _folder.hidden(place, "aside")
    if replaced := os.path.lexists(place):
        if not _folder.removable(place):
            raise CheckpointError(f"{place}: not written: expected only a checkpoint there, got something else in it")
        place.rename(aside)
    partial.rename(place)
    sync(place.parent)
    if replaced:
        _folder.remove(aside)


def _retain(folder: Path, new: Path, keep: Keep) -> None:
    """Remove what need not be kept; damaged checkpoints stay for inspection."""
    if keep.last is None:
        return
    try:
        for path in _superfluous(folder, keep):
            if path != new:
                _folder.discard(path)
    except (OSError, CheckpointError) as error:
        warnings.warn(f"{folder}: could not remove old checkpoints: {error}", CheckpointWarning, stacklevel=2)


def _superfluous(folder: Path, keep: Keep) -> list[Path]:
    valid: list[Path] = []
    healthy: list[Path] = []
    metrics: dict[Path, float] = {}
    for _, path in _folder.numbered(folder):
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(path)
            metric = manifest["metric"]
            valid.append(path)
            healthy += [path] if manifest.get("healthy", True) else []
            if metric is not None:
                metrics[path] = metric
    best = keep.best_of(dict(reversed(metrics.items())), keep.best)  # of equal ones the oldest, as the trainer does
    return [path for path in valid[keep.last :] if path not in (*best, *healthy[:1])]
