"""The command that converts a config of mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from faststep._files import replacing
from faststep.cli._status import Exit


def from_mlx_lm(
    file: Annotated[Path, typer.Argument(help="A config of mlx_lm.lora, YAML or JSON.", show_default=False)],
    out: Annotated[Path | None, typer.Argument(help="The config to write; the default is stdout.")] = None,
) -> None:
    """Convert a config of `mlx_lm.lora` to one of this package; keys that cannot be converted are named on stderr."""
    from faststep.config import read, validate, write
    from faststep.mlx_lm import from_mlx_lm

    try:
        values: Any = read(file.read_bytes(), str(file))[0]
    except OSError as error:
        raise Exit(f"{file}: cannot be read: {error.strerror}") from None
    if not isinstance(values, dict):
        raise Exit(f"{file}: expected the config of mlx_lm.lora, a mapping, got {type(values).__name__}")
    try:
        made, left_out = from_mlx_lm(values)
    except (ValueError, KeyError, TypeError) as error:
        raise Exit(f"{file}: {error}") from None
    made["run"] = f"runs/{(out or file).stem}"
    validate({**made, "folder": "."})
    for each in left_out:
        typer.echo(f"left out: {each}", err=True)
    if out is None:
        typer.echo(write(made), nl=False)
        return
    try:
        with replacing(out, new=True) as target:
            target.write(write(made).encode())
    except OSError as error:
        raise Exit(f"{out}: not written: {error.strerror}") from None
    typer.echo(f"{out}: `faststep train {out}`")
