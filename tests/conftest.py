"""Fixtures of all tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import faststep  # noqa: F401, before any array: its kernels and BLAS are those of both sides of each comparison
import mlx.core as mx
import pytest
from faststep._step import _fast_step
from support.places import ROOT, TESTS, Child, RustExample

# Programs for an environment with PyTorch, which make the references of tests: they hold none.
collect_ignore_glob = ["support/*_reference.py"]

# A shell starts what runs in its background deaf to Ctrl-C, and so would be the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files with slow tests first: processes that share the files end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start every test from the same random state and no models before it, and leave nothing running behind it."""
    mx.random.seed(0)
    monkeypatch.setattr(_fast_step, "_short_lived", _fast_step._ShortLivedModels())
    yield
    mx.synchronize()


@pytest.fixture
def own_quantized_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave products with quantized weights to MLX: bits are compared, or what amplifies the last of them."""
    monkeypatch.setenv("FASTSTEP_QUANTIZED", "0")


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """Run Python code in a process of its own, with the tests' helpers on its path."""

    def run(code: str, *, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "child.py"
        script.write_text(textwrap.dedent(code), encoding="utf-8")
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        command, variables = [sys.executable, script], {**os.environ, "PYTHONPATH": path, **environment}
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired as late:  # whose message leaves out what the program has written
            raise AssertionError(f"no end after 300 s: {late.stdout!r} {late.stderr!r}") from None
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def rust_example() -> RustExample:
    """Build an example of the Rust crate, by its name; the result is the program."""

    def build(name: str) -> Path:
        environment = {"PYO3_PYTHON": sys.executable} | os.environ
        # the whole workspace, as in `make test-rust`: with one package's features all would be compiled again
        command = ["cargo", "build", "--release", "--locked", "--workspace", "--example", name]
        built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/examples" / name

    return build
