"""The loader: sources, order, epochs, arguments, and what it counts."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from faststep.data import Loader, Pack, Pad
from support.loaded import epoch, plain
from support.places import Child

NUMBERS = np.arange(10)
Pair = namedtuple("Pair", "x y")
GOLDEN = [[6, 3, 4, 9, 0, 2, 8, 7, 5, 1], [1, 3, 2, 7, 8, 4, 5, 9, 0, 6]]  # seed 7, epochs 0 and 1


class Squares:
    """A map-style dataset."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert type(index) is int
        self.reads.append(index)
        return {"x": np.full(2, index), "y": index**2}


class ManyAtOnce(Squares):
    """As PyTorch and Hugging Face datasets give a batch's items."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [super(ManyAtOnce, self).__getitem__(i) for i in indices]

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("one by one")


SOURCES = {
    "list of arrays": [np.array([i, i]) for i in range(5)],
    "list of lists": [[i, i] for i in range(5)],
    "list of MLX arrays": [mx.array([i, i]) for i in range(5)],
    "numpy": np.stack([np.arange(5), np.arange(5)], axis=1),
    "MLX": mx.stack([mx.arange(5), mx.arange(5)], axis=1),
    "iterable": {i: 0 for i in range(5)}.keys(),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_is_read_in_its_order(source: Any, workers: int) -> None:
    loader = Loader(source, batch_size=2, workers=workers)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert np.concatenate([np.array(batch) for batch in batches]).reshape(5, -1)[:, 0].tolist() == list(range(5))
    assert (loader.epoch, loader.position) == (1, 0)


def test_columns_are_stacked_by_their_structure() -> None:
    columns = {"x": np.arange(4.0), "pair": (mx.arange(4), np.arange(8, dtype=np.uint16).reshape(4, 2))}
    (batch,) = Loader(columns, batch_size=4)
    assert batch["x"].dtype == mx.float32
    assert batch["pair"][1].dtype == mx.uint16
    assert plain(batch)["pair.1"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    x, y = next(iter(Loader((np.arange(4), np.ones(4)), batch_size=3)))
    assert (x.tolist(), y.shape) == ([0, 1, 2], (3,))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_are_columns_by_name(library: str) -> None:
    frames = pytest.importorskip(library, reason=f"{library} is not installed")
    values = {"x": [0.5, 1.5, 2.5], "y": [1, 2, 3], "good": [True, False, True]}
    loader = Loader(frames.DataFrame(values), batch_size=2)
    first, second = loader
    assert (first["x"].dtype, first["y"].dtype, first["good"].dtype) == (mx.float32, mx.int64, mx.bool_)
    assert [plain(first), plain(second)] == [
        {name: column[:2] for name, column in values.items()},
        {name: column[2:] for name, column in values.items()},
    ]
    with pytest.raises(TypeError, match="expected a DataFrame with columns of numbers, got name; choose columns"):
        Loader(frames.DataFrame({"x": [1], "name": ["a"]}))


def test_bfloat16_columns_and_items_keep_their_dtype() -> None:
    array = mx.arange(4).astype(mx.bfloat16)
    assert next(iter(Loader(array, batch_size=4))).dtype == mx.bfloat16
    rows = list(array)
    mx.eval(rows)
    assert next(iter(Loader(rows, batch_size=4, workers=1))).dtype == mx.bfloat16


def test_items_of_a_dataset_are_read_once_each() -> None:
    for kind in (Squares, ManyAtOnce):
        data = kind(7)
        batches = epoch(Loader(data, batch_size=3, shuffle=True))
        assert sorted(data.reads) == list(range(7))
        assert sorted(y for batch in batches for y in batch["y"]) == [i**2 for i in range(7)]


def test_a_named_tuple_stays_one() -> None:
    (batch,) = Loader([Pair(1, 2.0), Pair(3, 4.0)], batch_size=2)
    assert isinstance(batch, Pair)
    assert batch.y.tolist() == [2.0, 4.0]


def test_hugging_face_datasets() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets (Hugging Face) is not installed")
    data = datasets.Dataset.from_dict({"input_ids": [[i] * (i + 1) for i in range(6)], "label": list(range(6))})
    loader = Loader(data, batch_size=4, collate=Pad(multiple=2), workers=2)
    first, second = loader
    assert first["input_ids"].shape == (4, 4)
    assert second["lengths"].tolist() == [5, 6]
    assert first["label"].tolist() == [0, 1, 2, 3]
    stream = Loader(data.select_columns("label").to_iterable_dataset(), batch_size=2)
    expected = [{"label": [0, 1]}, {"label": [2, 3]}, {"label": [4, 5]}]
    assert epoch(stream) == expected
    next(iter(stream))
    again = Loader(data.select_columns("label").to_iterable_dataset(), batch_size=2)
    again.load_state(stream.state)
    assert (again.epoch, epoch(again), epoch(again)) == (1, expected[1:], expected)


def test_shuffled_order_never_changes() -> None:
    """A checkpoint of another version of numpy, machine or release must find the same batches."""
    loader = Loader(NUMBERS, batch_size=10, shuffle=True, seed=7)
    assert [batch.tolist() for _ in range(2) for batch in loader] == GOLDEN


def test_the_order_has_nothing_to_do_with_other_random_numbers() -> None:
    first = epoch(Loader(NUMBERS, batch_size=3, shuffle=True))
    np.random.seed(1)
    mx.random.seed(1)
    before = mx.random.state[0].tolist()
    loader = Loader(NUMBERS, batch_size=3, shuffle=True, workers=2)
    assert epoch(loader) == first
    assert mx.random.state[0].tolist() == before
    assert epoch(loader) != first


def test_len_and_drop_last() -> None:
    assert len(Loader(NUMBERS, batch_size=4)) == 3
    assert len(Loader(NUMBERS, batch_size=4, drop_last=True)) == 2
    assert [len(batch) for batch in Loader(NUMBERS, batch_size=4, drop_last=True)] == [4, 4]
    with pytest.raises(TypeError, match="iterable"):
        len(Loader(iter(range(3))))


def test_a_loop_that_was_left_goes_on() -> None:
    loader = Loader(NUMBERS, batch_size=2, workers=1)
    for batch in loader:
        assert batch.tolist() == [0, 1]
        break
    assert (loader.epoch, loader.position) == (0, 1)
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5], [6, 7], [8, 9]]
    assert (loader.epoch, loader.position) == (1, 0)


def test_a_later_loop_closes_the_one_before() -> None:
    loader = Loader(NUMBERS, batch_size=2, workers=1)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second).tolist() == [2, 3]
    with pytest.raises(RuntimeError, match="closed"):
        next(first)
    assert next(second).tolist() == [4, 5]
    loader.close()


def test_a_dataset_that_grows_is_measured_at_each_epoch() -> None:
    items = [1, 2, 3]
    loader = Loader(items, batch_size=2, shuffle=True)
    for batch in loader:
        items.append(int(batch[0]))
    assert (len(items), len(loader)) == (5, 3)
    assert sum(len(batch) for batch in loader) == 5
    items.clear()
    with pytest.raises(ValueError, match="empty"):
        next(iter(loader))


def test_set_epoch_is_told() -> None:
    told = []

    class Told(Squares):
        def set_epoch(self, number: int) -> None:
            told.append(number)

    loader = Loader(Told(2), batch_size=2)
    for _ in range(3):
        epoch(loader)
    assert told == [0, 1, 2]


def test_stats() -> None:
    loader = Loader([np.ones(n) for n in (1, 2, 3)], batch_size=2, collate=Pad(multiple=4))
    assert (loader.stats.efficiency, loader.stats.wait_share) == (None, None)
    list(loader)
    stats = loader.stats
    assert (stats.batches, stats.items, stats.real, stats.elements, stats.efficiency) == (2, 3, 6, 12, 0.5)
    assert 0 < stats.wait <= stats.seconds
    assert stats.wait_share == stats.wait / stats.seconds
    list(loader)
    assert loader.stats.batches == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_all_that_a_collate_makes_is_evaluated_arrays(workers: int) -> None:
    def collate(items: list[int]) -> list[Any]:
        return [mx.array(items) + 1, np.array(items, dtype=np.float64), {"n": len(items), "text": "a", "none": None}]

    batch = next(iter(Loader(NUMBERS.tolist(), batch_size=2, collate=collate, workers=workers)))
    assert isinstance(batch, tuple)
    lazy, array, rest = batch
    assert rest == {"n": 2, "text": "a", "none": None}
    assert (array.dtype, lazy.tolist()) == (mx.float32, [1, 2])


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "batch_size": ({"batch_size": 0}, ValueError, "batch_size: expected 1 or more"),
    "type": ({"batch_size": 2.0}, TypeError, "batch_size: expected an int, got 2.0"),
    "seed": ({"seed": -1}, ValueError, "seed"),
    "workers": ({"workers": -1}, ValueError, "workers"),
    "prefetch": ({"prefetch": 0}, ValueError, "prefetch"),
    "rank": ({"rank": 2, "world_size": 2}, ValueError, "rank: expected less than world_size=2, got 2"),
    "shuffle": ({"shuffle": 1}, TypeError, "shuffle"),
    "collate": ({"collate": 3}, TypeError, "collate"),
    "class": ({"collate": Pad}, TypeError, r"Pad\(\.\.\.\)"),
    "empty": ({"source": []}, ValueError, "empty"),
    "too large": ({"batch_size": 11, "drop_last": True}, ValueError, "10 items for 1 x 11"),
    "too many ranks": ({"world_size": 11}, ValueError, "world_size=11"),
    "text": ({"source": "abc"}, TypeError, "str"),
    "number": ({"source": 3}, TypeError, "__getitem__.*int"),
    "mapping": ({"source": {"x": [1, 2]}}, TypeError, "other values than arrays"),
    "unequal": (
        {"source": {"x": np.ones(3), "y": np.ones(4)}},
        ValueError,
        r"source\['x'\]: \[3\], source\['y'\]: \[4\]",
    ),
    "scalar": ({"source": np.array(1)}, ValueError, "source"),
    "shuffled iterable": ({"source": iter([1]), "shuffle": True}, ValueError, "shuffle: an iterable"),
    "lengths": ({"lengths": [1]}, ValueError, "only Pack and Pad"),
    "lengths of an iterable": ({"source": iter([1]), "collate": Pack(4), "lengths": [1]}, ValueError, "iterable"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Loader(**{"source": NUMBERS, **arguments})


def test_what_is_no_batch_is_refused() -> None:
    loader = Loader(NUMBERS, collate=lambda items: "text")
    with pytest.raises(TypeError, match=r"<lambda>: expected an array, or a tuple or dict of arrays, got str"):
        next(iter(loader))


def test_importing_it_takes_nothing_of_the_extras(child: Child) -> None:
    code = "import sys, faststep.data; print({'pydantic', 'yaml', 'rich', 'typer', 'matplotlib'} & set(sys.modules))"
    assert child(code).stdout.strip() == "set()"


def test_a_loader_names_its_source_its_options_and_its_place() -> None:
    loader = Loader(list(range(10)), batch_size=4, shuffle=True, seed=3, rank=0, world_size=2)
    next(iter(loader))
    assert repr(loader) == (
        "Loader(list, batch_size=4, shuffle=True, seed=3, rank=0, world_size=2) at batch 1 of epoch 0"
    )
    assert repr(Loader(iter([1, 2]))) == "Loader(list_iterator, batch_size=1) at batch 0 of epoch 0"


class Tensor:
    """A tensor of another library, as NumPy sees it."""

    def __init__(self, values: list[float]) -> None:
        self.values = np.array(values, np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values


def test_batches_that_another_loader_has_made() -> None:
    """As a PyTorch DataLoader gives them: tensors in a list."""
    made = [[Tensor([1, 2]), Tensor([3])], [Tensor([4, 5]), Tensor([6])]]
    loader = Loader(IterOf(made), collate=lambda items: items[0])
    found = [[each.tolist() for each in batch] for batch in loader]
    assert found == [[[1, 2], [3]], [[4, 5], [6]]]
    assert all(isinstance(each, mx.array) for batch in loader for each in batch)
    again = Loader(IterOf(made), collate=lambda items: items[0])
    next(iter(again))
    rest = Loader(IterOf(made), collate=lambda items: items[0])
    rest.load_state(again.state)
    assert [[each.tolist() for each in batch] for batch in rest] == found[1:]


class IterOf:
    """An iterable that is no sequence."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)
