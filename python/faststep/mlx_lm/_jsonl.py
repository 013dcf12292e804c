"""Datasets of JSON lines: texts, prompts with completions, and chats, as tokens with their targets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from faststep.mlx_lm._folder import longest, read_config, read_tokenizer
from faststep.mlx_lm._tokens import Encoder

IGNORED = -100
Sample = dict[str, np.ndarray[Any, Any]]


class Jsonl(Sequence[Sample]):
    """Lines of JSON as `{"tokens", "targets"}`, int32 [length] each: texts, prompts with completions, and chats.

    A line is `{"text": ...}`, `{"prompt": ..., "completion": ...}` or `{"messages": [{"role", "content"}, ...]}` (and
    `"tools"`), as mlx-lm takes them. Targets are the tokens one place on, -100 where they do not count. A chat, and a
    prompt where the tokenizer has a chat template, goes through the template; a text ends with the token of the end.

    Args:
        file: The file, or several.
        tokenizer: The folder of the model, whose tokenizer and chat template are taken.
        mask_prompt: Train on the completion or a chat's last answer only; nothing of a text is left out.
        max_length: The most tokens of a sample; None: as many as the model's config says.
        longer: What becomes of a longer one: "refuse", "cut" (its end) or "skip" it.

    Raises:
        ImportError: mlx-lm is not installed.
        ValueError: A line is broken (the message has its number), nothing is left to train on, a sample is too long,
            or the tokenizer cannot be read.
    """

    def __init__(
        self,
        file: Path | list[Path],
        tokenizer: Path,
        mask_prompt: bool = True,
        max_length: int | None = None,
        longer: Literal["refuse", "cut", "skip"] = "refuse",
    ) -> None:
        limit = _limit(tokenizer, max_length)
        try:
            encoder = Encoder(read_tokenizer(tokenizer), mask_prompt)
        except ValueError as error:
            raise ValueError(str(error).replace("path: ", "tokenizer: ", 1)) from None
        files = file if isinstance(file, list) else [file]
        self._samples: list[Sample] = []
        for each in files:
            for where, record in _records(each):
                self._add(where, *_encoded(encoder, where, record), limit, longer)
        if not self._samples:
            skipped = "; longer: skip left none of its samples" if longer == "skip" else ""
            raise ValueError(f"file: expected samples in {', '.join(map(str, files))}, found none{skipped}")

    def _add(self, where: str, tokens: list[int], prompt: int, limit: int | None, longer: str) -> None:
        """Take up a sample of so many tokens, of which the first ones are its prompt."""
        inputs = len(tokens) - 1
        if limit is not None and inputs > limit:
            if longer == "refuse":
                raise ValueError(
                    f"file: {where}: {inputs} tokens, more than the {limit} of the model or of max_length: shorten it, "
                    "or set longer to cut or skip"
                )
            if longer == "skip":
                return
            tokens = tokens[: limit + 1]
        if len(tokens) < 2 or prompt >= len(tokens):
            cut = " within max_length" if inputs >= len(tokens) else ""
            raise ValueError(f"file: {where}: expected tokens to train on, found none{cut}: is its answer empty?")
        array = np.array(tokens, dtype=np.int32)
        targets = array[1:].copy()
        targets[: max(0, prompt - 1)] = IGNORED
        self._samples.append({"tokens": array[:-1], "targets": targets})

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return self._samples[index]


def _limit(folder: Path, max_length: int | None) -> int | None:
    """Return the most tokens of a sample."""
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length: expected a number from 1 on, got {max_length}")
    try:
        of_model = longest(read_config(folder))
    except ValueError as error:
        raise ValueError(str(error).replace("path: ", "tokenizer: ", 1)) from None
    return min((each for each in (max_length, of_model) if each is not None), default=None)


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file, each with its place; empty lines are passed over.

    Raises:
        ValueError: The file cannot be read, or a line is no JSON object.
    """
    if not file.is_file():
        raise ValueError(f"file: expected a file of JSON lines, found none at {file}")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"file: {where}: no JSON in this line: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"file: {where}: expected an object, {{...}}, got {type(record).__name__}")
            yield where, record


def _encoded(encoder: Encoder, where: str, record: dict[str, Any]) -> tuple[list[int], int]:
    """Return the tokens of a record, and how many of them are its prompt."""
    try:
        return encoder(record)
    except ValueError as error:
        raise ValueError(f"file: {where}: {error}") from None
