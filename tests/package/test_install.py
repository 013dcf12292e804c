"""Installed outside the checkout: a wheel, and with build isolation the source distribution and the checkout itself."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from support.places import ROOT

# Compiled beside those of `make build`, because MLX and Python lie elsewhere, and not optimized: it is about what is
# installed. The other crates are the same ones.
OWN = ("faststep-python", "mlx-faststep", "mlx-rs", "mlx-sys", "pyo3", "pyo3-build-config", "pyo3-ffi")
OTHER_MLX = "0.32.3"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere MLX brings its back end")

# A step with what the extra `cpu` brings and no more, on the environment's own libmlx and no other.
USE = """
import faststep, sys
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
model = nn.Linear(4, 1)
optimizer = optim.AdamW(1e-2)
loss = lambda model, x, y: ((model(x) - y) ** 2).mean()
x, y = mx.ones((8, 4)), mx.zeros((8, 1)) + 3
losses = [faststep.fast_step(model, optimizer, loss, x, y, max_grad_norm=1.0).item() for _ in range(20)]
assert losses[-1] < losses[0], losses
assert faststep.__file__.startswith(sys.prefix), faststep.__file__
if sys.platform.startswith("linux"):
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libmlx.so" in line}
    assert len(libraries) == 1 and libraries.pop().startswith(sys.prefix), libraries
"""


def run(*command: str | Path, fails: bool = False) -> str:
    """Run a command outside the checkout with nothing of our environment, and return what it says."""
    ours = ("PYTHONPATH", "PYO3_PYTHON", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "FASTSTEP_SYMBOLS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["CARGO_TARGET_DIR"] = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target"))
    unoptimized = [f"--config profile.release.package.{name}.opt-level=0" for name in OWN]
    environment["MATURIN_PEP517_ARGS"] = " ".join(unoptimized)
    done = subprocess.run(
        [str(part) for part in command], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


class Environment:
    """A fresh virtual environment. Our pip installs into it: one of its own takes longer to install than a wheel."""

    def __init__(self, path: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", path)
        self.python = path / "bin" / "python"

    def pip(self, *arguments: str) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", *arguments)

    def use(self) -> None:
        run(self.python, "-c", USE)

    def refusal(self) -> str:
        """Return the error that importing the package ends with."""
        return run(self.python, "-c", "import faststep", fails=True).splitlines()[-1]


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    """The script behind `make wheels`."""
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "scripts" / "wheels.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(wheels: ModuleType) -> Path:
    """A wheel as `make wheels` builds it, of this interpreter."""
    wheels.main([f"python{sys.version_info.major}.{sys.version_info.minor}"])
    return max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize("yours", ["", "-g -O1"])
def test_make_builds_with_the_flags_of_a_wheel(wheels: ModuleType, yours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(wheels.path_flags())
    for name in names:
        monkeypatch.setenv(name, yours)
    for name, flags in wheels.path_flags().items():
        assert flags.endswith(yours)
        monkeypatch.setenv(name, flags)  # as in a build that make has begun
        assert wheels.path_flags()[name] == flags
    show = "include Makefile\nshow: ; @printf '%s\\n' " + " ".join(f'"$${name}"' for name in names)
    make = ["make", "--silent", "--no-print-directory", "--file", "-", "show"]
    said = subprocess.run(make, cwd=ROOT, input=show + "\n", capture_output=True, text=True, check=True).stdout
    assert dict(zip(names, said.splitlines(), strict=True)) == wheels.path_flags()


def test_a_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.pip("install", f"{wheel}[cpu]")
    environment.use()


def test_a_wheel_is_stripped_and_brings_the_licences_of_what_it_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (library,) = (name for name in names if name.endswith(".so"))
        assert archive.getinfo(library).file_size < 6_000_000
        (notices,) = (name for name in names if name.endswith(".dist-info/licenses/THIRD_PARTY_NOTICES"))
        assert archive.read(notices) == (ROOT / "THIRD_PARTY_NOTICES").read_bytes()
    project = "python/faststep/cli/project"  # what `faststep new` writes
    files = [each.relative_to(ROOT / "python").as_posix() for each in (ROOT / project).iterdir()]
    assert files
    assert set(files) <= set(names)


@linux
def test_the_symbols_of_a_wheel_lie_apart(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (library,) = tmp_path.glob("faststep/*.so")
    symbols = ROOT / "target" / "wheels" / "symbols" / f"{library.name}.debug"
    assert "PyInit__core" in run("nm", "--defined-only", symbols)
    assert "no symbols" in run("nm", library)
    assert ".gnu_debuglink" in run("readelf", "--wide", "--sections", library)
    assert symbols.name.encode() in library.read_bytes()


@linux
def test_a_wheel_refuses_another_mlx_and_none(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.pip("install", f"{wheel}[cpu]")
    environment.pip("install", "--no-deps", f"mlx=={OTHER_MLX}", f"mlx-cpu=={OTHER_MLX}")
    refusal = environment.refusal()
    assert "works with no other" in refusal
    assert f"has mlx {OTHER_MLX} and mlx-cpu {OTHER_MLX}" in refusal

    environment.pip(*refusal.partition("pip ")[2].replace('"', "").split())
    environment.use()

    environment.pip("uninstall", "--yes", "mlx-cpu")
    assert 'pip install "mlx-faststep[cpu]"' in environment.refusal()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("faststep/libmlx.so", b"", "must not be in the wheel"),
        ("mlx_faststep.libs/libblas-1.so.3", b"", "must not be in the wheel"),
        ("faststep/_core.so", b"..." + str(ROOT / "rust").encode(), "paths of this machine"),
        ("faststep/_core.so", b"GLIBC_2.36", "needs glibc 2.36"),
    ],
)
def test_wheels_with_more_than_they_should_hold_are_refused(
    wheels: ModuleType, tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    with pytest.raises(SystemExit, match=reason):
        wheels.check(path)


@linux
def test_a_wheel_built_where_glibc_is_newer_says_so(
    wheel: Path, wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "SYMBOLS", tmp_path / "symbols")
    (said,) = re.findall(r"manylinux_2_(\d+)", wheel.name)
    old = tmp_path / wheel.name.replace(f"manylinux_2_{said}", "manylinux_2_35")
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(old, "w") as copy:
        for name in archive.namelist():
            content = archive.read(name).replace(f"manylinux_2_{said}".encode(), b"manylinux_2_35")
            copy.writestr(name, content.replace(b"GLIBC_2.34", b"GLIBC_2.99"))
    new = wheels.part(old)
    assert new.name == old.name.replace("2_35", "2_99")
    assert not old.exists()
    wheels.check(new)
    with zipfile.ZipFile(new) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert b"-manylinux_2_99_" in archive.read(metadata)


def test_pip_installs_the_sdist_and_then_the_checkout(tmp_path: Path) -> None:
    """The second build finds what the first one left: libraries linked in an environment that is gone."""
    run(sys.executable, "-m", "maturin", "sdist", "--manifest-path", ROOT / "rust/python/Cargo.toml", "--out", tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    environment = Environment(tmp_path / "environment")
    environment.pip("install", f"{sdist}[cpu]")
    environment.use()
    environment.pip("install", "--force-reinstall", "--no-deps", str(ROOT))
    environment.use()
