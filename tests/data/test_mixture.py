"""Several datasets as one: shares, lengths, batches, and a training that goes on from the middle."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from faststep.data import Loader, Pack
from faststep.recipes import Mixture


class Rows(list):
    """Arrays of ones, whose lengths are known."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(np.full(each, each) for each in lengths)
        self.lengths = np.array(lengths)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_shares() -> None:
    first, second = [f"a{i}" for i in range(10)], [f"b{i}" for i in range(100)]
    mixed = list(Mixture([first, second], [1, 1]))
    assert Counter(each[0] for each in mixed) == {"a": 100, "b": 100}
    assert set(mixed) == {*first, *second}
    assert [each[0] for each in mixed[:4]] == ["a", "b", "a", "b"]
    assert set(Counter(each for each in mixed if each[0] == "a").values()) == {10}
    assert Counter(each[0] for each in Mixture([first, second], [1, 4])) == {"a": 25, "b": 100}
    assert Counter(Mixture([first, second])) == Counter(first + second)


def test_lengths_and_epochs() -> None:
    sources = [Rows([3, 1]), Rows([5, 2, 4])]
    mixed = Mixture(list(sources), [2, 1])
    assert mixed.lengths is not None
    assert [len(each) for each in mixed] == mixed.lengths.tolist()
    loader = Loader(mixed, batch_size=2, shuffle=True, collate=Pack(length=8))
    whole = [batch["tokens"].tolist() for batch in loader]
    again = Loader(mixed, batch_size=2, shuffle=True, collate=Pack(length=8))
    next(iter(again))
    rest = Loader(Mixture(list(sources), [2, 1]), batch_size=2, shuffle=True, collate=Pack(length=8))
    rest.load_state(again.state)
    assert [batch["tokens"].tolist() for batch in rest] == whole[1:]
    assert sources[0].epochs
    assert sources[0].epochs == sources[1].epochs
    assert Mixture([Rows([3]), ["a"]]).lengths is None


def test_refusals() -> None:
    for sources, weights, message in (
        ([], None, "sources: expected a dataset or more"),
        ([[1], [2]], [1], "weights: expected 2 numbers above 0"),
        ([[1], [2]], [1, 0], "weights: expected 2 numbers above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Mixture(sources, weights)
    with pytest.raises(TypeError, match="sources: expected sequences, got int for number 1"):
        Mixture([[1], 2])
