"""Checks of all batches that there is time for: labels and tokens out of range, equal batches, one class a batch."""

from __future__ import annotations

import hashlib
import itertools
import time
from typing import Any

import mlx.core as mx
import numpy as np

from faststep._step import call_with
from faststep.doctor._finding import Finding
from faststep.doctor._held import is_floating, is_whole, leaves_of, values_of
from faststep.doctor._loss_functions import LossCalls, watching_losses
from faststep.doctor._modules import Indices, bad_rows, watching
from faststep.doctor._recorder import Recorder
from faststep.doctor._subject import Subject

_MOST = 2000  # batches
_PURE, _MIXED = 0.9, 0.7  # shares of the most frequent class, in a batch and in all of them
_LEAST_BATCHES, _LEAST_ROWS, _LEAST_LABELS = 6, 8, 256


def look(subject: Subject, record: Recorder) -> bool:
    """Compute the loss of batches as a graph, without evaluating it; return whether all of them can be used."""
    labels, contents, count = _Labels(), list[bytes](), 0
    end = time.perf_counter() + record.seconds
    for batch in itertools.islice(itertools.chain(subject.some(), _others(subject)), _MOST):
        indices, calls, before = Indices(), LossCalls(), subject.model.parameters()
        with watching(subject.model, indices), watching_losses(calls):
            call_with(batch, subject.loss_fn, subject.model)
        subject.model.update(before)
        count += 1
        if indices.findings or calls.unusable:
            for finding in [*indices.findings, *calls.findings]:
                record.find(_in_batch(finding, count))
            record.say("batches", looked_at=count)
            return False
        bad = _not_finite(batch) if count > len(subject.some()) else None  # the numbers of the first ones tell
        if bad is not None:
            record.find(_in_batch(bad, count))
            record.say("batches", looked_at=count)
            return True
        contents.append(_content(batch))
        labels.add(batch, calls.labels)
        if time.perf_counter() > end:
            break
    record.say("batches", looked_at=count)
    for each in (_standing(contents, subject.batches), labels.finding()):
        if each is not None:
            record.find(each)
    return True


def _others(subject: Subject) -> Any:
    """Yield the batches behind the first ones: an iterable begins anew, a generator goes on."""
    begin = 0 if hasattr(subject.batches, "__next__") else len(subject.taken)
    yield from itertools.islice(subject.batches, begin, None)


def _not_finite(batch: Any) -> Finding | None:
    """Return the finding of an array that is not finite."""
    for name, leaf in leaves_of(batch):
        rows = bad_rows(mx.array(leaf)) if is_floating(leaf) else []
        if rows:
            text = f"{name} has values that are not finite, in samples {', '.join(map(str, rows[:8]))}"
            code = "step = Step(..., nonfinite='skip')   # the default: such a batch changes nothing"
            return Finding("not-finite", "failure", text, "clean the data, or leave such samples out", code)
    return None


def _in_batch(finding: Finding, number: int) -> Finding:
    """Return the finding with the number of the batch, where it is none of the first ones."""
    text = f"batch {number}: {finding.text}"
    return Finding(finding.name, finding.level, text, finding.remedy, finding.code)


def _content(batch: Any) -> bytes:
    """Return what tells batches apart: a digest of all values; empty for a batch without arrays."""
    digest, leaves = hashlib.blake2b(digest_size=16), leaves_of(batch)
    for name, leaf in leaves:
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values_of(leaf)).tobytes())
    return digest.digest() if leaves else b""


def _standing(contents: list[bytes], batches: Any) -> Finding | None:
    """Return the finding of data that give the same batch again and again."""
    if len(contents) < 3 or len(set(contents)) > 1 or not contents[0] or _length(batches) == 1:
        return None
    text = f"the data never change: all {len(contents)} batches that were read are equal"
    remedy = (
        "make each batch of different samples; look for an index that is not used, or a generator that is not advanced"
    )
    return Finding("same-batch", "warning", text, remedy, "for i in order: yield x[i : i + size], y[i : i + size]")


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


class _Labels:
    """The classes of each batch, from the argument that a cross entropy takes as its labels."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._shares: list[float] = []
        self._counts: dict[int, int] = {}

    def add(self, batch: Any, labels: list[np.ndarray[Any, Any]]) -> None:
        """Take note of a batch and of the labels that cross entropies got."""
        for name, leaf in leaves_of(batch):
            if not is_whole(leaf) or leaf.size < _LEAST_ROWS or leaf.size != leaf.shape[0]:
                continue
            values = values_of(leaf).ravel()
            if any(np.array_equal(values, each) for each in labels):
                self._name = name
                classes, counts = np.unique(values, return_counts=True)
                self._shares.append(float(counts.max() / counts.sum()))
                for each, number in zip(classes.tolist(), counts.tolist(), strict=True):
                    self._counts[each] = self._counts.get(each, 0) + number
                return

    def finding(self) -> Finding | None:
        """Return the finding of batches of one class each."""
        count, whole = len(self._shares), sum(self._counts.values())
        if count < _LEAST_BATCHES:
            return None
        remedy = "shuffle the samples once an epoch: a step learns the class that it sees, and forgets the others"
        code = "order = rng.permutation(len(x)); x, y = x[order], y[order]   # or: Loader(..., shuffle=True)"
        pure = sum(share >= _PURE for share in self._shares)
        if max(self._counts.values()) <= _MIXED * whole and pure >= 0.5 * count:
            text = (
                f"the data are sorted: in {pure} of {count} batches {self._name} has one class, together they have "
                f"{len(self._counts)}"
            )
            return Finding("sorted-data", "warning", text, remedy, code)
        if len(self._counts) == 1 and whole >= _LEAST_LABELS:
            text = f"all {whole:,} labels of the first {count} batches are {next(iter(self._counts))}: {self._name}"
            return Finding("sorted-data", "warning", text, f"if there are other classes, {remedy}", code)
        return None
