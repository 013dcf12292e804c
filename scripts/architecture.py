"""Draw docs/architecture.svg: the rooms of the package, the bridge, the engine and its native code, and their imports.

A room is a folder, or a file by itself, directly in the root of its part. An arrow says that one room imports another;
arrows that follow from others are left out of the picture. Read from the code: Python's `ast`, Rust's paths, C++'s
includes.

Usage: architecture.py           draw
       architecture.py --check   exit with 1 where the picture is stale, or rooms import each other in a circle
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
Arrows = dict[str, set[str]]

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN, TOP = 96, 28, 12, 30, 18, 60  # of boxes, between them, around and above a part
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>text{{font:13px sans-serif;fill:#222;text-anchor:middle}}.name{{font-weight:bold;font-size:15px}}
.name,.soft{{text-anchor:start}}.soft{{fill:#666}}.part{{fill:#f6f7f9;stroke:#ccd}}.room{{fill:#fff;stroke:#456}}
path{{fill:none;stroke:#89a;marker-end:url(#head)}}.thick{{stroke:#345;stroke-width:3}}</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"
markerUnits="userSpaceOnUse"><path d="M0 0 8 4 0 8z" style="fill:#567;stroke:none;marker-end:none"/></marker></defs>
<rect width="100%" height="100%" fill="#fff"/>"""


@dataclass(frozen=True)
class Part:
    """A part of the project.

    Attributes:
        name: Its name.
        place: Its root, relative to the checkout.
        arrows: For each room, the rooms that it imports.
    """

    name: str
    place: str
    arrows: Arrows

    @cached_property
    def drawn(self) -> Arrows:
        """The arrows without those that follow from others."""
        return {
            room: {to for to in there if not any(to in self.reached(via) for via in there - {to})}
            for room, there in self.arrows.items()
        }

    def reached(self, room: str) -> set[str]:
        """Return the rooms that a room imports, directly or through others."""
        found: set[str] = set()
        todo = [room]
        while todo:
            new = self.arrows[todo.pop()] - found
            found |= new
            todo += new
        return found

    @property
    def circles(self) -> list[str]:
        """The rooms that import themselves through others."""
        return sorted(room for room in self.arrows if room in self.reached(room))

    @cached_property
    def rows(self) -> list[list[str]]:
        """The rooms from the top: each below all that import it, ordered by where their arrows come from."""
        level: dict[str, int] = {}
        for room in sorted(self.arrows, key=lambda room: len(self.reached(room))):
            level[room] = 1 + max((level.get(to, 0) for to in self.arrows[room]), default=0)
        rows = [sorted(room for room in level if level[room] == each) for each in sorted(set(level.values()))][::-1]
        at: dict[str, float] = {}
        for row in rows:
            above = {room: [at[each] for each in at if room in self.drawn[each]] for room in row}
            row.sort(key=lambda room: (sum(above[room]) / len(above[room]) if above[room] else 0.5, room))
            at |= {room: (number + 0.5) / len(row) for number, room in enumerate(row)}
        return rows


def room_of(file: Path, root: Path) -> str:
    """Return the room of a file; empty for the files that only join the rooms together."""
    first = file.relative_to(root).parts[0]
    name = first.rpartition(".")[0] or first
    return "" if name in ("__init__", "__main__", "_core", "lib", "mod") else name


def part(name: str, place: str, pattern: str, imports: dict[Path, set[str]]) -> Part:
    """Put the imports of files together by room."""
    root = ROOT / place
    files = {file: room_of(file, root) for file in sorted(root.rglob(pattern))}
    arrows: Arrows = {room: set() for room in files.values() if room}
    for file, found in imports.items():
        if room := files[file]:
            arrows[room] |= {to for to in found if to in arrows and to != room}
    return Part(name, place, arrows)


def package() -> Part:
    """Read the Python package."""
    place = "python/faststep"
    files = sorted((ROOT / place).rglob("*.py"))
    return part("package", place, "*.py", {file: {each.split(".")[1] for each in imported(file)} for file in files})


