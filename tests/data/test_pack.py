"""Packing: nothing is lost, nothing crosses from one document to the next."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep.data import Loader, Pack
from faststep.data._pack import best_fit
from hypothesis import given, settings
from hypothesis import strategies as st

sizes = st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(any)


def documents(lengths: list[int]) -> list[np.ndarray[Any, Any]]:
    return [np.arange(n, dtype=np.int32) + 100 * i for i, n in enumerate(lengths)]


def unpacked(batch: dict[str, mx.array]) -> list[dict[str, list[int]]]:
    """Return the documents of a batch with all that belongs to them."""
    arrays = {name: np.array(array) for name, array in batch.items()}
    found = []
    for row, segments in enumerate(arrays["segments"]):
        for number in range(1, segments.max() + 1):
            found.append({name: array[row][segments == number].tolist() for name, array in arrays.items()})
    return found


@settings(deadline=None, max_examples=200)
@given(sizes, st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_what_is_packed_comes_out_again(
    lengths: list[int], length: int, window: int, batch_size: int, shuffle: bool
) -> None:
    items = documents(lengths)
    loader = Loader(items, batch_size, shuffle=shuffle, collate=Pack(length, window=window, split=True))
    batches = list(loader)
    pieces = [piece for batch in batches for piece in unpacked(batch)]
    assert all(piece["positions"] == list(range(len(piece["tokens"]))) for piece in pieces)
    tokens = sorted(piece["tokens"] for piece in pieces)
    expected = [item[i : i + length].tolist() for item in items for i in range(0, len(item), length)]
    assert tokens == sorted(expected)
    for piece in pieces:  # the next token of the same document, or none at its end
        document = items[piece["tokens"][0] // 100].tolist()
        following = [
            document[token % 100 + 1] if token % 100 + 1 < len(document) else -100 for token in piece["tokens"]
        ]
        assert piece["targets"] == following
        assert piece["mask"] == [target != -100 for target in following]
    for batch in batches:
        empty = np.array(batch["segments"]) == 0
        for name, value in {"tokens": 0, "targets": -100, "mask": 0, "positions": 0}.items():
            assert (np.array(batch[name])[empty] == value).all()
    assert (loader.stats.real, loader.stats.items) == (sum(lengths), len(expected))
    assert loader.stats.elements == sum(batch["tokens"].size for batch in batches)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 50), max_size=60))
def test_best_fit_uses_no_more_rows_than_its_bound(lengths: list[int]) -> None:
    rows = best_fit(lengths, 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert all(n <= 50 for n in filled)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 50) + 4 or min(filled) > 25


def test_best_fit_places_longest_first_where_least_room_is_left() -> None:
    assert best_fit([3, 7, 5, 3, 2], 10) == [[0, 1], [2, 3, 4]]
    assert best_fit([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]


def test_a_long_document_is_an_error_without_split() -> None:
    loader = Loader(documents([3, 9]), 1, collate=Pack(8))
    with pytest.raises(ValueError, match=r"a document of 9 tokens does not fit into a row of 8.*split=True") as caught:
        next(iter(loader))
    assert caught.value.__notes__ == ["faststep.data: item 1"]


def test_keys_are_packed_alike_and_labels_are_the_users() -> None:
    items = [
        {"ids": [1, 2], "labels": [-100, 2], "vector": np.ones((2, 3))},
        {"ids": [5], "labels": [5], "vector": [[2.0] * 3]},
    ]
    (batch,) = Loader(items, 2, collate=Pack(4, targets=False, value=-1))
    assert list(batch) == ["ids", "labels", "vector", "mask", "segments", "positions"]
    assert batch["ids"].tolist() == [[1, 2, 5, -1]]
    assert batch["labels"].tolist() == [[-100, 2, 5, -1]]
    assert batch["vector"].shape == (1, 4, 3)
    assert batch["mask"].tolist() == [[True, True, True, False]]


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "tuple": (([1], [2]), TypeError, "name its arrays"),
    "unequal": ({"a": [1], "b": [1, 2]}, ValueError, r"got a: \[1\], b: \[2\]"),
    "number": (3, ValueError, "tokens"),
    "deep": ([[1], [2]], ValueError, r"tokens: \[2, 1\]"),
    "taken": ({"mask": [1]}, ValueError, "a key 'mask' already"),
    "floats": ([1.5], TypeError, "tokens"),
}


@pytest.mark.parametrize(("item", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_items_are_named(item: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        next(iter(Loader([item], collate=Pack(4))))


@pytest.mark.parametrize("arguments", [{"length": 0}, {"length": 4, "window": 0}, {"length": 2.0}])
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a positive int"):
        Pack(**arguments)


def test_nothing_but_empty_documents_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 items make 0 rows"):
        next(iter(Loader([np.zeros(0, dtype=np.int32)] * 2, collate=Pack(4))))


def test_many_short_documents_fill_their_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 2000).tolist()
    loader = Loader([np.zeros(n, dtype=np.int32) for n in lengths], 8, shuffle=True, collate=Pack(256))
    assert len(list(loader)) == len(loader) or loader.epoch == 1
    assert loader.stats.efficiency
    assert loader.stats.efficiency > 0.97


class Attention(nn.Module):
    """One layer of attention with positions, as small as it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.q, self.head = nn.Linear(16, 16), nn.Linear(16, 50)

    def __call__(self, tokens: mx.array, positions: mx.array, allowed: mx.array) -> mx.array:
        x = self.tokens(tokens) + self.positions(positions)
        scores = mx.where(allowed, self.q(x) @ x.swapaxes(-1, -2), -1e9)
        return self.head(mx.softmax(scores, axis=-1) @ x)


def test_a_loss_over_packed_rows_is_that_over_documents() -> None:
    model = Attention()
    texts = [np.random.default_rng(i).integers(0, 50, n).astype(np.int32) for i, n in enumerate([5, 3, 7, 2, 9, 4])]

    def losses(
        tokens: mx.array, targets: mx.array, mask: mx.array, segments: mx.array, positions: mx.array
    ) -> mx.array:
        length = tokens.shape[1]
        allowed = (segments[:, :, None] == segments[:, None, :]) & mx.tril(mx.ones((length, length), dtype=mx.bool_))
        logits = model(tokens, positions, allowed)
        return nn.losses.cross_entropy(logits, mx.where(mask, targets, 0), weights=mask, reduction="sum")

    packed = Pack(12)(texts)
    assert packed["tokens"].shape[0] < len(texts)
    alone = sum(losses(**Pack(12)([text])).item() for text in texts)
    assert losses(**packed).item() == pytest.approx(alone, rel=1e-5)
