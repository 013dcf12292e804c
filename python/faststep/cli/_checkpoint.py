"""`faststep checkpoint`: list, verify and export the checkpoints of a run."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from faststep.cli._status import DIFFERS, Exit, RunFolder

if TYPE_CHECKING:
    from faststep.checkpoints import Checkpoint

app = typer.Typer(help="Look at checkpoints, verify them, export weights.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="A run, or one of its checkpoints.", show_default=False)]


@app.command("list")
def list_(run: RunFolder) -> None:
    """List the checkpoints of a run, the oldest first."""
    for each in checkpoints_of(run):
        when = datetime.datetime.fromtimestamp(each.time).isoformat(" ", "seconds")
        metric = "" if each.metric is None else f", {_monitor(each)} {each.metric:.6f}"
        what = f"{when}, {each.bytes / 1e6:.1f} MB{metric}" if each.problem is None else f"damaged: {each.problem}"
        typer.echo(f"{each.path.name}: {what}")


@app.command()
def verify(path: Folder) -> None:
    """Read all of the checkpoints and compare them with their checksums; exit code 3 where one is damaged."""
    from faststep.checkpoints import CheckpointError

    damaged = 0
    for each in checkpoints_of(path):
        try:
            each.verify()
        except CheckpointError as error:
            damaged += 1
            typer.echo(f"{each.path.name}: damaged: {error}")
        else:
            typer.echo(f"{each.path.name}: as it was written, {each.bytes / 1e6:.1f} MB")
    if damaged:
        raise SystemExit(DIFFERS)


@app.command()
def export(
    path: Folder,
    file: Annotated[Path, typer.Argument(help="The safetensors file to write.", show_default=False)],
    average: Annotated[bool, typer.Option("--average", help="The moving average of the weights.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Of a run: that with the best monitored value.")] = False,
) -> None:
    """Write the weights of a checkpoint (of a run: the newest one) as `model.load_weights` reads them."""
    if file.exists():
        raise Exit(f"{file}: there is such a file already")
    typer.echo(choose(checkpoints_of(path), path, best=best).export(file, average=average))


def checkpoints_of(path: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run, the oldest first, or the one that the path is."""
    from faststep.checkpoints import Checkpoint, Checkpoints

    if path.name.startswith("step-"):
        return [Checkpoint.at(path)]
    if not path.is_dir():
        raise Exit(f"{path}: expected the folder of a run, found none")
    inside = path / "checkpoints"
    found = Checkpoints(inside if inside.is_dir() else path).list()
    if not found:
        raise Exit(f"{path}: expected checkpoints in it, found none")
    return found


def choose(found: list[Checkpoint], place: Path, *, number: int | None = None, best: bool = False) -> Checkpoint:
    """Return the newest valid checkpoint, that of a number, or that with the best value of what is monitored now."""
    valid = [each for each in found if each.problem is None and number in (None, each.number)]
    if best and valid:
        monitor, sign = _monitor(valid[-1]), 1 if valid[-1].numbers.get("mode") == "max" else -1
        valid = [each for each in valid[::-1] if each.metric is not None and _monitor(each) == monitor]
        valid.sort(key=lambda each: sign * (each.metric or 0.0))  # of equal ones the oldest is the last
    if not valid:
        such = (f" of step {number}" if number is not None else "") + (" with a validation" if best else "")
        raise Exit(f"{place}: expected a valid checkpoint{such}, found none")
    return valid[-1]


def _monitor(checkpoint: Checkpoint) -> str:
    return str(checkpoint.numbers.get("monitor", "metric"))
