"""Several datasets as one, in shares of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Mixture(Sequence[Any]):
    """Several datasets as one, each with a share of the samples of an epoch.

    An epoch is as long as it takes for each sample to come at least once; those of a dataset whose share is larger
    than its size come more often. Without shuffling the datasets alternate by their shares.

    Args:
        sources: The datasets, sequences.
        weights: The shares, one for each: of `[3, 1]`, three of four samples are from the first. None: by their sizes.

    Attributes:
        summary: What the datasets say of themselves, where all of them do.

    Raises:
        TypeError: A dataset is no sequence.
        ValueError: There is none, or a weight is missing or not above 0.
    """

    def __init__(self, sources: list[Any], weights: list[float] | None = None) -> None:
        if not sources:
            raise ValueError("sources: expected a dataset or more, got none")
        for number, each in enumerate(sources):
            if not hasattr(each, "__len__") or not hasattr(each, "__getitem__"):
                raise TypeError(f"sources: expected sequences, got {type(each).__name__} for number {number}")
        self._sources = list(sources)
        sizes = np.array([len(each) for each in sources])
        if weights is not None and (len(weights) != len(sources) or min(weights) <= 0):
            raise ValueError(f"weights: expected {len(sources)} numbers above 0, got {weights}")
        shares = sizes / sizes.sum() if weights is None else np.array(weights) / sum(weights)
        counts = np.maximum(sizes, np.round(shares * np.max(sizes / shares)).astype(int))
        numbers = [np.arange(count) for count in counts]
        order = np.argsort(np.concatenate([(each + 0.5) / len(each) for each in numbers]), kind="stable")
        self._source = np.repeat(np.arange(len(sources)), counts)[order]
        self._item = np.concatenate([each % size for each, size in zip(numbers, sizes, strict=True)])[order]
        self.summary: dict[str, Any] | None = None
        if all(isinstance(getattr(each, "summary", None), dict) for each in sources):
            self.summary = {"sources": [each.summary for each in sources]}

    @property
    def lengths(self) -> np.ndarray[Any, Any] | None:
        """The length of each sample, int64 [samples], where the datasets say so."""
        found: list[Any] = [getattr(each, "lengths", None) for each in self._sources]
        if any(each is None for each in found):
            return None
        starts = np.cumsum([0, *map(len, found)])[:-1]
        return np.concatenate(found)[starts[self._source] + self._item]  # type: ignore[no-any-return]

    def set_epoch(self, epoch: int) -> None:
        """Tell the datasets the epoch."""
        for each in self._sources:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._item)

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return self._sources[self._source[index]][int(self._item[index])]
