"""Commands that read runs and measure the machine: report, compare, tune, schema, version."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from faststep.cli._status import Exit, Overrides, RunFolder

_NAME, _COLUMNS = 24, 4  # the least that is shown of a run's name, in letters, and of a table


def report(run: RunFolder) -> None:
    """Write RUN/report.html: one page with the plots, the config and the events of a run."""
    from faststep.report import report

    with _reading():
        typer.echo(report(run))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="The folders of two or more runs.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("compare.html"),
) -> None:
    """Write one page that shows several runs side by side, and print how they ended.

    If a line is too narrow, the last columns and the middle of long names are left out.
    """
    from faststep.report import compare, ends

    if len(runs) < 2:
        raise Exit(f"expected two runs or more, got {len(runs)}")
    with _reading():
        page = compare(runs, out)
        for line in _aligned(ends(runs), shutil.get_terminal_size((119, 24)).columns):
            typer.echo(line)
        typer.echo(page)


def _aligned(rows: list[list[str]], width: int) -> list[str]:
    """Put cells into columns, the first one to the left, the others to the right, as many as there is room for."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least, room = min(widths[0], _NAME), width - sum(each + 2 for each in widths[1:])
    while room < least and len(widths) > _COLUMNS:
        room += widths.pop() + 2
    widths[0] = min(widths[0], max(room, least))
    parts = [[_cut(row[0], widths[0]).ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(each) for each in parts]


def _cut(name: str, width: int) -> str:
    """Leave out the middle of a name that is too long; its end tells most."""
    if len(name) <= width:
        return name
    front = (width - 3) // 3
    return f"{name[:front]}...{name[len(name) - (width - 3 - front) :]}"


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Exit(str(error)) from None


def tune(
    target: Annotated[
        str,
        typer.Argument(
            help='A config.yaml, or "file.py:function" (or "module:function"): a loop that yields every loss.',
            show_default=False,
        ),
    ],
    variables: Annotated[
        list[str] | None, typer.Option("--env", metavar='"A=1 B=2"', help="Variables to try together; may be repeated.")
    ] = None,
    overrides: Overrides = None,
    seconds: Annotated[float, typer.Option(help="How many seconds each child process measures.")] = 3.0,
    rounds: Annotated[int, typer.Option(help="How many times each setting is measured.")] = 5,
) -> None:
    """Find the environment variables that make a training step faster on this machine."""
    from faststep._tune import main
    from faststep.config import load

    if target.endswith((".yaml", ".yml")):
        load(target, overrides or [])
        os.environ[TUNED] = json.dumps([str(Path(target).resolve()), overrides or []])
        target = f"{__name__}:losses"
    elif overrides:
        raise Exit("--set changes a key of a config; variables to try are --env")
    settings = [word for each in variables or [] for word in ("--set", each)]
    raise SystemExit(main([target, *settings, "--seconds", str(seconds), "--rounds", str(rounds)]))


TUNED = "FASTSTEP_TUNED_CONFIG"


def losses() -> Iterator[Any]:
    """Yield the losses of the training that a config describes, for ever: what `tune` measures in its children."""
    from faststep._step import call_with
    from faststep.config import build, load

    built = build(load(*json.loads(os.environ[TUNED])))
    while True:
        for batch in built.loader:
            yield call_with(batch, built.step).loss


def schema() -> None:
    """Print the JSON schema of a config, for completion and checks in editors."""
    from faststep.config import schema

    typer.echo(json.dumps(schema(), indent=1))


def version() -> None:
    """Print the versions of all packages involved."""
    import mlx.core as mx

    from faststep._native import environment, version

    about = environment()
    typer.echo(f"mlx-faststep {version()}")
    typer.echo(f"mlx {about['versions']['mlx']} on {about['device']}")
    typer.echo(f"Python {platform.python_version()} on {platform.platform()}")
    typer.echo(f"default device: {mx.default_device()}")
