"""A dataset whose samples are drawn by weights: for classes of which some are rare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np


class Resampled(Sequence[Any]):
    """A dataset whose samples are drawn by weights, with replacement, anew in each epoch.

    The draws are a function of `seed` and the epoch, so a training resumes exactly. Its samples' lengths change from
    epoch to epoch: it is not for `Pack`, nor for `Pad` with a window.

    Args:
        source: The dataset, a sequence.
        weights: Of each sample: numbers, a `.npy` file of them, or "balanced": the inverse of its class's frequency.
        label: The key or place of the class in a sample, for "balanced"; None: "label", or the last of a tuple.
        seed: Of the draws.

    Raises:
        TypeError: The dataset is no sequence.
        ValueError: There is not one weight for each sample, or one is negative or no number.
    """

    def __init__(
        self,
        source: Any,
        weights: list[float] | Path | Literal["balanced"] = "balanced",
        label: str | int | None = None,
        seed: int = 0,
    ) -> None:
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise TypeError(f"source: expected a sequence, got {type(source).__name__}")
        self._source, self._seed = source, seed
        found = _balanced(source, label) if weights == "balanced" else _read(weights)
        if found.shape != (len(source),) or not np.isfinite(found).all() or found.min(initial=0) < 0 or not found.any():
            raise ValueError(f"weights: expected {len(source)} numbers from 0 on, not all 0, got {list(found.shape)}")
        self._edges = np.cumsum(found) / found.sum()
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the samples of an epoch."""
        bits = np.random.PCG64(np.random.SeedSequence((self._seed, epoch)))  # whose stream NumPy keeps as it is
        places = np.asarray(bits.random_raw(len(self._source)), dtype=np.uint64) / 2.0**64
        self._drawn = np.minimum(np.searchsorted(self._edges, places, side="right"), len(self._source) - 1)
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return self._source[int(self._drawn[index])]


def _read(weights: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(np.load(weights) if isinstance(weights, Path) else weights, dtype=np.float64)
    except (OSError, ValueError) as error:
        raise ValueError(f"weights: they cannot be read: {error}") from None


def _balanced(source: Any, label: str | int | None) -> np.ndarray[Any, Any]:
    """Return the inverse of how often the class of each sample is there."""
    classes = [_class_of(source[i], label) for i in range(len(source))]
    counts = Counter(classes)
    return np.array([1 / counts[each] for each in classes])


def _class_of(sample: Any, label: str | int | None) -> Any:
    key: Any = ("label" if isinstance(sample, Mapping) else -1) if label is None else label
    try:
        found = np.asarray(sample[key])
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"label: expected a class at {key!r} of each sample, found none") from None
    return found.item() if found.size == 1 else tuple(found.reshape(-1).tolist())
