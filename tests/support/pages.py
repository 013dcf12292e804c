"""Pages of the documentation as what they ask to be typed: files, and commands with what these print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class File:
    """A file that is to be written: a block whose first line is a comment with its name, which is no part of it."""

    name: str
    text: str


@dataclass
class Command:
    """A command of a `console` block.

    Attributes:
        line: What is typed behind `$`, without the comment.
        comment: What stands behind `#`: `Ctrl-C at "TEXT"`, a text that is printed, and the exit code, 0 without.
        printed: The lines below it; "..." stands for any number of lines.
    """

    line: str
    comment: str = ""
    printed: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        found = re.search(r"exit code (\d+)", self.comment)
        return int(found[1]) if found else 0

    @property
    def stop(self) -> str | None:
        """Output that follows Ctrl-C; None: it is not pressed."""
        found = re.search(r'Ctrl-C at "(.+?)"', self.comment)
        return found[1] if found else None


def parts(page: Path) -> Iterator[File | Command]:
    """Yield the files and commands of a page in their order; other blocks are passed over."""
    for language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "console":
            yield from _commands(text)
        elif language in ("python", "yaml"):
            first, _, rest = text.partition("\n")
            yield File(first.removeprefix("# "), rest)


def _commands(text: str) -> list[Command]:
    found: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            typed, _, comment = line.removeprefix("$ ").partition("  # ")
            found.append(Command(typed.strip(), comment.strip()))
        else:
            found[-1].printed.append(line)
    return found


def differences(command: Command, output: str) -> list[str]:
    """Return the lines of a page that a command did not print, in their order; numbers may differ."""
    there = iter([_masked(line) for line in output.splitlines()])
    return [line for line in command.printed if line != "..." and not any(_masked(line) == each for each in there)]


def _masked(line: str) -> str:
    line = re.sub(r"\b[0-9a-f]{12}\b|on cpu: .*", "0", line)  # checksums, machines
    line = re.sub(r"(s) \(\d+:\d\d:\d\d\)$", r"\1", line)  # pytest's of more than a minute
    return re.sub(r"\d[\d.,:e+-]*(?: ?[kMG]?B\b| [mu]?s\b|[kM]\b)?", "0", " ".join(line.split()))
