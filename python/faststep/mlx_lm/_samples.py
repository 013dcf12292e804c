"""Samples of tokens in memory, and the account of what was skipped, cut or broken on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from faststep.mlx_lm._tokens import IGNORED, Sample

_SHOWN, _ENOUGH = 10, 1000  # problems that a message lists, and that end the search for more
_BINS = 24  # of the histogram of lengths
_NOTES = {
    "skipped": "longer than {limit} tokens: skipped (longer: skip)",
    "cut": "longer than {limit} tokens: cut (longer: cut)",
    "cut_away": "with nothing left to learn from within {limit} tokens: skipped (longer: cut)",
    "broken": "broken: skipped (broken: skip)",
    "thoughts": "with thoughts that the chat template leaves out",
    "tools": "with tools that the chat template leaves out",
    "messages": "with messages that the chat template leaves out",
    "special": "with special tokens written in a message, which are read as such",
    "unended": "without an end token after the answer: the model does not learn to stop",
}


class Samples:
    """Samples, one behind another in two arrays.

    Args:
        limit: The most tokens of one; None: any number.
        longer: What becomes of longer ones: "refuse", "cut", "skip".
        broken: What becomes of broken ones: "refuse", "skip".

    Attributes:
        notes: What happened to some: how often, where first.
    """

    def __init__(self, limit: int | None, longer: str, broken: str) -> None:
        self.limit, self._longer, self._broken = limit, longer, broken
        self.notes: dict[str, dict[str, Any]] = {}
        self._problems: list[str] = []
        self._tokens: list[np.ndarray[Any, Any]] = []
        self._targets: list[np.ndarray[Any, Any]] = []
        self._ends: np.ndarray[Any, Any] = np.zeros(1, dtype=np.int64)

    def add(self, where: str, sample: Sample) -> None:
        """Take up a sample."""
        tokens, trained, notes = sample
        inputs = len(tokens) - 1
        long = self.limit is not None and inputs > self.limit
        if long and self._longer == "refuse":
            self._refuse(where, f"{inputs} tokens, more than the {self.limit} of the model or of max_length: shorten "
                         "it, or set longer to cut or skip")  # fmt: skip
            return
        if long and self._longer == "skip":
            self._note("skipped", where)
            return
        if long:
            tokens, trained = tokens[: self.limit + 1], trained[: self.limit + 1]  # type: ignore[operator]
        targets = np.where(trained[1:], tokens[1:], np.int32(IGNORED))
        if not trained[1:].any():
            if long:
                self._note("cut_away", where)
            else:
                self.add_broken(where, "expected tokens to train on, found none: is its answer empty?")
            return
        for name in ("cut",) * long + notes:
            self._note(name, where)
        self._tokens.append(tokens[:-1])
        self._targets.append(targets)

    def add_broken(self, where: str, problem: str) -> None:
        """Take up a record that is none."""
        if self._broken == "refuse":
            self._refuse(where, problem)
        else:
            self._note("broken", f"{where}: {problem}")

    def check(self) -> None:
        """End the search, where enough problems have been found to refuse the files.

        Raises:
            ValueError: They have.
        """
        if len(self._problems) >= _ENOUGH:
            raise ValueError(self._complaint(f"{len(self._problems)} lines or more"))

    def finish(self, files: list[Path]) -> None:
        """Put the samples behind one another.

        Raises:
            ValueError: Records are refused, or nothing is left.
        """
        if self._problems:
            raise ValueError(self._complaint(f"{len(self._problems)} lines"))
        if not self._tokens:
            told = "".join(f"; {each}" for each in self._told())
            raise ValueError(f"file: expected samples in {', '.join(map(str, files))}, found none{told}")
        self._ends = np.cumsum([0, *map(len, self._tokens)], dtype=np.int64)
        self.tokens, self.targets = np.concatenate(self._tokens), np.concatenate(self._targets)
        self._tokens, self._targets = [], []

    def _refuse(self, where: str, problem: str) -> None:
        self._problems.append(f"{where}: {problem}")

    def _complaint(self, count: str) -> str:
        if len(self._problems) == 1:
            return f"file: {self._problems[0]}"
        shown = [*self._problems[:_SHOWN], *(["..."] if len(self._problems) > _SHOWN else [])]
        return "\n  ".join([f"file: {count} cannot be trained on; broken: skip leaves broken ones out:", *shown])

    def _note(self, name: str, where: str) -> None:
        self.notes.setdefault(name, {"count": 0, "first": where})["count"] += 1

    def _told(self) -> list[str]:
        return [
            f"{each['count']:,} {_NOTES[name].format(limit=self.limit)}, the first: {each['first']}"
            for name, each in self.notes.items()
        ]

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """The length of each sample, int64 [samples]."""
        return np.diff(self._ends)

    def __len__(self) -> int:
        return len(self._tokens) or len(self._ends) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray[Any, Any]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected a sample from 0 to {len(self) - 1}, got {index}")
        start, stop = self._ends[index % len(self)], self._ends[index % len(self) + 1]
        return {"tokens": self.tokens[start:stop], "targets": self.targets[start:stop]}

    def summary(self) -> dict[str, Any]:
        """Return what there is, and what was left out, as plain values."""
        lengths = self.lengths
        counts, edges = np.histogram(lengths, bins=min(_BINS, max(1, int(np.ptp(lengths)))))
        return {
            "samples": len(self),
            "tokens": int(lengths.sum()),
            "trained_tokens": int((self.targets != IGNORED).sum()),
            "shortest": int(lengths.min()),
            "median": int(np.median(lengths)),
            "longest": int(lengths.max()),
            "histogram": {"edges": edges.round(1).tolist(), "counts": counts.tolist()},
            "left_out": self._told(),
        }

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all of it as arrays, for a file."""
        return {"tokens": self.tokens, "targets": self.targets, "ends": self._ends}

    def load(self, arrays: Any, notes: dict[str, dict[str, Any]]) -> None:
        """Take all of it from arrays, as `arrays` gave them."""
        self.tokens, self.targets, self._ends = arrays["tokens"], arrays["targets"], arrays["ends"]
        self.notes = notes
