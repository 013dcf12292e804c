"""The rooms of the project: no circles, no private names across them, and a picture and a page that are up to date."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT, TESTS

PACKAGE = ROOT / "python" / "faststep"
REMEDY = "python scripts/architecture.py"


@pytest.fixture(scope="module")
def architecture() -> Any:
    """Load the script that draws the picture."""
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "scripts" / "architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["architecture"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["package", "bridge", "engine", "native"])
def test_no_rooms_form_a_circle(architecture: Any, name: str) -> None:
    (part,) = [each for each in architecture.parts() if each.name == name]
    assert part.circles == []


def test_the_picture_is_up_to_date(architecture: Any) -> None:
    drawn = architecture.draw(architecture.parts())
    assert (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8") == drawn, REMEDY


def test_the_page_has_the_numbers_of_the_picture(architecture: Any) -> None:
    page = " ".join((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    for part in architecture.parts():
        assert f"{part.name} {len(part.arrows)} and {sum(map(len, part.arrows.values()))}" in page


def test_a_circle_and_a_stale_picture_are_seen(
    architecture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"a": "from faststep.b import x", "b/c": "def f():\n    from faststep import a"}.items():
        file = tmp_path / "python" / "faststep" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for name, text in {
        "lib": "mod a; mod b; pub use b::{B, C};",
        "a": "use crate::{b::{x, y}, C}; // crate::b",
        "b": "fn f() { super::d::g() }\n#[cfg(test)]\nmod tests { use crate::a; }",
        "d/mod": "use super::d; // not an arrow: itself",
    }.items():
        file = tmp_path / "rust" / "src" / f"{name}.rs"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(architecture, "ROOT", tmp_path)
    monkeypatch.setattr(architecture, "PICTURE", tmp_path / "picture.svg")
    package, crate = architecture.package(), architecture.crate("crate", "rust/src")
    assert package.circles == ["a", "b"]
    assert crate.arrows == {"a": {"b"}, "b": {"d"}, "d": set()}
    assert [line.split(":")[0] for line in architecture.problems([package, crate])] == [
        "python/faststep",
        "picture.svg is stale",
    ]
    (tmp_path / "picture.svg").write_text(architecture.draw([package, crate]), encoding="utf-8")
    assert architecture.problems([package, crate]) == ["python/faststep: rooms in a circle: a, b"]


def test_no_files_of_the_package_form_a_circle(architecture: Any) -> None:
    arrows: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name == "__init__.py":
            continue
        me = ".".join(["faststep", *file.relative_to(PACKAGE).with_suffix("").parts])
        arrows[me] = set()
        for name in architecture.imported(file):
            arrows[me] |= {name, name.rpartition(".")[0]} - {me}
    known = {me: {to for to in there if to in arrows} for me, there in arrows.items()}
    assert architecture.Part("files", "python/faststep", known).circles == []


def test_no_private_name_crosses_a_room(architecture: Any) -> None:
    for file in PACKAGE.rglob("*.py"):
        room = architecture.room_of(file, PACKAGE)
        for name in architecture.imported(file):
            _, other, *inside = name.split(".")
            assert other == room or not any(each.startswith("_") for each in inside), f"{file} imports {name}"
            assert (PACKAGE / other).exists() or (PACKAGE / f"{other}.py").exists() or other == "_core", (
                f"{file} imports {name}: a room takes names from the room that has them"
            )


@pytest.mark.parametrize("name", ["package", "bridge", "engine"])
def test_every_room_says_what_it_uses(architecture: Any, name: str) -> None:
    (part,) = [each for each in architecture.parts() if each.name == name]
    for room, used in part.arrows.items():
        places = [
            ROOT / part.place / each for each in (f"{room}/__init__.py", f"{room}.py", f"{room}/mod.rs", f"{room}.rs")
        ]
        file = next(each for each in places if each.exists())
        text = file.read_text(encoding="utf-8")
        lines = [line[4:] for line in text.splitlines() if line.startswith("//! ")]
        head = "\n".join(lines) if file.suffix == ".rs" else ast.get_docstring(ast.parse(text)) or ""
        sentence = re.search(r"\bUses\s(`[^.]*)", head)
        said = set(re.findall(r"`(\w+)`", sentence[1] if sentence else ""))
        assert said == used, f"{file}: expected a head that says which rooms it uses"


def test_the_page_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w./]+/[\w./]*)`", text)
    roots = [ROOT, PACKAGE, ROOT / "rust/python/src", ROOT / "rust/faststep/src"]
    assert len(names) > 30
    assert [name for name in names if not any((root / name).exists() for root in roots)] == []


def test_no_test_imports_another_test() -> None:
    for file in TESTS.rglob("*.py"):
        found = re.findall(r"^\s*(?:from|import) (test_\w+|conftest)\b", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert not found, f"{file} imports {found}: tests share tests/support"


def test_locks_and_files_that_are_replaced_are_in_one_place() -> None:
    """`_files.py` has them; folders (checkpoints, bundles) are put in place by a rename of their own."""
    users = {"import fcntl": set(), "os.replace(": set(), "NamedTemporaryFile": set()}
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for what, where in users.items():
            if what in text:
                where.add(file.name)
    assert users == {"import fcntl": {"_files.py"}, "os.replace(": set(), "NamedTemporaryFile": set()}
