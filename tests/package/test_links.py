"""Links of the documentation lead to files and headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.places import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_line_of_the_comparison_has_a_proof() -> None:
    """The last column of docs/compared.md links a test or a page, or says that there is nothing."""
    rows = re.findall(r"^\| (?!\|)(.+) \|$", (ROOT / "docs" / "compared.md").read_text(encoding="utf-8"), re.MULTILINE)
    cells = [[each.strip() for each in row.split("|")] for row in rows]
    assert len(cells) > 40
    assert {len(row) for row in cells} == {5}
    bare = [row[0] for row in cells if "](" not in row[-1] and "**no" not in row[-1]]
    assert bare == ["framework"]
