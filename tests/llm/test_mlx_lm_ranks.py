"""`faststep.mlx_lm.train` in two processes, beside mlx-lm's own trainer there."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import pytest
from support.places import TESTS
from support.ring import run

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")
pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not mx.distributed.is_available("ring"), reason="this MLX has no ring of processes"
)


def test_two_ranks_train_as_mlx_lm_does_and_as_one_process(tmp_path: Path) -> None:
    """The numbers are mlx-lm's where ranks have as many tokens each, and one process's where not."""
    said = run(2, tmp_path, TESTS / "support" / "rank_mlx_lm.py", tmp_path)
    assert "apart from one process" in said[0]
