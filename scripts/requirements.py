"""Print what a development environment installs, one requirement a line: all from pyproject.toml, its only list.

Usage: requirements.py EXTRA...
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib  # the standard library has none: the copy that pip brings


def main(extras: list[str]) -> None:
    """Print the build requirements, the dependencies and those extras."""
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    project = pyproject["project"]
    groups = [pyproject["build-system"]["requires"], project["dependencies"]]
    groups += [project["optional-dependencies"][extra] for extra in extras]
    print(*dict.fromkeys(requirement for group in groups for requirement in group), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
