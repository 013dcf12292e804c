"""The lists of tests in the Makefile and in scripts/test_gpu.py name tests that are there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from support.places import ROOT


def of_the_makefile() -> list[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"(?<![\w/,])tests/[\w/]+(?:\.py)?(?=\s)", text)
    for prefix, names in re.findall(r"\$\(addprefix (tests/\w+/\w+),([^)]*)\)", text):
        found += [prefix + name for name in names.split()]
    return sorted(set(found))


def of_the_gpu() -> list[str]:
    spec = importlib.util.spec_from_file_location("test_gpu", ROOT / "scripts" / "test_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return sorted({each.partition("=")[2] or each for part in module.PARTS.values() for each in part})


@pytest.mark.parametrize("name", [*of_the_makefile(), *of_the_gpu()])
def test_a_test_that_is_named_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    assert Path(ROOT, file).exists()
    if function:
        assert f"def {function}(" in Path(ROOT, file).read_text(encoding="utf-8")


def test_the_lists_are_read() -> None:
    assert len(of_the_makefile()) > 15
    assert len(of_the_gpu()) > 15
