"""`faststep checkpoint`: list, verify and export the checkpoints of a run."""

from __future__ import annotations

import datetime
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from faststep.cli._saved import config_of
from faststep.cli._status import DIFFERS, Exit, Overrides, RunFolder

if TYPE_CHECKING:
    from faststep.checkpoints import Checkpoint

app = typer.Typer(help="List checkpoints, verify them, export weights.", no_args_is_help=True)
Kind = Literal["adapters", "peft", "fuse"]
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
    file: Annotated[Path | None, typer.Argument(help="The safetensors file to write.", show_default=False)] = None,
    average: Annotated[bool, typer.Option("--average", help="The moving average of the weights.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the best monitored value.")] = False,
    adapters: Annotated[Path | None, typer.Option(help="A folder for the adapters, in mlx-lm's format.")] = None,
    peft: Annotated[Path | None, typer.Option(help="A folder for the adapters, in the format of PEFT.")] = None,
    fuse: Annotated[
        Path | None, typer.Option(help="A folder for the whole model, as Hugging Face lays it out.")
    ] = None,
    bits: Annotated[int | None, typer.Option(help="With --fuse: quantize the weights to so many bits.")] = None,
    group_size: Annotated[int | None, typer.Option(help="With --bits: how many weights share a scale.")] = None,
    mode: Annotated[str, typer.Option(help="With --bits: affine, mxfp4, nvfp4 or mxfp8.")] = "affine",
    overrides: Overrides = None,
) -> None:
    """Write the weights of a checkpoint (of a run: the newest one) as `model.load_weights` reads them.

    For a model of mlx-lm: its adapters (--adapters DIR, --peft DIR), or plain weights with the adapters fused
    (--fuse DIR), quantized again with --bits. Name the base model's folder if it has moved: --set model.path=FOLDER.
    """
    places = [each for each in (file, adapters, peft, fuse) if each is not None]
    if len(places) != 1:
        raise Exit(f"expected one of FILE, --adapters DIR, --peft DIR and --fuse DIR, got {len(places)}")
    if os.path.lexists(places[0]) and not (places[0] in (adapters, peft) and places[0].is_dir()):
        raise Exit(f"{places[0]}: there is such a file already")
    if (fuse is None and bits is not None) or (bits is None and (group_size, mode) != (None, "affine")):
        raise Exit("--bits: expected with --fuse, and --group-size and --mode with it")
    chosen = choose(checkpoints_of(path), path, best=best)
    if file is not None:
        typer.echo(chosen.export(file, average=average))
    else:
        few = None if bits is None else {"bits": bits, "group_size": group_size, "mode": mode}
        kind: Kind = "fuse" if fuse is not None else "peft" if peft is not None else "adapters"
        typer.echo(_export_model(chosen, places[0], average, kind, few, overrides))


def _export_model(
    chosen: Checkpoint,
    folder: Path,
    average: bool,
    kind: Kind,
    few: dict[str, Any] | None,
    overrides: list[str] | None,
) -> Path:
    """Write the adapters of a model of mlx-lm, or all of it."""
    from faststep.config import model_of
    from faststep.mlx_lm import LanguageModel, Quantize, export_adapters, export_fused

    run = chosen.path.parent.parent
    model = model_of(config_of(run, overrides))
    if not isinstance(model, LanguageModel):
        raise Exit(f"{run}: expected the run of a model of mlx-lm (use: mlx_lm), got one of {type(model).__name__}")
    weights = chosen.weights(average=average)
    try:
        if kind == "fuse":
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                written = export_fused(model, folder, weights, None if few is None else Quantize(**few))
            for each in told:
                typer.echo(f"warning: {each.message}", err=True)
            return written
        return export_adapters(model, folder, weights, new=True, peft=kind == "peft")
    except OSError as error:
        raise Exit(f"{error.filename or folder}: not written: {error.strerror}") from None
    except ValueError as error:
        raise Exit(f"{chosen.path}: {error}") from None


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
