"""Exit codes and arguments that commands share, the config of a run and its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from faststep.config import Built, Config
    from faststep.training import Trainer

DONE, FAILED, WRONG, DIFFERS, GAVE_UP = range(5)
CONFIG = "config.yaml"

ConfigFile = Annotated[Path, typer.Argument(help="The YAML file.", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(help="The folder of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key: train.steps=100. Several times.")
]


class Exit(Exception):
    """Ends a command with a line on stderr."""

    def __init__(self, text: str, status: int = WRONG) -> None:
        super().__init__(text)
        self.status = status


def config_of(run: Path, overrides: list[str] | None = None) -> Config:
    """Load the config that was saved with a run.

    Raises:
        Exit: There is none.
    """
    from faststep.config import load

    file = run / CONFIG
    if not file.is_file():
        raise Exit(f"{run}: expected the folder of a run, found no {CONFIG} in it")
    return load(file, [*(overrides or []), f"run={run}"])


def trainer_of(built: Built) -> Trainer:
    """Make the trainer of a config."""
    from faststep.loggers import Csv, Progress, TensorBoard, WandB
    from faststep.training import Trainer

    run, logs = Path(built.options["run"]), built.logs
    loggers: list[Any] = [Progress()]
    loggers += [Csv(run / "steps.csv"), Csv(run / "validations.csv", "validation")] if logs["csv"] else []
    loggers += [TensorBoard(run / "tensorboard")] if logs["tensorboard"] else []
    loggers += [WandB(run, **logs["wandb"])] if logs["wandb"] is not None else []
    loggers += [make() for make in built.loggers]
    parts: dict[str, Any] = {"validation": built.validation, "callbacks": built.callbacks, "config": built.config}
    return Trainer(built.step, built.loader, loggers=loggers, **parts, **built.options)
