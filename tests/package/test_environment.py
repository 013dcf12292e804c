"""Demands of the package's import on the environment, before anything native is loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import faststep
import pytest
from faststep._native import _environment
from support.places import ROOT, Child

REQUIRES = ["numpy", "mlx==0.32.4", "mlx-cpu==0.32.4 ; sys_platform == 'linux' and extra == 'cpu'"]
Pretend = Callable[[dict[str, str]], None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Return a function that makes these distributions, with their versions, the installed ones."""

    def install(versions: dict[str, str]) -> None:
        versions = {"mlx-faststep": "0.1.0", **versions}

        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)

    return install


def test_this_environment_passes() -> None:
    _environment.check()


def test_another_mlx_is_refused_with_both_versions_and_the_command(pretend: Pretend) -> None:
    pretend({"mlx": "0.31.0", "mlx-cpu": "0.31.0"})
    with pytest.raises(ImportError) as refused:
        _environment.check()
    message = str(refused.value)
    assert "built against MLX 0.32.4" in message
    assert "has mlx 0.31.0 and mlx-cpu 0.31.0" in message
    assert message.endswith('pip install "mlx==0.32.4" "mlx-cpu==0.32.4"')


def test_another_back_end_is_refused(pretend: Pretend) -> None:
    pretend({"mlx": "0.32.4", "mlx-cuda-13": "0.32.5"})
    with pytest.raises(ImportError, match=r'has mlx-cuda-13 0\.32\.5\..*"mlx==0\.32\.4" "mlx-cuda-13==0\.32\.4"$'):
        _environment.check()


def test_no_mlx_is_refused(pretend: Pretend) -> None:
    pretend({})
    with pytest.raises(ImportError, match=r'has none\. To mend it: pip install "mlx==0\.32\.4"$'):
        _environment.check()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere MLX brings its back end")
def test_no_back_end_names_the_extras(pretend: Pretend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend({"mlx": "0.32.4"})
    empty = ModuleSpec("mlx", None, is_package=True)
    empty.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty)
    with pytest.raises(ImportError, match="no back end") as refused:
        _environment.check()
    for extra in ("cpu", "cuda12", "cuda13"):
        assert f'pip install "mlx-faststep[{extra}]"' in str(refused.value)


def test_metadata_without_a_pin_is_refused(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend({"mlx": "0.32.4"})
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["mlx-cpu==0.32.4", "numpy"])
    with pytest.raises(ImportError, match="pins no version of mlx"):
        _environment.check()


def test_the_check_loads_nothing_native(child: Child) -> None:
    child(
        f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("environment", {_environment.__file__!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.check()
        loaded = [name for name in sys.modules if name.partition(".")[0] in ("mlx", "faststep", "numpy")]
        assert not loaded, loaded
        """
    )


def test_the_version_is_that_of_the_workspace() -> None:
    workspace = re.search(r'\[workspace\.package\]\nversion = "(.+)"', (ROOT / "Cargo.toml").read_text())
    assert workspace
    assert faststep.__version__ == workspace[1]


def test_one_mlx_is_pinned_everywhere() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    pins = set(re.findall(r'"mlx(?:-[a-z0-9-]+)?==([^";]+)', pyproject))
    pins |= set(re.findall(r'const MLX_VERSION: &str = "(.+)";', (ROOT / "rust/mlx-sys/build.rs").read_text()))
    assert len(pins) == 1, pins
