"""A step with a group, in real processes: the numbers of one process, and errors that all ranks hear of."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import pytest
from support.places import TESTS
from support.ring import run

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not mx.distributed.is_available("ring"), reason="this MLX has no ring of processes"
)
CASES = TESTS / "support" / "rank_cases.py"


@pytest.mark.parametrize(
    ("ranks", "pattern"),
    [
        (2, "."),
        (4, "^(joined|weighted_window|uneven|half_precision|a_signal|an_exception|another_later|sharded_optimizer)"),
    ],
    ids=["two", "four"],
)
def test_cases(ranks: int, pattern: str, tmp_path: Path) -> None:
    """Of many cases in a row, in each rank: those of `rank_cases` whose names the pattern finds."""
    said = run(ranks, tmp_path, CASES, pattern, tmp_path)
    assert len({each.count(" s\n") for each in said}) == 1
    assert said[0].count(" s\n") >= 6
