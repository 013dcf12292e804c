"""The tokenizer of a folder, by the package `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from faststep._optional import need

_USUAL = {"cls": ("[CLS]", "<s>"), "sep": ("[SEP]", "</s>"), "pad": ("[PAD]", "<pad>"), "mask": ("[MASK]", "<mask>")}

Ids = np.ndarray[Any, np.dtype[np.int32]]


class Tokenizer:
    """A tokenizer as Hugging Face writes it: `tokenizer.json`, and beside it the names of its special tokens.

    Args:
        path: The file, or the folder of a model that has it.

    Attributes:
        vocabulary: One more than the highest token.
        special: The tokens `cls`, `sep`, `pad` and `mask`, as far as it has them.

    Raises:
        ValueError: The file is not there or cannot be read.
        ImportError: The package `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"tokenizer: expected a tokenizer.json, or a folder with one, got {path}")
        try:
            self._made = need("tokenizers", "llm").Tokenizer.from_file(str(file))
        except ImportError:
            raise
        except Exception as error:  # what tokenizers raises is an Exception and nothing more
            raise ValueError(f"tokenizer: {file} cannot be read: {error}") from None
        self._made.no_truncation()
        self._made.no_padding()
        words = self._made.get_vocab(with_added_tokens=True)
        self.vocabulary = max(words.values()) + 1
        named = _names(file.parent)
        self.special: dict[str, int] = {}
        for kind, usual in _USUAL.items():
            there = [name for name in (named.get(kind), *usual) if name in words]
            if there:
                self.special[kind] = words[there[0]]

    def __call__(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of texts, int32 [length] each, without special ones."""
        encoded = self._made.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in encoded]

    def framed(self, tokens: Ids) -> Ids:
        """Put the token of the beginning in front and that of the end behind, as far as there are any."""
        front, back = ([self.special[kind]] if kind in self.special else [] for kind in ("cls", "sep"))
        return np.concatenate([front, tokens, back]).astype(np.int32)

    @property
    def around(self) -> tuple[int, int]:
        """Numbers of tokens that `framed` puts in front, and behind."""
        return int("cls" in self.special), int("sep" in self.special)


def _names(folder: Path) -> dict[str, str]:
    """Return the names of special tokens that the files beside a tokenizer give, by kind."""
    names: dict[str, str] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for kind in _USUAL:
            value = values.get(f"{kind}_token") if isinstance(values, dict) else None
            name = value.get("content") if isinstance(value, dict) else value
            if isinstance(name, str):
                names[kind] = name
    return names
