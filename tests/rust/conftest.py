"""Fixtures of runs that go on in Rust or in Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.continuation import COUNT, Run, load, save, start
from support.places import RustExample


@pytest.fixture(scope="module")
def program(rust_example: RustExample) -> Path:
    """Build the Rust program."""
    return rust_example("continuation")


@pytest.fixture
def runs(program: Path, tmp_path: Path) -> dict[str, Run]:
    """Run the batches of these numbers of a case in Rust or Python: from a checkpoint, to another one."""
    x = mx.random.normal((COUNT, 16, 8), key=mx.random.key(1))
    batches = {"x": x, "y": mx.sin(x[:, :, :4])}
    mx.save_safetensors(str(tmp_path / "batches.safetensors"), batches)
    libraries = Path(mx.__file__).parent / "lib"

    def rust(case: str, source: Path, target: Path, first: int, last: int) -> list[float]:
        command = [program, case, source, target, tmp_path / "batches.safetensors", str(first), str(last)]
        environment = os.environ | {"LD_LIBRARY_PATH": str(libraries), "DYLD_LIBRARY_PATH": str(libraries)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return [float(np.float32(line)) for line in done.stdout.splitlines()]

    def python(case: str, source: Path, target: Path, first: int, last: int) -> list[float]:
        step = start(case)
        load(source, step)
        losses = [float(step(batches["x"][i], batches["y"][i]).loss) for i in range(first, last)]
        save(target, step)
        return losses

    return {"rust": rust, "python": python}
