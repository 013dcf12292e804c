"""stack and Pad: what a batch holds, and what is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from faststep.data import Loader, Pad, stack
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

DTYPES = [np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
def test_stack_is_numpys(data: st.DataObject, dtype: Any, shape: tuple[int, ...]) -> None:
    items = data.draw(st.lists(hnp.arrays(dtype, shape), min_size=1, max_size=4))
    batch = stack(items)
    assert np.array(batch).dtype == dtype
    np.testing.assert_array_equal(np.array(batch), np.stack(items))


def test_stack_takes_numbers_lists_and_trees() -> None:
    batch = stack([{"a": (1, 2.5), "b": [True, False]}, {"b": [False, False], "a": (3, 4.5)}][:1] * 2)
    assert [leaf.dtype for leaf in (*batch["a"], batch["b"])] == [mx.int32, mx.float32, mx.bool_]
    assert batch["b"].tolist() == [[True, False]] * 2


REFUSED: dict[str, tuple[list[Any], type[Exception], str]] = {
    "text": ([{"text": "a"}], TypeError, r"item\['text'\]: expected numbers, got str"),
    "none": ([(1, None)], TypeError, r"item\[1\]: expected numbers, got NoneType"),
    "shapes": ([np.ones(2), np.ones(3)], ValueError, r"item: expected \[2\] .* got \[3\] in its item 1; .*Pad"),
    "MLX shapes": ([mx.ones(2), mx.ones(3)], ValueError, r"item: expected \[2\] .* got \[3\] in its item 1"),
    "keys": ([{"a": 1}, {"b": 1}], ValueError, r"item: expected \['a'\] .* got \['b'\] in its item 1"),
    "kinds": ([(1, 2), 3], ValueError, r"item: expected \[0\], \[1\] .* got int in its item 1"),
    "ragged": ([[[1], [1, 2]]], TypeError, "unequal lists"),
    "large": ([2**40], TypeError, "beyond int32"),
}


@pytest.mark.parametrize(("items", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_stack_names_what_it_cannot_take(items: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stack(items)


lengths = st.lists(st.integers(0, 20), min_size=1, max_size=30)


@settings(deadline=None, max_examples=100)
@given(lengths, st.integers(1, 8), st.booleans())
def test_padding_is_taken_off_by_the_mask(sizes: list[int], multiple: int, deep: bool) -> None:
    shape = (2,) if deep else ()
    items = [np.random.default_rng(i).normal(size=(n, *shape)).astype(np.float32) for i, n in enumerate(sizes)]
    batch, mask, lengths = Pad(multiple=multiple, value=np.nan)(items)
    assert batch.shape[1] % multiple == 0
    assert max(max(sizes), 1) <= batch.shape[1] < max(max(sizes), 1) + multiple
    assert lengths.tolist() == sizes
    for row, keep, item in zip(np.array(batch), np.array(mask), items, strict=True):
        np.testing.assert_array_equal(row[keep], item)
        assert np.isnan(row[~keep]).all()
        assert keep[: len(item)].all()


def test_buckets_keys_and_values() -> None:
    items = [{"tokens": [1, 2, 3], "labels": [4, 5, 6], "features": np.ones(3), "weight": 0.5}]
    pad = Pad(buckets=[2, 4, 8], keys=["tokens", "labels"], value={"labels": -100}, lengths=False)
    batch = pad(items)
    assert batch["tokens"].tolist() == [[1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[4, 5, 6, -100]]
    assert (batch["features"].shape, batch["weight"].tolist()) == ((1, 3), [0.5])
    assert list(batch) == ["tokens", "labels", "features", "weight", "mask"]
    with pytest.raises(ValueError, match=r"length 9 is longer than the last of buckets=\[2, 4, 8\]"):
        pad([{"tokens": range(9), "labels": range(9), "features": np.ones(3), "weight": 0.5}])
    assert Pad(mask=False, lengths=False)([[1], [2]]).shape == (2, 32)
    x, y, mask, sizes = Pad(multiple=2)([(np.ones((3, 5)), 1), (np.ones((1, 5)), 0)])
    assert (x.shape, y.tolist(), mask.shape, sizes.tolist()) == ((2, 4, 5), [1, 0], (2, 4), [3, 1])


def test_a_window_makes_batches_of_similar_lengths() -> None:
    sizes = np.random.default_rng(0).integers(1, 200, 640)
    items = [np.zeros(n, dtype=np.int32) for n in sizes]

    def run(window: int, **options: Any) -> tuple[float, list[list[int]]]:
        loader = Loader(items, 16, shuffle=True, collate=Pad(multiple=8, window=window), **options)
        rows = [lengths.tolist() for _, _, lengths in loader]
        assert loader.stats.efficiency
        return loader.stats.efficiency, rows

    (plain, _), (bucketed, rows) = run(0), run(20)
    assert plain < 0.6 < 0.9 < bucketed
    assert run(20)[1] == rows != run(20, seed=1)[1]
    assert sorted(n for row in rows for n in row) == sorted(sizes.tolist())
    longest = [max(row) for row in rows[:20]]
    assert longest != sorted(longest)  # the batches of a window are in random order


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "multiple": ({"multiple": 0}, "multiple: expected a positive int, got 0"),
    "window": ({"window": -1}, "window"),
    "buckets": ({"buckets": [4, 2]}, "buckets: expected positive ints, ascending"),
    "no buckets": ({"buckets": []}, "buckets"),
    "both": ({"buckets": [4], "multiple": 8}, "multiple and buckets"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pad(**arguments)


ITEMS: dict[str, tuple[Pad, Any, str]] = {
    "unequal": (Pad(), {"a": [1, 2], "b": [1]}, r"one length in an item, got 'a': \[2\], 'b': \[1\]; `keys`"),
    "scalar": (Pad(), 3, "one length in an item, got none"),
    "missing": (Pad(keys=["x"]), {"a": [1]}, "expected an item with 'x', got one with 'a'"),
    "taken": (Pad(), {"mask": [1]}, "a key 'mask' already"),
}


@pytest.mark.parametrize(("pad", "item", "message"), ITEMS.values(), ids=ITEMS)
def test_bad_items_are_named(pad: Pad, item: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(iter(Loader([item], collate=pad)))


def test_an_item_of_another_length_than_was_said_is_refused() -> None:
    loader = Loader([[1, 2], [3]], 2, collate=Pad(window=1), lengths=[2, 2])
    with pytest.raises(ValueError, match="lengths: expected item 1 of length 2, got one of 1"):
        next(iter(loader))
    with pytest.raises(ValueError, match="lengths: expected 2 ints"):
        next(iter(Loader([[1, 2], [3]], 2, collate=Pad(window=1), lengths=[2])))


def test_columns_have_one_length_and_are_read_once_for_it() -> None:
    loader = Loader({"tokens": np.ones((6, 5), dtype=np.int32)}, 2, collate=Pad(multiple=4, window=2))
    assert [batch["tokens"].shape for batch in loader] == [(2, 8)] * 3
