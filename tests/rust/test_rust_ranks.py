"""The crate's step with a group: two processes, and the numbers of one that has the batches of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.places import RustExample
from support.ring import ended, start

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not mx.distributed.is_available("ring"), reason="this MLX has no ring of processes"
)


def test_two_processes_train_as_one(rust_example: RustExample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = rust_example("ranks")
    for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"):
        monkeypatch.setenv(name, str(Path(mx.__file__).parent / "lib"))
    environment = {**os.environ, "RANKS": "2"}
    alone = subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout
    children = start(2, tmp_path, program=program)
    said = ended(children)
    assert [child.returncode for child in children] == [0, 0], said
    (loss, weights), other = (each.splitlines()[-2:] for each in said)
    assert [loss, weights] == other
    got, wanted = (json.loads(each) for each in (weights, alone.splitlines()[-1]))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
