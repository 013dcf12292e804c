"""`mlx.launch` with the command: one training of several processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.ring import free_ports

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not mx.distributed.is_available("ring"), reason="this MLX has no ring of processes"
)
CONFIG = """
run: {run}
model: {{use: mlp, sizes: [4, 8, 2]}}
loss: {{use: cross_entropy}}
data:
  train: {{use: arrays, file: {data}}}
  validation: {{use: arrays, file: {data}}}
  batch_size: 4
optimizer: {{use: Adam, learning_rate: 1e-2}}
step: {{sync: broadcast, check_ranks: 2}}
train: {{epochs: 1, log_every: 1}}
"""


def test_launch(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((22, 4), np.float32), y=np.zeros(22, np.int32))
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(run=tmp_path / "run", data=tmp_path / "data.npz"))
    launch, faststep = (Path(sys.executable).with_name(name) for name in ("mlx.launch", "faststep"))
    ring = [launch, "-n", "2", "-p", str(free_ports(2)), "--backend", "ring", "--"]
    done = subprocess.run([*ring, faststep, "train", config], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [each["ranks"] for each in records if each["kind"] == "start"] == [2]
    assert [each["samples"] for each in records if each["kind"] == "step"] == [8, 8, 6]
    assert [each["batches"] for each in records if each["kind"] == "validation"] == [6]
    assert [each.name for each in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]
