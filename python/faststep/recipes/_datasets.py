"""Datasets from files: sequences of samples, each a tuple of NumPy arrays."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import mlx.core as mx
import numpy as np

from faststep.recipes._patterns import listed

Sample = tuple[np.ndarray[Any, Any], ...]
Each = TypeVar("Each")


class Bytes(Sequence[Sample]):
    """Windows of the bytes of files: `x` and, one byte later, `y`, both int32 [context].

    Args:
        files: Files, folders (all that is below them) or patterns such as `text/*.txt`. Default: the top-level modules
            of Python's standard library.
        context: Bytes in a window.
        stride: Bytes from one window to the next. Default: `context`.
        split: Which files: "train", "held_out" (one of every `every` files, the 11th first) or "all". A single file
            is split by windows.
        every: One of how many files is held out.

    Raises:
        ValueError: A number is out of its range, a path matches no file, or there are too few files or bytes.
    """

    def __init__(
        self,
        files: Path | list[Path] | None = None,
        context: int = 64,
        stride: int | None = None,
        split: Literal["train", "held_out", "all"] = "train",
        every: int = 20,
    ) -> None:
        for name, value in {"context": context, "stride": stride, "every": every - 1}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected a number from {1 + (name == 'every')} on, got {value}")
        texts = [np.fromfile(file, dtype=np.uint8) for file in find_files(files)]
        self.context, self.stride = context, stride or context
        self.data = np.concatenate(chosen(texts, split, every))
        self.windows = max(0, (len(self.data) - context - 1) // self.stride + 1)
        if self.windows == 0:
            raise ValueError(f"context: expected files of more than {context} bytes, got {len(self.data)} bytes")

    @property
    def tokens_per_item(self) -> int:
        """Tokens that a sample is trained on: the bytes of `y`."""
        return self.context

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        if not 0 <= index < self.windows:
            raise IndexError(f"expected a window from 0 to {self.windows - 1}, got {index}")
        start = index * self.stride
        window = self.data[start : start + self.context + 1].astype(np.int32)
        return window[:-1], window[1:]


def find_files(files: Path | list[Path] | None) -> list[Path]:
    """Return the files that are named, are below folders or match patterns; by default the standard library's.

    Raises:
        ValueError: One matches none.
    """
    if files is None:
        files = Path(sysconfig.get_path("stdlib")) / "*.py"
    found: list[Path] = []
    for path in files if isinstance(files, list) else [files]:
        if path.is_dir():
            below = [each for each in sorted(path.rglob("*")) if each.is_file()]
        else:
            pattern = path.relative_to(path.anchor)
            below = [each for each in sorted(Path(path.anchor).glob(str(pattern))) if each.is_file()]
        if not below:
            raise ValueError(f"files: expected files, {path} matches none")
        found += below
    return found


def chosen(texts: Sequence[Each], split: str, every: int) -> list[Each]:
    """Return those of a split: "train", "held_out" (one of `every`) or "all".

    Raises:
        ValueError: There are too few to hold one out.
    """
    if split == "all":
        return list(texts)
    held_out = [i % every == every // 2 for i in range(len(texts))]
    if not any(held_out) or all(held_out):
        raise ValueError(
            f"files: expected {every // 2 + 1} or more to hold one out, got {len(texts)}; see every, split"
        )
    return [text for text, held in zip(texts, held_out, strict=True) if held == (split == "held_out")]


class Arrays(Sequence[Sample]):
    """The rows of arrays in a file.

    Args:
        file: An npz or safetensors file.
        names: Which arrays, in the order of the loss's arguments. Default: all, in the file's order, for npz; for
            safetensors sorted by name.
        start: The first row.
        stop: The row behind the last one. Default: all.

    Raises:
        ValueError: The file cannot be read, lacks a name, or its arrays have different lengths.
    """

    def __init__(self, file: Path, names: list[str] | None = None, start: int = 0, stop: int | None = None) -> None:
        arrays = _read(file)
        absent = [name for name in names or arrays if name not in arrays]
        if absent or not arrays:
            raise ValueError(f"names: {file} has no {listed(absent)}; there are {listed(arrays)}")
        chosen = {name: arrays[name] for name in names or arrays}
        lengths = {name: len(each) if each.ndim else 0 for name, each in chosen.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"names: expected arrays of one length, {file} has {lengths}")
        self.arrays = [each[start:stop] for each in chosen.values()]
        if not max(lengths.values()):
            raise ValueError(f"file: expected at least one item, {file} has none")
        if not len(self.arrays[0]):
            raise ValueError(f"start: expected rows from {start} to {stop}, {file} has {max(lengths.values())}")

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return tuple(each[index] for each in self.arrays)


def _read(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
        loaded = mx.load(str(file), format="safetensors")
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        raise ValueError(f"file: {file} cannot be read: {error}") from None
    assert isinstance(loaded, dict)
    floats = {name: each.astype(mx.float32) if each.dtype == mx.bfloat16 else each for name, each in loaded.items()}
    return {name: np.array(floats[name]) for name in sorted(floats)}
