"""docs/mlx_assumptions.md: the files and tests that it names exist."""

import re
from pathlib import Path

import pytest
from support.places import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "docs/mlx_assumptions.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| What is assumed", "| Text"))
]
SOURCES = [
    path
    for folder in ("rust/faststep", "rust/python", "rust/mlx-sys", "python", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".rs", ".py", ".cpp", ".hpp"} and "target" not in path.parts
]


def _files(name: str) -> list[Path]:
    return [path for path in SOURCES if path.as_posix().endswith(f"/{name}")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_what_a_row_names_exists(row: list[str]) -> None:
    _, places, tests = row
    names = re.findall(r"`([^`]+)`", places)
    assert names
    assert all(_files(name) for name in names), names
    named = re.findall(r"`([^`]+)`", tests)
    assert named or tests.startswith("the build")
    for test in named:
        file, _, function = test.partition("::")
        defined = re.compile(rf"(def|fn) {function}\b")
        assert any(defined.search(path.read_text()) for path in _files(file)), test
