"""Texts with a label each, from a table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from faststep.recipes._patterns import listed
from faststep.recipes.text._tokenizer import Tokenizer

Item = dict[str, np.ndarray[Any, Any]]
Row = tuple[int, dict[str, Any]]  # the number of its line, and its columns


class LabelledText(Sequence[Item]):
    """Texts with a label each, for a classifier: `tokens`, int32 [length], and `labels`, int32.

    Args:
        tokenizer: A `tokenizer.json`, or a folder with one.
        file: Lines of JSON objects (`.jsonl`), or a table with a head (`.csv`, `.tsv`).
        labels: The names of the labels in the order of the model's classes. Default: the labels are numbers from 0 on.
        text: The column of the text.
        label: The column of the label.
        length: The most tokens of a text, with those of its beginning and end; what is behind is cut off.

    Raises:
        ValueError: The file cannot be read, has a broken line, lacks a column, has a label that is none of `labels`, or
            is empty; the message names the line.
    """

    def __init__(
        self,
        tokenizer: Path,
        file: Path,
        labels: list[str] | None = None,
        text: str = "text",
        label: str = "label",
        length: int = 128,
    ) -> None:
        self._tokenizer = Tokenizer(tokenizer)
        self.vocabulary, self.longest = self._tokenizer.vocabulary, length
        room = length - sum(self._tokenizer.around)
        if room < 1:
            raise ValueError(f"length: expected a number from {length - room + 1} on, got {length}")
        rows = list(_rows(file))
        if not rows:
            raise ValueError(f"file: expected texts, {file} has none")
        texts = [_column(file, row, text) for row in rows]
        wrong = next((row[0] for row, each in zip(rows, texts, strict=True) if not isinstance(each, str)), None)
        if wrong is not None:
            raise ValueError(f"file: {file}:{wrong}: expected text in the column {text!r}")
        self._labels = [_number(file, row[0], _column(file, row, label), labels) for row in rows]
        self._texts = [self._tokenizer.framed(tokens[:room]) for tokens in self._tokenizer(texts)]
        self.classes = max(self._labels) + 1 if labels is None else len(labels)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        return {"tokens": self._texts[index], "labels": np.array(self._labels[index], dtype=np.int32)}


def _rows(file: Path) -> Iterator[Row]:
    """Read the rows of a file."""
    kinds = {".jsonl": _json_lines, ".csv": _table, ".tsv": _table}
    if file.suffix not in kinds:
        raise ValueError(f"file: expected one of {', '.join(kinds)}, got {file}")
    try:
        yield from kinds[file.suffix](file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"file: {file} cannot be read: {error}") from None


def _json_lines(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"file: {file}:{number}: expected a JSON object: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"file: {file}:{number}: expected a JSON object, got {type(row).__name__}")
            yield number, row


def _table(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
        for row in reader:
            yield reader.line_num, row


def _column(file: Path, row: Row, name: str) -> Any:
    number, columns = row
    if columns.get(name) is None:
        there = listed(str(each) for each in columns if each is not None)
        raise ValueError(f"file: {file}:{number}: expected a column {name!r}; there are {there}")
    return columns[name]


def _number(file: Path, line: int, label: Any, labels: Sequence[str] | None) -> int:
    """Return the number of a label."""
    if labels is None:
        if not isinstance(label, bool) and str(label).isdecimal():
            return int(label)
        raise ValueError(f"file: {file}:{line}: expected a number as label, or `labels` that name them, got {label!r}")
    if str(label) not in labels:
        raise ValueError(f"file: {file}:{line}: expected a label of {', '.join(labels)}, got {label!r}")
    return labels.index(str(label))
