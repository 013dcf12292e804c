"""Manifests: reading a checkpoint's files, each checked against its size and SHA-256 in the manifest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from faststep.checkpoints import _tensors
from faststep.checkpoints._errors import Damaged
from faststep.checkpoints._folder import CONTENTS, MANIFEST, TRAINING, number_of

VERSION = 1
LARGEST_MANIFEST = 1 << 20  # bytes
Contents = tuple[dict[str, mx.array], dict[str, str]]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, and look whether the files are there in their sizes.

    Raises:
        Damaged: It is not what was written.
    """
    if path.is_symlink():
        raise Damaged(f"{path}: expected a folder, found a link")
    with _regular(path / MANIFEST) as (file, size):
        if size > LARGEST_MANIFEST:
            raise Damaged(f"{path / MANIFEST}: expected at most {LARGEST_MANIFEST} bytes, found {size}")
        with _named(path / MANIFEST):
            manifest = _tensors.parse_json(file.read())
            _check_manifest(manifest, number_of(path))
    for name, entry in manifest["files"].items():
        with _regular(path / name) as (_, size):
            if size != entry["bytes"]:
                raise Damaged(f"{path / name}: expected {entry['bytes']} bytes, found {size}")
    return manifest


def manifest_text(manifest: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest, its own SHA-256 in it."""
    return json.dumps({**manifest, "sha256": _own_sha256(manifest)}, indent=1).encode()


def _own_sha256(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check_manifest(manifest: dict[str, Any], number: int | None) -> None:
    if manifest.get("version") != VERSION:
        raise Damaged(f"expected version {VERSION} of the format, found {manifest.get('version')!r}")
    own = manifest.pop("sha256", None)
    if own != _own_sha256(manifest):
        raise Damaged(f"expected SHA-256 {own!r} of its contents, found {_own_sha256(manifest)}")
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != set(CONTENTS):
        raise Damaged(f"expected the files {', '.join(CONTENTS)}, found {files!r:.200}")
    for name, entry in files.items():
        if (
            not isinstance(entry, dict)
            or type(entry.get("bytes")) is not int
            or not isinstance(entry.get("sha256"), str)
        ):
            raise Damaged(f"{name}: expected bytes and sha256, found {entry!r:.200}")
    if manifest.get("number") != number:
        raise Damaged(f"expected the number {number} of its folder, found {manifest.get('number')!r}")
    if not isinstance(manifest.get("metric", 0), float | None) or not isinstance(manifest.get("time"), float):
        raise Damaged("expected a metric and a time, found something else")


def read_tensors(path: Path, name: str, manifest: Mapping[str, Any]) -> Contents:
    """Read one of the files with tensors, which are evaluated, and its metadata.

    Raises:
        Damaged: It is not what was written.
    """
    with opened(path, name, manifest) as file:
        tensors, metadata = _tensors.read_header(file, manifest["files"][name]["bytes"])
        return _tensors.read_arrays(file, tensors), metadata


def read_training(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Read `training.json`.

    Raises:
        Damaged: It is not what was written.
    """
    with opened(path, TRAINING, manifest) as file:
        training = _tensors.parse_json(file.read())
    for name in ("numbers", "random", "values"):
        if not isinstance(training.get(name), dict):
            raise Damaged(f"{path / TRAINING}: expected a JSON object {name!r}, found {training.get(name)!r:.40}")
    return training


class _Hashed:
    """A file that is hashed as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def read(self, count: int = -1) -> bytes:
        contents = self._file.read(count)
        self.sha256.update(contents)
        return contents

    def readinto(self, buffer: memoryview) -> int:
        count = 0
        while count < len(buffer):
            part = buffer[count : count + _tensors.CHUNK]
            got: int = self._file.readinto(part)  # type: ignore[attr-defined]
            if not got:
                break
            self.sha256.update(part[:got])
            count += got
        return count


@contextlib.contextmanager
def opened(path: Path, name: str, manifest: Mapping[str, Any]) -> Iterator[_Hashed]:
    """Open a file of a checkpoint; behind the block the rest of it is read, and its SHA-256 compared.

    Raises:
        Damaged: It is not what the manifest says, or what the block raises.
    """
    wanted = manifest["files"][name]
    with _regular(path / name) as (file, size), _named(path / name):
        if size != wanted["bytes"]:
            raise Damaged(f"expected {wanted['bytes']} bytes, found {size}")
        hashed = _Hashed(file)
        problem: Damaged | None = None
        try:
            yield hashed
        except Damaged as error:
            problem = error
        while hashed.read(_tensors.CHUNK):
            pass
        if hashed.sha256.hexdigest() != wanted["sha256"]:
            raise Damaged(f"expected SHA-256 {wanted['sha256']}, found {hashed.sha256.hexdigest()}")
        if problem:
            raise problem


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file that is no link, no pipe and no device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Damaged(f"{path}: expected a file, found none that can be read ({error.strerror})") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{path}: expected a file, found something else")
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            yield file, status.st_size
    except OSError as error:
        raise Damaged(f"{path}: expected to read it, found that it cannot be ({error.strerror})") from error
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the file's name before what is wrong with it."""
    try:
        yield
    except (Damaged, RecursionError) as error:
        raise Damaged(f"{path}: {error}") from error
