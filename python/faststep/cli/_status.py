"""Exit codes and arguments that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DONE, FAILED, WRONG, DIFFERS, GAVE_UP = range(5)  # and `faststep._command.HUNG`
LOST = 6  # the other ranks are gone

ConfigFile = Annotated[Path, typer.Argument(help="The YAML file.", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(help="The folder of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, such as train.steps=100; may be repeated."),
]


class Exit(Exception):
    """Ends a command with a line on stderr."""

    def __init__(self, text: str, status: int = WRONG) -> None:
        super().__init__(text)
        self.status = status
