"""Datasets of JSON lines: texts, prompts with completions, and chats, as tokens with their targets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from faststep.mlx_lm import _cache
from faststep.mlx_lm._chat import TrainOn
from faststep.mlx_lm._folder import find_folder, longest, read_config, read_tokenizer
from faststep.mlx_lm._layouts import KEYS
from faststep.mlx_lm._progress import Progress
from faststep.mlx_lm._records import Read, Split, find_files, read
from faststep.mlx_lm._samples import Samples
from faststep.mlx_lm._tokens import Draft, Encoder, Sample

_TOGETHER = 1024  # records that are encoded at once
_LONG = 2.0  # seconds of encoding that are worth a file

Item = dict[str, np.ndarray[Any, Any]]


class Jsonl(Sequence[Item]):
    """Lines of JSON as `{"tokens", "targets"}`, int32 [length] each: texts, prompts with completions, and chats.

    A line is `{"text": ...}`, `{"prompt": ..., "completion": ...}` (texts, or messages) or `{"messages": [{"role",
    "content"}, ...]}` (and `"tools"`), as mlx-lm takes them; Alpaca's `instruction`, `input` and `output`, ShareGPT's
    `conversations`, `question` and `answer` are known too. Targets are the tokens one place on, -100 where they do not
    count. A chat, and a prompt where the tokenizer has a chat template, goes through the template; a text ends with the
    token of the end.

    Args:
        file: The file, or several: names, patterns such as `data/*.jsonl`, or folders. JSON arrays (`.json`), Parquet
            (`.parquet`, extra `parquet`) and gzip (`.gz`) are read too.
        tokenizer: The folder of the model, or its id on the Hub, whose tokenizer and chat template are taken.
        train_on: What of a chat or a completion counts. "last": the last answer. "assistant": each answer; where the
            template writes earlier answers otherwise than the last one (Qwen 3 drops their thoughts), each is a sample
            of its own. "all": all of it. All of a text counts always.
        template: Arguments of the chat template: `{enable_thinking: false}`.
        keys: The records' own names: `{prompt: ask, completion: reply}`, also of `messages`, `text` and `tools`.
        split: Of a folder, the files of this name: `train.jsonl`, `valid.jsonl`, `test.jsonl`.
        max_length: The most tokens of a sample; None: as many as the model's config says.
        longer: What becomes of a longer one: "refuse", "cut" (its end) or "skip" it.
        broken: What becomes of a broken line: "refuse" or "skip" it.
        cache: Keep the tokens in `~/.cache/mlx-faststep` for the next start, where encoding them takes seconds.

    Attributes:
        summary: What is in it, and what was left out, plain values: see `docs/qlora.md`.

    Raises:
        ImportError: mlx-lm, or pyarrow for a Parquet file, is not installed.
        ValueError: Lines are broken (the message has file and number of each), nothing is left to train on, samples are
            too long, or the tokenizer cannot be read.
    """

    def __init__(
        self,
        file: Path | list[Path],
        tokenizer: Path,
        train_on: TrainOn = "last",
        template: dict[str, Any] | None = None,
        keys: dict[str, str] | None = None,
        split: Split | None = None,
        max_length: int | None = None,
        longer: Literal["refuse", "cut", "skip"] = "refuse",
        broken: Literal["refuse", "skip"] = "refuse",
        cache: bool = True,
    ) -> None:
        try:
            tokenizer = find_folder(Path(tokenizer))
        except ValueError as error:
            raise ValueError(str(error).replace("path: ", "tokenizer: ", 1)) from None
        limit = _limit(tokenizer, max_length)
        if unknown := sorted(set(keys or ()) - set(KEYS)):
            raise ValueError(f"keys: expected names of {', '.join(KEYS)}, got {unknown[0]!r}")
        files = find_files(file, split)
        options: dict[str, Any] = {"train_on": train_on, "template": template or {}, "keys": keys or {}}
        options |= {"limit": limit, "longer": longer, "broken": broken}
        self._samples = Samples(limit, longer, broken)
        place = _cache.place_of(files, tokenizer, options) if cache else None
        if place is None or not _cache.read(place, self._samples):
            began = time.monotonic()
            self._encode(files, tokenizer, options)
            if place is not None and time.monotonic() - began >= _LONG:
                _cache.write(place, self._samples)
        self.summary: dict[str, Any] = self._samples.summary()

    def _encode(self, files: list[Path], tokenizer: Path, options: dict[str, Any]) -> None:
        try:
            loaded = read_tokenizer(tokenizer)
        except ValueError as error:
            raise ValueError(str(error).replace("path: ", "tokenizer: ", 1)) from None
        encoder = Encoder(loaded, options["train_on"], options["template"], options["keys"])
        progress = Progress(", ".join(each.name for each in files[:3]) + (", ..." if len(files) > 3 else ""))
        records, before = read(files), None
        with ThreadPoolExecutor(1) as pool:  # texts become tokens, without the GIL, while templates write the next ones
            while together := list(itertools.islice(records, _TOGETHER)):
                found = [draft for each in together for draft in _drafts(encoder, each)]
                texts = [draft for _, draft in found if isinstance(draft, Draft)]
                coming = pool.submit(encoder.encode, texts)
                if before is not None:
                    self._take(*before)
                    progress.tell(len(self._samples), together[-1].done)
                before = found, coming
            if before is not None:
                self._take(*before)
        self._samples.finish(files)

    def _take(self, found: list[tuple[str, Draft | str]], coming: Future[list[Sample]]) -> None:
        """Take up what was found of some records, in their order; wait for their tokens."""
        samples = iter(coming.result())
        for where, draft in found:
            if isinstance(draft, Draft):
                self._samples.add(where, next(samples))
            else:
                self._samples.add_broken(where, draft)
        self._samples.check()

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """The length of each sample, int64 [samples]."""
        return self._samples.lengths

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        return self._samples[index]


def _drafts(encoder: Encoder, read: Read) -> list[tuple[str, Draft | str]]:
    """Return the texts of a record with its place, or what is wrong with it."""
    try:
        if read.record is None:
            raise ValueError(read.problem)
        return [(read.where, draft) for draft in encoder.drafts(read.record)]
    except ValueError as error:
        return [(read.where, str(error))]


def _limit(folder: Path, max_length: int | None) -> int | None:
    """Return the most tokens of a sample."""
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length: expected a number from 1 on, got {max_length}")
    try:
        of_model = longest(read_config(folder))
    except ValueError as error:
        raise ValueError(str(error).replace("path: ", "tokenizer: ", 1)) from None
    return min((each for each in (max_length, of_model) if each is not None), default=None)
