"""`faststep doctor`: the environment line by line, also where MLX or the extension module cannot be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.commands import Done, faststep


def doctor(folder: Path, *words: str, status: int, **variables: str) -> Done:
    """Run the command with a folder before all others on Python's path."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return faststep("doctor", *words, status=status, env={**os.environ, "PYTHONPATH": path, **variables})


def pretend(folder: Path, name: str, version: str) -> None:
    """Make a distribution look installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def mlx_that(folder: Path, does: str) -> None:
    """Put an `mlx.core` into the folder that does this when it is imported."""
    (folder / "mlx").mkdir()
    (folder / "mlx" / "__init__.py").write_text("")
    (folder / "mlx" / "core.py").write_text(does)
    (folder / "mlx" / "lib").mkdir()
    (folder / "mlx" / "lib" / "libmlx.so").touch()


def lines_of(done: Done) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in json.loads(done.stdout)["lines"]}


def test_a_healthy_environment() -> None:
    said = faststep("doctor").stdout
    for name in ("Python", "packages", "back end", "memory", "disk", "load", "MLX", "faststep", "step"):
        assert f" {name} " in said
    assert "no failures" in said
    line = next(line for line in said.splitlines() if "one native step and one of plain MLX differ by" in line)
    assert line.startswith("ok ")
    assert mx.cuda.is_available() or line.endswith("differ by 0.0e+00")


def test_json_has_every_line(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json", status=0)
    found = json.loads(done.stdout)
    assert found["healthy"] is True
    assert {line["level"] for line in found["lines"]} <= {"ok", "warning"}
    assert "GFLOP/s" in lines_of(done)["BLAS" if "BLAS" in lines_of(done) else "products"]["text"]


def test_it_needs_no_extra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['typer'] = None\n")
    assert json.loads(doctor(tmp_path, "--json", status=0).stdout)["healthy"] is True


def test_a_loader_error_is_told_with_a_remedy(tmp_path: Path) -> None:
    mlx_that(tmp_path, "raise ImportError('libgomp.so.1: cannot open shared object file: No such file')")
    line = lines_of(doctor(tmp_path, "--json", status=1))["import of MLX"]
    assert line["level"] == "failure"
    assert "libgomp.so.1 is missing" in line["remedy"]
    assert "pip install --force-reinstall mlx==" in line["remedy"]


def test_a_crash_while_loading_is_survived(tmp_path: Path) -> None:
    mlx_that(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    line = lines_of(doctor(tmp_path, "--json", status=1))["import of MLX"]
    assert line["text"] == "ended by signal 11"


def test_another_mlx_is_told_by_its_command(tmp_path: Path) -> None:
    pretend(tmp_path, "mlx", "0.31.0")
    lines = lines_of(doctor(tmp_path, "--json", status=1))
    assert "built against MLX" in lines["import of faststep"]["text"]
    assert lines["back end"]["level"] == "failure"
    assert "pip install" in lines["back end"]["remedy"]


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_a_cuda_wheel_without_a_gpu_says_so(tmp_path: Path) -> None:
    pretend(tmp_path, "mlx-cuda-13", "0.32.4")
    lines = lines_of(doctor(tmp_path, "--json", status=1))
    assert "no NVIDIA driver: libcuda.so.1" in lines["CUDA"]["text"]
    assert 'pip uninstall mlx-cuda-13 && pip install "mlx-faststep[cpu]"' in lines["CUDA"]["remedy"]


def test_the_own_blas_of_mlx_is_a_warning(tmp_path: Path) -> None:
    line = lines_of(doctor(tmp_path, "--json", status=0, FASTSTEP_BLAS="0")).get("BLAS")
    if line is None:
        pytest.skip("MLX does not compute on the CPU here")
    assert line["level"] == "warning"
    assert line["remedy"].startswith("unset FASTSTEP_BLAS")


def test_the_package_itself_names_the_command(tmp_path: Path) -> None:
    mlx_that(tmp_path, "raise ImportError('libcuda.so.1: cannot open shared object file: No such file')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", "import faststep"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: MLX cannot be loaded: libcuda.so.1")
    assert "`faststep doctor` says what to do" in done.stderr
