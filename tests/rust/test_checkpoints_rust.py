"""A Rust program goes on from a checkpoint of `faststep.checkpoints` as from its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from faststep.checkpoints import Checkpoints
from support.continuation import COUNT, Run, everything, load, save, start
from support.helpers import assert_close

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo on this machine")


@pytest.mark.parametrize("case", ["window", "masters"])
def test_rust_goes_on_from_a_checkpoint(case: str, runs: dict[str, Run], tmp_path: Path) -> None:
    save(tmp_path / "start", start(case))
    first = runs["python"](case, tmp_path / "start", tmp_path / "first", 0, 4)
    wanted = runs["python"](case, tmp_path / "first", tmp_path / "python", 4, COUNT)
    step = start(case)
    load(tmp_path / "first", step)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        path = checkpoints.save(step, number=len(first))
    losses = runs["rust"](case, path, tmp_path / "rust", 4, COUNT)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert_close(everything(tmp_path / "rust"), everything(tmp_path / "python"), 1e-6)
