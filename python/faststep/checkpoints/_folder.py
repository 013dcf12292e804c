"""The folder of the checkpoints: names, the lock of the one who writes, and what may be removed.

Nothing is ever removed whose name is not one of ours, and no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from faststep import _files
from faststep.checkpoints._errors import CheckpointError

MODEL, OPTIMIZER, STEP = "model.safetensors", "optimizer.safetensors", "step.safetensors"
TRAINING, MANIFEST = "training.json", "manifest.json"
CONTENTS = (MODEL, OPTIMIZER, STEP, TRAINING)
FILES = frozenset((*CONTENTS, MANIFEST))
PATIENCE = 30.0  # seconds that a writer waits for one of another process

_CHECKPOINT = re.compile(r"step-(\d{8,18})", re.ASCII)
# a checkpoint that is being written, that makes room for one of the same number, that is being removed
_HIDDEN = re.compile(r"\.(step-\d{8,18})\.(partial|aside|removed)", re.ASCII)
_LOCK = ".lock"


def path_of(folder: Path, number: int) -> Path:
    """Return where the checkpoint of a number is."""
    return folder / f"step-{number:08d}"


def hidden(path: Path, what: str) -> Path:
    """Return the name beside a checkpoint for its being "partial", "aside" or "removed"."""
    return path.with_name(f".{path.name}.{what}")


def number_of(path: Path) -> int | None:
    """Return the number of a checkpoint's path, None where it is none; `path_of` gives the path back."""
    found = _CHECKPOINT.fullmatch(path.name)
    return int(found[1]) if found and path_of(path.parent, int(found[1])) == path else None


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return numbers and paths of the checkpoints, the newest first; none where there is no folder.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    try:
        found = [(number, path) for path in folder.iterdir() if (number := number_of(path)) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: expected a folder of checkpoints ({error.strerror})") from error
    return sorted(found, reverse=True)


def refuse_foreign(folder: Path) -> None:
    """Refuse to write into a folder that holds something else than checkpoints; hidden files are left alone.

    Raises:
        CheckpointError: It does.
    """
    try:
        entries = sorted(folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise CheckpointError(f"{folder}: expected a folder for checkpoints ({error.strerror})") from error
    for path in entries:
        ours = number_of(path) is not None and path.is_dir() and not path.is_symlink()
        if not ours and not path.name.startswith("."):
            raise CheckpointError(
                f"{folder}: expected a folder of checkpoints only, got {path.name!r} in it: choose another folder"
            )


@contextlib.contextmanager
def locked(folder: Path, patience: float) -> Iterator[bool]:
    """Hold the lock of the folder, which one process writes into, as `_files.locked` does.

    Raises:
        CheckpointError: Another process has held it for so many seconds.
    """
    try:
        with _files.locked(folder / _LOCK, patience) as held:
            yield held
    except _files.InUse as error:
        raise CheckpointError(f"{folder}: process {error.holder} is writing a checkpoint into it") from None


def clean(folder: Path) -> None:
    """Remove what writers left that died, and bring back what one had put aside; the lock has to be held."""
    for path in list(folder.iterdir()):
        found = _HIDDEN.fullmatch(path.name)
        if not found or path.is_symlink() or not path.is_dir():
            continue
        place = folder / found[1]
        if found[2] == "aside" and not os.path.lexists(place):
            path.rename(place)
        else:
            remove(path)


def removable(path: Path) -> bool:
    """Return whether this is a folder in which there is nothing but files of ours."""
    if path.is_symlink() or not path.is_dir():
        return False
    with os.scandir(path) as entries:
        return all(entry.name in FILES and entry.is_file(follow_symlinks=False) for entry in entries)


def remove(path: Path) -> bool:
    """Remove a folder of ours, unless there is something else in it; return whether it is gone."""
    if not removable(path):
        return False
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    return True


def discard(path: Path) -> bool:
    """Remove a checkpoint, in such a way that a half removed one is never taken for one; return whether it is gone."""
    if not removable(path):
        return False
    removed = hidden(path, "removed")
    if os.path.lexists(removed) and not remove(removed):
        return False
    path.rename(removed)
    return remove(removed)


def set_aside(folder: Path, paths: Iterable[Path]) -> Path:
    """Move checkpoints into a new folder beside theirs, and return it; the lock has to be held."""
    beside = folder.with_name(f"{folder.name}_set_aside")
    taken = [int(each.name) for each in beside.iterdir() if each.name.isdecimal()] if beside.is_dir() else []
    place = beside / str(max(taken, default=0) + 1)
    place.mkdir(parents=True)
    for path in paths:
        path.rename(place / path.name)
    for each in (place, beside, folder):
        _files.sync(each)
    return place
