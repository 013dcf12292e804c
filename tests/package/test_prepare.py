"""Checks of a machine before anything is built; scripts/fresh_machine.sh tries it in minimal systems."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.places import ROOT

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
SYSTEM = "manylinux_2_35" if sys.platform.startswith("linux") else "macosx_14_0"


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a checkout in another place."""
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "scripts" / "prepare.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("Cargo.toml", "rust-toolchain.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMPS", tmp_path / ".venv" / "stamps")
    return module


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("rustc 1.96.0 (ac68faa20 2026-05-20) (built from a source tarball)", (1, 96, 0)),
        ("12", (12,)),
        ("1.85.1+dfsg1-1+deb13u1", (1, 85, 1)),
        ("glibc 2.36", (2, 36)),
        ("(none)", ()),
    ],
)
def test_versions_are_read_out_of_what_programs_say(prepare: ModuleType, text: str, wanted: tuple[int, ...]) -> None:
    assert prepare.version(text) == wanted


def test_this_machine_lacks_nothing_to_build_with(prepare: ModuleType) -> None:
    assert [item.what for item in prepare.look("build", None) if "disk space" not in item.what] == []


def test_what_is_missing_is_told_with_its_commands(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(prepare, "MANAGER", "apt-get")
    (item,) = (item for item in prepare.look("build", None) if "compiler" in item.what)
    prepare.report([item])
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == ["This machine lacks", f"  {item.what}", "These commands install it:"]
    assert said[3].endswith("apt-get update")
    assert said[4].endswith("apt-get install -y --no-install-recommends g++")
    assert not prepare.may_install([prepare.Missing("room", mendable=False)])


def wheel(root: Path, version: str, tag: str = TAG, machine: str = platform.machine(), system: str = SYSTEM) -> Path:
    """Put a wheel into dist."""
    (root / "dist").mkdir(exist_ok=True)
    path = root / "dist" / f"mlx_faststep-{version}-{tag}-{tag}-{system}_{machine}.whl"
    path.touch()
    return path


def test_a_wheel_fits_this_version_python_and_system(prepare: ModuleType, tmp_path: Path) -> None:
    version = prepare.setting("Cargo.toml", "version")
    for other in (("99.0",), (version, "cp39"), (version, TAG, "riscv64")):
        wheel(tmp_path, *other)
    wheel(tmp_path, version, system="manylinux_2_99" if sys.platform.startswith("linux") else "macosx_99_0")
    assert prepare.fitting_wheel() is None
    fits = wheel(tmp_path, version)
    assert prepare.fitting_wheel() == fits


def test_a_wheel_older_than_a_source_is_for_machines_without_rust(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = wheel(tmp_path, prepare.setting("Cargo.toml", "version"))
    os.utime(old, (1, 1))
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "new.py").touch()
    assert prepare.fitting_wheel() is None
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert prepare.fitting_wheel() == old


def test_an_environment_without_pip_is_made_anew(prepare: ModuleType) -> None:
    python = prepare.VENV / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (prepare.VENV / "pyvenv.cfg").write_text(
        f"home = {Path(prepare.BASE).parent}\ninclude-system-site-packages = false\n"
    )
    assert not prepare.has_pip()
    prepare.make_venv()
    assert prepare.has_pip()
    assert prepare.STAMPS.is_dir()


def test_an_environment_that_cannot_be_made_is_not_left_behind(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "BASE", "false")
    with pytest.raises(SystemExit, match="exit status 1"):
        prepare.make_venv()
    assert not prepare.VENV.exists()


@pytest.mark.parametrize("arguments", [[], ["deploy"]])
def test_other_targets_get_the_usage(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "prepare.py", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Usage: prepare.py build|test|run" in done.stderr
