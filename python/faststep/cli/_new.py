"""The command that writes a project to begin with."""

from __future__ import annotations

import importlib.resources
import os
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from faststep._files import replacing
from faststep.cli._status import FAILED, Exit

_PLACES = {"gitignore": ".gitignore"}  # files that would be hidden in a package


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder, new or empty.", show_default=False)],
) -> None:
    """Write a project to start from: config, model, loss, data, a loop and a test.

    It trains at once, a classifier of points on three spirals: `faststep train config.yaml` in the folder, and
    `python -m pytest`. Change its files for what is yours. A folder that has anything in it but .git is left alone.
    """
    _refuse_taken(folder)
    texts = _texts()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Exit(f"{folder}: it cannot be made: {error.strerror}") from None
    try:
        for name, text in texts.items():
            with replacing(folder / name, new=True) as file:
                file.write(text)
    except OSError as error:
        raise Exit(f"{folder}: the project cannot be written: {error.strerror}", FAILED) from None
    typer.echo(f"{folder}: {', '.join(texts)}")
    go = [] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(os.fspath(folder))}"]
    test = "python -m pytest" if find_spec("pytest") else "python -m pytest    # pip install pytest"
    for line in [*go, "faststep train config.yaml", test]:
        typer.echo(f"    {line}")


def _refuse_taken(folder: Path) -> None:
    """Refuse a folder in which something is.

    Raises:
        Exit: It is a file, or a folder that is not empty.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise Exit(f"{folder}: expected a new or empty folder, found a file")
    found = sorted(each.name for each in folder.iterdir() if each.name != ".git") if folder.is_dir() else []
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise Exit(f"{folder}: expected a new or empty folder, found {', '.join(found[:3])}{more} in it")


def _texts() -> dict[str, bytes]:
    """Return the contents of the project's files by name."""
    files = importlib.resources.files("faststep.cli").joinpath("project").iterdir()
    texts = {each.name.removesuffix(".txt"): each.read_bytes() for each in files}
    return dict(sorted((_PLACES.get(name, name), text) for name, text in texts.items()))
