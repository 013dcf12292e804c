"""Texts, each with the authority of its source and the entropy of its provenance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from faststep.recipes._datasets import chosen, find_files

Item = dict[str, np.ndarray[Any, Any]]

DOCUMENTATION = (".md", ".rst", ".txt")


class Sources(Sequence[Item]):
    """Windows of the bytes of files: `input_ids`, int32 [context], `auth_weights` and `prov_entropies`, float32.

    The last two follow from a window's file by a rule that stands in for what you know about texts of your own:
    the authority is 1 for documentation, 1/4 for tests, 1/2 for source code and all else; the entropy is that of the
    file's bytes (Shannon, 1948), 0 to 8 bits. The dataset `arrays` takes numbers of your own instead:
    `{use: arrays, file: mine.npz, names: [input_ids, auth_weights, prov_entropies]}`.

    Args:
        files: Files, folders (all that is below them) or patterns such as `text/*.txt`. Default: the top-level modules
            of Python's standard library.
        context: Bytes in a window.
        split: Which files: "train", "held_out" (one of every `every` files, the 11th first) or "all".
        every: One of how many files is held out.

    Raises:
        ValueError: A number is out of its range, a path matches no file, or no file has enough bytes.
    """

    def __init__(
        self,
        files: Path | list[Path] | None = None,
        context: int = 64,
        split: Literal["train", "held_out", "all"] = "train",
        every: int = 20,
    ) -> None:
        for name, value, least in (("context", context, 2), ("every", every, 2)):
            if value < least:
                raise ValueError(f"{name}: expected a number from {least} on, got {value}")
        self._rows: list[tuple[np.ndarray[Any, Any], int, float, float]] = []
        for file in chosen(find_files(files), split, every):
            text = np.fromfile(file, dtype=np.uint8)
            about = authority(_inner(file, files)), entropy(text)
            self._rows += [(text, at, *about) for at in range(0, len(text) - context + 1, context)]
        if not self._rows:
            raise ValueError(f"context: expected a file of {context} bytes or more, found none")
        self.context, self.vocabulary = context, 256

    @property
    def tokens_per_item(self) -> int:
        """Tokens that a sample is trained on: all bytes but the first."""
        return self.context - 1

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        text, at, weight, bits = self._rows[index]
        return {
            "input_ids": text[at : at + self.context].astype(np.int32),
            "auth_weights": np.array(weight, dtype=np.float32),
            "prov_entropies": np.array(bits, dtype=np.float32),
        }


def _inner(file: Path, files: Path | list[Path] | None) -> Path:
    """Return a file's path within the folder that was named: what lies above says nothing about it."""
    named = files if isinstance(files, list) else [] if files is None else [files]
    around = [folder for folder in named if folder in file.parents]
    return file.relative_to(around[0]) if around else Path(file.name)


def authority(file: Path) -> float:
    """Return the authority of a file's kind, above 0 and at most 1."""
    if any(part in ("test", "tests") or part.startswith("test_") for part in file.parts):
        return 0.25
    return 1.0 if file.suffix in DOCUMENTATION else 0.5


def entropy(text: np.ndarray[Any, Any]) -> float:
    """Return the entropy of bytes, in bits."""
    shares = np.bincount(text, minlength=256) / max(len(text), 1)
    return float(-sum(share * np.log2(share) for share in shares[shares > 0]))
