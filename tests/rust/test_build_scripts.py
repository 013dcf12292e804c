"""The build scripts as cargo runs them: for the system that is built for, and with a word on what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.places import ROOT

BUILT = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "build"
MAC = {"TARGET": "aarch64-apple-darwin", "CARGO_CFG_TARGET_OS": "macos"}
LINUX = {"TARGET": "x86_64-unknown-linux-gnu", "CARGO_CFG_TARGET_OS": "linux"}
BuildScript = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def build_script(tmp_path: Path) -> BuildScript:
    """Run the build script of a crate, by its directory and its package, with a compiler that makes nothing."""

    def run(directory: str, package: str, **environment: str) -> subprocess.CompletedProcess[str]:
        scripts = sorted(BUILT.glob(f"{package}-*/build-script-build"), key=lambda path: path.stat().st_mtime)
        if not scripts:
            pytest.skip(f"{package} has not been built below {BUILT}")
        (tmp_path / "out").mkdir()
        nothing = {"CC": "true", "CXX": "true", "AR": "true", "SDKROOT": str(tmp_path), "PYO3_PYTHON": sys.executable}
        cargo = {"HOST": LINUX["TARGET"], "OPT_LEVEL": "0", "DEBUG": "false", "OUT_DIR": str(tmp_path / "out")}
        place = ROOT / "rust" / directory
        here = {"CARGO": "cargo", "CARGO_MANIFEST_DIR": str(place)}
        variables = {**os.environ, **nothing, **cargo, **here, **environment}
        variables = {name: value for name, value in variables.items() if value}
        return subprocess.run([scripts[-1]], cwd=place, env=variables, capture_output=True, text=True, timeout=120)

    return run


def test_a_missing_libclang_is_told_before_anything_is_compiled(build_script: BuildScript, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = build_script("mlx-sys", "mlx-sys", **LINUX, LIBCLANG_PATH=str(tmp_path / "empty"))
    assert done.returncode == 1, done.stdout
    for command in ("pip install libclang", "apt-get install libclang-dev", "dnf install clang-devel", "brew install"):
        assert command in done.stdout
    assert all(line.startswith("cargo::") for line in done.stdout.splitlines())
    assert done.stderr == ""
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("system", "name"), [(MAC, "libmlx.dylib"), (LINUX, "libmlx.so")])
def test_libmlx_is_that_of_the_system_that_is_built_for(
    build_script: BuildScript, tmp_path: Path, system: dict[str, str], name: str
) -> None:
    done = build_script("mlx-sys", "mlx-sys", **system, PYO3_PYTHON="", FASTSTEP_MLX=str(tmp_path))
    assert done.returncode == 1, done.stdout
    assert f"cargo::error={tmp_path / 'lib' / name} is missing" in done.stdout


@pytest.mark.parametrize(("system", "here"), [(MAC, "@loader_path"), (LINUX, "$ORIGIN")])
def test_the_run_path_is_that_of_the_system_that_is_built_for(
    build_script: BuildScript, system: dict[str, str], here: str
) -> None:
    done = build_script("python", "faststep-python", **system)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"cargo:rustc-cdylib-link-arg=-Wl,-rpath,{here}/../mlx/lib" in done.stdout.splitlines()
