"""A model that the ranks of a ring share: the numbers of one process, and errors that all ranks hear of."""

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
CASES = TESTS / "support" / "shard_cases.py"
SAME = "plain|clipped|window|skips|recomputed|average|half_precision|a_model_of_mlx_lm"


@pytest.mark.parametrize(
    ("ranks", "pattern"),
    [
        (2, f"^({SAME})$"),
        (2, f"^(?!begun|continued|({SAME})$)"),
        (4, "^(clipped|a_shard|an_error|another|replicas_within)"),
    ],
    ids=["same", "two", "four"],
)
def test_cases(ranks: int, pattern: str, tmp_path: Path) -> None:
    """Of many cases in a row, in each rank: those of `shard_cases` whose names the pattern finds."""
    said = run(ranks, tmp_path, CASES, pattern, tmp_path)
    assert len({each.count(" s\n") for each in said}) == 1
    assert said[0].count(" s\n") >= 5


def test_checkpoints(tmp_path: Path) -> None:
    """What two ranks have saved is gone on with by one, two and four."""
    run(2, tmp_path, CASES, "^begun$", tmp_path)
    for ranks in (1, 2, 4):
        run(ranks, tmp_path, CASES, "^continued$", tmp_path)
