"""Samples drawn by weights: how often each class comes, by epoch, and behind a resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faststep.data import Loader
from faststep.recipes import Resampled

ROWS = [(np.array([float(i)]), np.array(int(i >= 90))) for i in range(100)]


def classes(loader: Loader) -> Counter[int]:
    return Counter(int(label) for _, y in loader for label in y)


def test_rare_classes_come_as_often() -> None:
    loader = Loader(Resampled(ROWS), batch_size=10, shuffle=True)
    counts = sum((classes(loader) for _ in range(20)), Counter[int]())
    assert counts.total() == 2000
    assert 0.45 < counts[1] / 2000 < 0.55
    named = [{"x": x, "label": y} for x, y in ROWS]
    assert Counter(int(each["label"]) for each in Resampled(named))[1] == Counter(int(y) for _, y in Resampled(ROWS))[1]


def test_weights_of_each_sample(tmp_path: Path) -> None:
    weights = [0.0] * 98 + [3.0, 1.0]
    np.save(tmp_path / "weights.npy", weights)
    for given in (weights, tmp_path / "weights.npy"):
        drawn = Counter(float(x[0]) for x, _ in Resampled(ROWS, given))
        assert set(drawn) == {98.0, 99.0}
        assert drawn[98.0] > 2 * drawn[99.0]


def test_draws_are_of_the_epoch_and_resume() -> None:
    whole = Loader(Resampled(ROWS, seed=3), batch_size=10, shuffle=True)
    epochs = [[x.tolist() for x, _ in whole] for _ in range(3)]
    assert epochs[0] != epochs[1]
    begun = Loader(Resampled(ROWS, seed=3), batch_size=10, shuffle=True)
    list(begun)
    for _, _ in zip(range(4), begun, strict=False):
        pass
    again = Loader(Resampled(ROWS, seed=3), batch_size=10, shuffle=True)
    again.load_state(begun.state)
    assert [x.tolist() for x, _ in again] == epochs[1][begun.position :]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [1.0]}, "weights: expected 100 numbers from 0 on"),
        ({"weights": [-1.0] * 100}, "weights: expected 100 numbers from 0 on"),
        ({"weights": [0.0] * 100}, "not all 0"),
        ({"weights": Path("none.npy")}, "weights: they cannot be read"),
        ({"label": "kind"}, "label: expected a class at 'kind' of each sample"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Resampled(ROWS, **arguments)
    with pytest.raises(TypeError, match="source: expected a sequence"):
        Resampled(3)
