"""Texts of which some tokens are masked, otherwise in each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from faststep.recipes._datasets import chosen, find_files
from faststep.recipes.text._tokenizer import Tokenizer

Item = dict[str, np.ndarray[Any, Any]]
IGNORED = -100  # the target of what is not masked


class MaskedText(Sequence[Item]):
    """Pieces of texts for a masked language model: `tokens` and `targets`, both int32 [length].

    Of the tokens so many are targets; of those 80 % are the mask's token, 10 % any other, 10 % themselves (Devlin et
    al., 2018, https://arxiv.org/abs/1810.04805, section 3.1). Which ones is drawn when an item is read, in a worker of
    the loader, from seed, epoch and number of the item: otherwise in each epoch, and the same in a run that goes on.
    What is held out has the same masks in each epoch.

    Args:
        tokenizer: A `tokenizer.json`, or a folder with one.
        files: Files, folders (all that is below them) or patterns such as `text/*.txt`. Default: the top-level modules
            of Python's standard library.
        length: The most tokens of a piece, with those of its beginning and end.
        probability: The share of the tokens that are targets; at least one is.
        split: Which files: "train", "held_out" (one of every `every` files, the 11th first) or "all".
        every: One of how many files is held out.
        seed: Of the masks.

    Raises:
        ValueError: A number is out of its range, a path matches no file, the tokenizer has no token for masks, or there
            is no text.
    """

    def __init__(
        self,
        tokenizer: Path,
        files: Path | list[Path] | None = None,
        length: int = 128,
        probability: float = 0.3,
        split: Literal["train", "held_out", "all"] = "train",
        every: int = 20,
        seed: int = 0,
    ) -> None:
        self._tokenizer = Tokenizer(tokenizer)
        self.vocabulary, self.longest = self._tokenizer.vocabulary, length
        room = length - sum(self._tokenizer.around)
        if room < 1 or every < 2:
            name, least = ("length", length - room + 1) if room < 1 else ("every", 2)
            raise ValueError(f"{name}: expected a number from {least} on, got {length if room < 1 else every}")
        if not 0 < probability <= 1:
            raise ValueError(f"probability: expected a number above 0 and at most 1, got {probability}")
        if "mask" not in self._tokenizer.special:
            raise ValueError(f"tokenizer: expected one with a token for masks ([MASK] or <mask>), {tokenizer} has none")
        found = chosen(find_files(files), split, every)
        encoded = self._tokenizer([file.read_text(encoding="utf-8", errors="replace") for file in found])
        self._pieces = [tokens[at : at + room] for tokens in encoded for at in range(0, len(tokens), room)]
        if not self._pieces:
            raise ValueError("files: expected text, got files without any")
        self.probability, self.seed, self.epoch = probability, seed, 0
        self._fixed = split == "held_out"

    def set_epoch(self, epoch: int) -> None:
        """Draw the masks of another epoch from now on."""
        self.epoch = 0 if self._fixed else epoch

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        piece = self._pieces[index]
        draw = np.random.default_rng((self.seed, self.epoch, index))
        hidden = draw.random(len(piece)) < self.probability
        hidden[draw.integers(len(piece))] |= not hidden.any()
        how = draw.random(len(piece))
        shown = np.where(hidden & (how < 0.8), self._tokenizer.special["mask"], piece)
        others = draw.integers(self.vocabulary, size=len(piece))
        shown = np.where(hidden & (how >= 0.9), others, shown)
        targets = np.pad(np.where(hidden, piece, IGNORED), self._tokenizer.around, constant_values=IGNORED)
        return {"tokens": self._tokenizer.framed(shown), "targets": targets.astype(np.int32)}
