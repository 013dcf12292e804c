"""Properties of the order: ranks share it, workers do not change it, and it goes on after any batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from faststep.data import Loader, Pack, Pad
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loaded import epoch, plain


def first_tokens(items: list[Any]) -> np.ndarray[Any, Any]:
    """Collate by hand, whatever the lengths."""
    return np.array([int(item[0]) for item in items])


COLLATES: dict[str, Callable[[], Any]] = {
    "own": lambda: first_tokens,
    "pad": lambda: Pad(multiple=4),
    "window": lambda: Pad(multiple=4, window=2),
    "pack": lambda: Pack(8, window=7),
    "split": lambda: Pack(4, window=5, split=True),
}


class Texts:
    """Documents whose tokens say which they are; it counts what is read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        self.reads.append(index)
        return np.arange(self.lengths[index]) + 100 * index


class Lines:
    """An iterable that can be gone through again."""

    def __init__(self, lengths: list[int]) -> None:
        self.texts = Texts(lengths)

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        yield from (self.texts[i] for i in range(len(self.texts)))


class Cursor(Lines):
    """An iterable with a state of its own."""

    place = 0

    @property
    def state(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state(self, state: dict[str, int]) -> None:
        self.place = state["place"]
        self.loaded = True

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        if not getattr(self, "loaded", False):
            self.place = 0
        self.loaded = False
        while self.place < len(self.texts):
            self.place += 1
            yield self.texts[self.place - 1]


class CursorDict(Cursor):
    """The same in the words of PyTorch and Hugging Face."""

    state = None  # type: ignore[assignment]
    load_state = None  # type: ignore[assignment]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        Cursor.load_state(self, state)


SOURCES = {"sequence": Texts, "iterable": Lines, "state": Cursor, "state_dict": CursorDict}
lengths = st.lists(st.integers(1, 8), min_size=1, max_size=40)
sizes_of_many = st.lists(st.integers(1, 8), min_size=20, max_size=60)
collates = st.sampled_from(sorted(COLLATES))
kinds = st.sampled_from(sorted(SOURCES))


def tokens(batch: Any) -> list[int]:
    """Return the tokens of a batch, without padding."""
    if isinstance(batch, dict):
        return [int(t) for t in np.array(batch["tokens"])[np.array(batch["segments"]) > 0]]
    if isinstance(batch, tuple):
        return [int(t) for t in np.array(batch[0])[np.array(batch[1])]]
    return [int(t) for t in batch]


def wanted(sizes: list[int], collate: str) -> list[int]:
    """Return all that an epoch must give."""
    return sorted(t + 100 * i for i, n in enumerate(sizes) for t in range(n if collate != "own" else 1))


@settings(deadline=None, max_examples=150)
@given(lengths, collates, kinds, st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_an_epoch_gives_everything_once(
    sizes: list[int], collate: str, kind: str, batch_size: int, shuffle: bool, seed: int
) -> None:
    loader = Loader(
        SOURCES[kind](sizes),
        batch_size,
        shuffle=shuffle and kind == "sequence",
        seed=seed,
        collate=COLLATES[collate](),
    )
    for _ in range(2):
        batches = list(loader)
        assert sorted(t for batch in batches for t in tokens(batch)) == wanted(sizes, collate)
    if kind == "sequence":
        assert len(batches) >= 1


@settings(deadline=None, max_examples=150)
@given(lengths | sizes_of_many, collates, kinds, st.integers(1, 3), st.integers(1, 4), st.booleans(), st.booleans())
def test_ranks_share_an_epoch(
    sizes: list[int], collate: str, kind: str, batch_size: int, world_size: int, shuffle: bool, drop_last: bool
) -> None:
    def of(rank: int, **other: int) -> list[Any]:
        shuffled = shuffle and kind == "sequence"
        numbers = {"batch_size": batch_size, "rank": rank, "world_size": world_size, **other}
        return list(
            Loader(SOURCES[kind](sizes), **numbers, shuffle=shuffled, drop_last=drop_last, collate=COLLATES[collate]())
        )

    try:
        ranks = [of(rank) for rank in range(world_size)]
    except ValueError as error:
        if kind != "sequence" and collate in ("own", "pad", "window"):  # a sequence of as many items fails too
            with pytest.raises(ValueError, match=r"world_size|drop_last"):
                Loader(Texts(sizes), batch_size, world_size=world_size, drop_last=drop_last)
        if any(word in str(error) for word in ("world_size", "drop_last", "every rank", "no item")):
            return
        raise
    assert len({len(batches) for batches in ranks}) == 1
    rounds = [[t for batch in batches for t in tokens(batch)] for batches in zip(*ranks, strict=True)]
    together = [t for each in rounds for t in each]
    assert len(set(together)) == len(together)
    if drop_last:
        assert set(together) <= set(wanted(sizes, collate))
    else:
        assert sorted(together) == wanted(sizes, collate)
    one = of(0, batch_size=batch_size * world_size, world_size=1)
    if kind == "sequence":  # the rounds are the batches of one process with larger batches, but for the last two
        assert [sorted(each) for each in rounds[:-2]] == [sorted(tokens(batch)) for batch in one[: len(rounds) - 2]]


@settings(deadline=None, max_examples=200)
@given(lengths | sizes_of_many, collates, kinds, st.integers(1, 4), st.integers(1, 2), st.booleans(), st.data())
def test_it_goes_on_after_any_batch(
    sizes: list[int], collate: str, kind: str, batch_size: int, world_size: int, shuffle: bool, data: st.DataObject
) -> None:
    def new() -> Loader:
        shuffled = shuffle and kind == "sequence"
        sharing = {"batch_size": batch_size, "world_size": world_size, "rank": world_size - 1}
        return Loader(SOURCES[kind](sizes), shuffle=shuffled, collate=COLLATES[collate](), **sharing)

    try:
        loader = new()
        straight = [epoch(loader) for _ in range(3)]
    except ValueError as error:
        if "world_size" in str(error):
            return
        raise
    loader = new()
    left = data.draw(st.integers(0, 1))
    for _ in range(left):
        epoch(loader)
    position = data.draw(st.integers(0, len(straight[left])))
    batches = iter(loader)
    taken = [plain(next(batches)) for _ in range(position)]
    state = json.loads(json.dumps(loader.state))
    again = new()
    again.load_state(state)
    assert (again.epoch, again.position, again.state) == (left, position, state)
    assert taken + epoch(again) == straight[left]
    assert epoch(again) == straight[left + 1]
    assert [plain(batch) for batch in batches] == straight[left][position:]


@settings(deadline=None, max_examples=30)
@given(lengths, collates, kinds, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_workers_change_nothing(
    sizes: list[int], collate: str, kind: str, batch_size: int, workers: int, prefetch: int
) -> None:
    def new(workers: int) -> Loader:
        options: Any = {"shuffle": kind == "sequence", "workers": workers, "prefetch": prefetch}
        return Loader(SOURCES[kind](sizes), batch_size, collate=COLLATES[collate](), **options)

    alone, loader = new(0), new(workers)
    states = []
    for batch, other in zip(alone, loader, strict=True):
        assert plain(batch) == plain(other)
        states.append((alone.state, loader.state))
    assert all(ours == theirs for ours, theirs in states)
    assert epoch(alone) == epoch(loader)


@pytest.mark.parametrize("workers", [0, 3])
def test_what_was_taken_is_not_read_again(workers: int) -> None:
    loader = Loader(Texts([3] * 100), batch_size=5, shuffle=True, workers=workers, collate=Pack(6, window=10))
    batches = iter(loader)
    taken = {t // 100 for _ in range(4) for t in tokens(next(batches))}
    data = Texts([3] * 100)
    again = Loader(data, batch_size=5, shuffle=True, workers=workers, collate=Pack(6, window=10))
    again.load_state(loader.state)
    rest = list(again)
    loader.close()
    assert set(data.reads) == set(range(100)) - taken
    assert len(rest) == len(again) - 4


def test_a_source_with_a_state_is_not_gone_through_again() -> None:
    loader = Loader(Cursor([2] * 50), batch_size=5, workers=2)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    source = Cursor([2] * 50)
    again = Loader(source, batch_size=5)
    again.load_state(loader.state)
    loader.close()
    assert len(list(again)) == 6
    assert min(source.texts.reads) == 15  # the last batch that was taken is arranged anew, and passed over


def test_an_endless_iterable_is_read_as_far_as_it_is_needed() -> None:
    reads = []

    def endless() -> Iterator[int]:
        for i in range(10**9):
            reads.append(i)
            yield i

    loader = Loader(endless(), batch_size=4, workers=2, prefetch=2)
    with loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(reads) <= 4 * (2 + 2 + 2)
    fresh = Loader(endless(), batch_size=4)
    fresh.load_state(loader.state)
    assert next(iter(fresh)).tolist() == [8, 9, 10, 11]


def test_a_one_shot_iterator_is_gone_through_once() -> None:
    loader = Loader(iter(range(4)), batch_size=2)
    assert len(list(loader)) == 2
    with pytest.raises(ValueError, match="one-shot"):
        list(loader)
    with pytest.raises(ValueError, match="gave no item"):
        list(Loader(iter([])))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"source": Texts([1] * 7)}, "length: 6 in the state, 7 here"),
    "kind": ({"source": Lines([1] * 6)}, "length: 6 in the state, None here"),
    "batch size": ({"batch_size": 3}, "batch_size: 2 in the state, 3 here"),
    "seed": ({"seed": 1}, "seed: 0 in the state, 1 here"),
    "drop_last": ({"drop_last": True}, "drop_last: False in the state, True here"),
    "collate": ({"collate": Pad(window=2)}, r"collate: 'Pad\(multiple=32.*in the state, 'Pad\(.*window=2.*here"),
    "world": ({"world_size": 2}, "world_size: 1 in the state, 2 here"),
    "lengths": ({"source": Texts([2] * 6)}, "lengths: '.*' in the state, '.*' here"),
}


@pytest.mark.parametrize(("other", "message"), OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_loader_is_refused(other: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "shuffle": True, "collate": Pad(window=1)}
    loader = Loader(Texts([1] * 6), **arguments)
    next(iter(loader))
    shuffled = {"shuffle": False} if isinstance(other.get("source"), Lines) else {}
    another = Loader(**{"source": Texts([1] * 6), **arguments, **other, **shuffled})
    before = another.state
    with pytest.raises(ValueError, match=message):
        another.load_state(loader.state)
    assert another.state == before


def test_a_place_of_a_stream_is_one_of_a_stream() -> None:
    lines, texts = (Loader(source([1] * 6), batch_size=2) for source in (Lines, Texts))
    next(iter(lines))
    next(iter(texts))
    for loader, stream in ((lines, None), (texts, lines.state["stream"])):
        with pytest.raises(ValueError, match="load_state: stream"):
            loader.load_state({**loader.state, "stream": stream})


garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["version", "epoch", "position", "stream", "of", ""]), garbage, kinds)
def test_a_broken_state_is_refused_or_is_none(key: str, value: Any, kind: str) -> None:
    loader = Loader(SOURCES[kind]([2] * 6), batch_size=2, collate=Pad(multiple=2))
    next(iter(loader))
    state = loader.state
    another = Loader(SOURCES[kind]([2] * 6), batch_size=2, collate=Pad(multiple=2))
    before = another.state
    broken = {**state, key: value} if key else value
    try:
        another.load_state(broken)
    except ValueError as error:
        if "load_state" not in str(error) or another.state != before:
            raise
