"""Files that are written whole or not at all, and locks between processes. It uses no other room."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path:
    """Return the folder of what can be made again: compiled kernels, the tokens of datasets."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "mlx-faststep"


def expanded(path: str) -> str:
    """Return a path with the home folder for a leading `~` or `~NAME`, and the environment's for `$NAME` and `${NAME}`.

    Raises:
        ValueError: There is no such variable, or no such user.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in os.environ:
            raise ValueError(f"expected a path, {path!r} names the variable {name}, which is not set")
        return os.environ[name]

    try:
        return str(Path(re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, path)).expanduser())
    except RuntimeError as error:
        raise ValueError(f"expected a path, got {path!r}: {error}") from None


def numbered(folder: str) -> str:
    """Return a folder's path with a number in the place of `{n}`: one more than the largest that there is, from 1."""
    begin, found, end = folder.partition("{n}")
    if not found:
        return folder
    parent, form = Path(begin + "0").parent, re.compile(f"{re.escape(Path(begin + '0').name[:-1])}([0-9]+)")
    there = [form.match(each.name) for each in parent.iterdir()] if parent.is_dir() else []
    return f"{begin}{1 + max((int(each[1]) for each in there if each), default=0)}{end}"


class InUse(RuntimeError):
    """Another process holds a lock.

    Attributes:
        path: The file of the lock.
        holder: The number of the process that holds it, as text; "unknown" where it has not said.
    """

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path}: expected a lock that nobody holds, process {holder} has it")
        self.path, self.holder = path, holder


@contextlib.contextmanager
def replacing(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another when the block ends well.

    It is on the disk before it takes the place, by one rename: readers find the old contents or the new ones, after a
    power cut too. On an error nothing has changed.

    Args:
        path: The place.
        new: Refuse a place that is taken, even by a link to nothing.

    Raises:
        FileExistsError: The place is taken, and `new` was asked for.
        OSError: The file cannot be written.
    """
    _refuse_taken(path, new)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a process of that number that died
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _refuse_taken(path, new)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _refuse_taken(path: Path, new: bool) -> None:
    if new and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "there is such a file already", str(path))


def write_text(path: Path, text: str) -> None:
    """Write a file of text, in UTF-8, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


def sync(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[bool]:
    """Hold a lock between processes; the system releases that of one that dies.

    Args:
        path: The file that stands for it, which holds the number of the process that has it; it is made where it is
            missing, and stays. A link is not followed.
        patience: Seconds to wait for another process.

    Yields:
        Whether the lock is held: some file systems have none.

    Raises:
        InUse: Another process has held it for so long.
        OSError: The file cannot be made or opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        held = _lock(path, descriptor, time.monotonic() + patience)
        if held:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield held
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone(descriptor: int) -> Iterator[None]:
    """Hold back other processes that append to an open file: they would see a part of a line."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock(path: Path, descriptor: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise InUse(path, os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown") from None
            time.sleep(0.05)
        except OSError:
            return False
        else:
            return True