def imported(file: Path) -> Iterator[str]:
    """Yield what a Python file imports of the package, by its dotted name; imports in functions count too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "faststep":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("faststep."))


def crate(name: str, place: str) -> Part:
    """Read a Rust crate: its paths from `crate` and `super`, without those of comments and of tests."""
    root = ROOT / place
    exported = exports(code_of(root / "lib.rs"))
    imports = {}
    for file in sorted(root.rglob("*.rs")):
        inside = [*file.relative_to(root).with_suffix("").parts]
        inside = inside[:-1] if inside[-1] in ("mod", "lib") else inside
        text = code_of(file)
        found = {name for path in re.finditer(r"\bcrate::", text) for name in names(text[path.end() :])}
        for path in re.finditer(r"\b((?:super::)+)", text):
            if path[1].count("super") == len(inside):
                found |= names(text[path.end() :])
        imports[file] = {exported.get(each, each) for each in found}
    return part(name, place, "*.rs", imports)


def code_of(file: Path) -> str:
    """Return Rust code without its comments and its unit tests."""
    text = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
    return re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", text)[0]


def names(text: str) -> set[str]:
    """Return the first names of a path that goes on here: `a::b`, or `{a::b, c}`."""
    if not text.startswith("{"):
        return set(re.findall(r"^\w+", text))
    depth, flat = 0, ""
    for character in text:
        depth += (character == "{") - (character == "}")
        flat += character if depth == 1 else ""
        if depth == 0:
            break
    return set(re.findall(r"[{,]\s*(\w+)", flat))


def exports(text: str) -> dict[str, str]:
    """Return the room of each name that the crate's root exports."""
    found = {}
    for use in re.finditer(r"\bpub(?:\(crate\))? use (?:crate::)?(\w+)::([^;]+);", text):
        found.update(dict.fromkeys(re.findall(r"\w+", use[2]), use[1]))
    return found


def native() -> Part:
    """Read the C++ code."""
    place = "rust/faststep/native"
    root = ROOT / place
    imports = {}
    for file in sorted(root.rglob("*.[ch]pp")):
        included = re.findall(r'#include "([^"]+)"', file.read_text(encoding="utf-8"))
        there = [(base / each).resolve() for each in included for base in (file.parent, root)]
        imports[file] = {room_of(each, root.resolve()) for each in there if each.is_file()}
    return part("native", place, "*.[ch]pp", imports)


def parts() -> list[Part]:
    """Read all parts, from the top."""
    return [package(), crate("bridge", "rust/python/src"), crate("engine", "rust/faststep/src"), native()]


def draw(parts: list[Part]) -> str:
    """Return the picture: the first part above, the others beside each other below it; rooms in rows from the top."""
    shapes, below = frame(parts[0], MARGIN, TOP)
    left, wide, high = MARGIN, size(parts[0])[0], 0
    for number, each in enumerate(parts[1:]):
        more, end = frame(each, left, below + TOP)
        width = size(each)[0]
        arrow = f"M{left + width - 40} {below} V{below + TOP - 2}"
        if number:
            arrow = f"M{left - 2 * MARGIN} {below + TOP + HEIGHT} H{left - 2}"
        shapes += [f'<path class="thick" d="{arrow}"/>', *more]
        high, left = max(high, end), left + width + 2 * MARGIN
    wide = max(wide + 2 * MARGIN, left - MARGIN)
    return "\n".join([HEAD.format(width=wide, height=high + MARGIN), *shapes, "</svg>"]) + "\n"


def size(part: Part) -> tuple[int, int]:
    """Return width and height of a part's frame."""
    most = max(len(row) for row in part.rows)
    return most * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN, len(part.rows) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN


def frame(part: Part, left: int, top: int) -> tuple[list[str], int]:
    """Return a part with its name, boxes and arrows, and where its frame ends below."""
    width, tall = size(part)
    shapes = [
        f'<rect class="part" x="{left}" y="{top}" width="{width}" height="{tall}" rx="8"/>',
        f'<text class="name" x="{left + 4}" y="{top - 24}">{escape(part.name)}</text>',
        f'<text class="soft" x="{left + 4}" y="{top - 8}">{escape(part.place)}</text>',
    ]
    at: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(part.rows):
        begin = left + (width - len(row) * (WIDTH + GAP_X) + GAP_X) / 2
        line = top + MARGIN + number * (HEIGHT + GAP_Y)
        at |= {room: (begin + place * (WIDTH + GAP_X) + WIDTH / 2, line) for place, room in enumerate(row)}
    for room, (x, y) in at.items():
        for to_x, to_y in sorted(at[to] for to in part.drawn[room]):
            foot, bend = y + HEIGHT, (to_y - y - HEIGHT) / 2
            way = f"M{x:g} {foot:g} C{x:g} {foot + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}"
            shapes.append(f'<path d="{way}"/>')
    for room, (x, y) in at.items():
        shapes.append(f'<rect class="room" x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>')
        shapes.append(f'<text x="{x:g}" y="{y + 19:g}">{escape(room)}</text>')
    return shapes, top + tall


def problems(parts: list[Part]) -> list[str]:
    """Return what is wrong: circles, and a stale picture."""
    found = [f"{each.place}: rooms in a circle: {', '.join(each.circles)}" for each in parts if each.circles]
    if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != draw(parts):
        found.append(f"{PICTURE.relative_to(ROOT)} is stale: python scripts/architecture.py")
    return found


def main() -> None:
    """Draw the picture, or check it."""
    found = parts()
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(problems(found)) or None)
    PICTURE.write_text(draw(found), encoding="utf-8")
    for each in found:
        print(f"{each.name}: {len(each.arrows)} rooms, {sum(map(len, each.arrows.values()))} arrows")


if __name__ == "__main__":
    main()
