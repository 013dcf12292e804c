"""Time series with the text that is the answer to each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from faststep.recipes._datasets import Arrays

Item = dict[str, np.ndarray[Any, Any]]
END = 0  # the byte behind an answer


class Series(Sequence[Item]):
    """Time series and their answers: `series`, float32 [length, channels]; `tokens`, int32 [seq]; `mask`, bool [seq].

    The tokens are the bytes of the answer and a zero behind it; the mask is True where they are.

    Args:
        file: An npz or safetensors file with `series`, floating point [items, length, channels] or, as `layout` says,
            [items, channels, length]; and `labels`, whole numbers [items].
        answers: The text for each label from 0 on.
        channels: How many there are; where no layout is declared it has to tell the two axes apart.
        layout: "NLC" (items, length, channels) or "NCL", which is turned round once, here. Default: NLC, where
            `channels` shows that it is.
        shift: Whether each series begins at a place of its own, drawn in each epoch, and goes on with its beginning
            where it ends: to train on few series of what has no beginning.
        seed: Of these places.

    Raises:
        ValueError: The file cannot be read or has other arrays, a label has no answer, or the layout cannot be told
            apart or is another than the one that is declared.
    """

    def __init__(
        self,
        file: Path,
        answers: list[str],
        channels: int | None = None,
        layout: Literal["NLC", "NCL"] | None = None,
        shift: bool = False,
        seed: int = 0,
    ) -> None:
        series, labels = Arrays(file, ["series", "labels"]).arrays
        if series.ndim != 3 or series.dtype.kind != "f":
            raise ValueError(f"file: expected series of floating point with 3 axes, got {series.dtype} {series.shape}")
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(answers):
            there = f"{labels.min()} to {labels.max()}" if labels.dtype.kind in "iu" else str(labels.dtype)
            raise ValueError(
                f"answers: expected a text for each label from 0 on, got {len(answers)} texts and labels of {there}"
            )
        self._series = as_nlc(series.astype(np.float32), channels, layout)
        self.channels = self._series.shape[2]
        texts = [np.frombuffer(each.encode(), dtype=np.uint8) for each in answers]
        self._tokens = np.full((len(texts), max(map(len, texts)) + 1), END, dtype=np.int32)
        for row, text in zip(self._tokens, texts, strict=True):
            row[: len(text)] = text
        self._mask = np.arange(self._tokens.shape[1]) <= np.array([[len(text)] for text in texts])
        self._labels, self._shift, self._seed, self._epoch = labels, shift, seed, 0
        self.vocabulary = int(self._tokens.max()) + 1

    def set_epoch(self, epoch: int) -> None:
        """Draw the places of another epoch from now on."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        label, series = self._labels[index], self._series[index]
        if self._shift:
            draw = np.random.default_rng((self._seed, self._epoch, index))
            series = np.roll(series, draw.integers(len(series)), axis=0)
        return {"series": series, "tokens": self._tokens[label], "mask": self._mask[label]}


def as_nlc(series: np.ndarray[Any, Any], channels: int | None, layout: str | None) -> np.ndarray[Any, Any]:
    """Return series as [items, length, channels].

    Args:
        series: [items, length, channels] or [items, channels, length].
        channels: How many there are, where that is known.
        layout: "NLC", "NCL", or None: `channels` shows which it is.

    Raises:
        ValueError: It cannot be told, or is another than the one that is declared.
    """
    _, second, third = series.shape
    if layout is not None:
        found = second if layout == "NCL" else third
        if channels is not None and found != channels:
            raise ValueError(f"layout: {layout} of {list(series.shape)} has {found} channels, expected {channels}")
        return np.ascontiguousarray(series.transpose(0, 2, 1)) if layout == "NCL" else series
    if channels == third != second:
        return series
    if channels == second != third:
        raise ValueError(
            f"layout: {list(series.shape)} with {channels} channels is [items, channels, length], and a convolution "
            "of MLX takes [items, length, channels]: `layout: NCL` has it turned round"
        )
    reason = "channels is not given" if channels is None else f"channels is {channels}"
    raise ValueError(
        f"layout: expected NLC (items, length, channels) or NCL: {list(series.shape)} does not tell, and {reason}"
    )
