"""A rank that dies or hangs: the others say so, at which update, and end."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from faststep._command import HUNG
from support.places import TESTS
from support.ring import start

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not mx.distributed.is_available("ring"), reason="this MLX has no ring of processes"
)


@pytest.mark.parametrize(
    ("ranks", "how", "code", "words"),
    [
        (4, "SIGKILL", 1, "RankError: update 21: rank {rank} of 4 has lost the others"),
        (2, "SIGSTOP", HUNG, "exchanging arrays with other ranks"),
        (2, "gradients", HUNG, "exchanging arrays with other ranks"),
        (2, "sum", 1, "update 6: rank 0 of 2 has lost the others"),
        (2, "error", HUNG, "OSError: the disk is full"),
    ],
    ids=["dies", "hangs", "hangs in gradients", "dies in a sum", "hangs while another fails"],
)
def test_a_rank_is_lost(ranks: int, how: str, code: int, words: str, tmp_path: Path) -> None:
    children = start(ranks, tmp_path, TESTS / "support" / "rank_lost.py", how)
    lost = children.pop(1)
    try:
        said = [child.communicate(timeout=60)[0] for child in children]
        ended = time.monotonic()
        assert [child.returncode for child in children] == [code] * (ranks - 1), "\n".join(said)
        for rank, text in zip([0, *range(2, ranks)], said, strict=True):
            assert words.format(rank=rank) in text, text
        assert "in call 21" in said[0] or how != "SIGSTOP", said[0]
    finally:
        for child in (lost, *children):
            child.kill()
            child.communicate()
    assert lost.returncode == -signal.SIGKILL
    assert time.monotonic() - ended < 5
