"""Look at the first words of comments and docstrings: no sentence hangs on a word whose meaning comes later.

A comment says what something is or does, in a sentence or a noun phrase. Beginnings such as "What is held" or "The same
for rows" make its reader look for the rest. The script reads the files and folders below, which are clean: the first
words of each comment and docstring, and of each paragraph in them.

Usage: words.py [PATH ...]   print the lines, and exit with 1 where there are some; without paths those of the list
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLEAN = (
    "python/faststep/_profile",
    "python/faststep/_reach",
    "python/faststep/_step",
    "rust/faststep/native/graph/called.cpp",
    "rust/faststep/src/mlx/called.rs",
    "rust/python/src/host",
    "rust/python/src/host.rs",
    "rust/python/src/lib.rs",
    "rust/python/src/step",
    "rust/python/src/step.rs",
    "rust/python/src/watch",
    "rust/python/src/watch.rs",
    "scripts/words.py",
)
WORDS = (
    *("What", "Which", "Where", "How", "Whether", "The same", "The other", "That of", "Those", "Such", "As that"),
    *("Of the", "So many", "Behind", "Beside"),
)
FIRST = re.compile(rf"(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
SUFFIXES = (".py", ".rs", ".cpp", ".hpp", ".h")
Lines = Iterator[tuple[int, str]]  # numbers, and comments without their marks


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the files of source below paths."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES:
                yield file


def of_python(text: str) -> Lines:
    """Yield the lines of comments and docstrings, an empty one in front of each docstring."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#").strip()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            lines = text.splitlines()[first.lineno - 1 : first.end_lineno]
            yield first.lineno, ""
            yield from ((first.lineno + at, line.strip().strip('"').strip()) for at, line in enumerate(lines))


def of_rust_or_cpp(text: str) -> Lines:
    """Yield the lines of comments. Quotes are not looked at, but for the slashes of an address."""
    for number, line in enumerate(text.splitlines(), start=1):
        found = re.search(r"(?<!:)//[/!]?(.*)", line)
        if found:
            yield number, found[1].strip()


def beginnings(file: Path) -> Lines:
    """Yield the first line of each comment and of each paragraph in it."""
    text = file.read_text(encoding="utf-8")
    last, is_empty = 0, True
    for number, comment in (of_python if file.suffix == ".py" else of_rust_or_cpp)(text):
        if comment and (number != last + 1 or is_empty):
            yield number, comment
        last, is_empty = number, not comment


def main() -> int:
    """Print what is found."""
    given = [Path(path).resolve() for path in sys.argv[1:]] or [ROOT / path for path in CLEAN]
    if gone := [path for path in given if not path.exists()]:
        print("\n".join(f"words.py: there is no {path}" for path in gone))
        return 1
    found = [
        f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}:{number}: {comment}"
        for file in files(given)
        for number, comment in beginnings(file)
        if FIRST.match(comment)
    ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
