"""Commands that train: from a config, on from a run's checkpoint, and evaluation."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from faststep.cli._checkpoint import checkpoints_of, choose
from faststep.cli._status import CONFIG, ConfigFile, Exit, Overrides, RunFolder, config_of, trainer_of

if TYPE_CHECKING:
    from faststep.config import Config

Supervise = Annotated[
    bool,
    typer.Option(help="Train in a process of its own, and start it again from the newest checkpoint when it dies."),
]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show the whole config and leave.")] = False,
    supervise: Supervise = False,
) -> None:
    """Train as a config says, in a folder that holds no training yet."""
    from faststep.config import load

    loaded = load(config, overrides or [])
    if print_config:
        typer.echo(loaded.text(), nl=False)
        return
    run = Path(loaded.run)
    if (run / "checkpoints").is_dir() and any((run / "checkpoints").iterdir()):
        raise Exit(
            f"{run}: there are checkpoints of another training. `faststep resume {run}` goes on with it; "
            f"`--set run=FOLDER` begins another one"
        )
    _train(loaded, supervise)


def resume(
    run: RunFolder,
    overrides: Overrides = None,
    supervise: Supervise = False,
) -> None:
    """Go on with a training from its newest valid checkpoint, as if it had not stopped."""
    _train(config_of(run, overrides), supervise)


def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    number: Annotated[int | None, typer.Option(help="Which checkpoint; the newest one otherwise.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the best monitored value.")] = False,
) -> None:
    """Compute the validation loss and metrics of a checkpoint, on all of the validation data."""
    from faststep.config import build
    from faststep.training import validate

    built = build(config_of(run, overrides))
    if built.validation is None:
        raise Exit(f"{run}: expected validation data in its config (data.validation), found none")
    chosen = choose(checkpoints_of(run), run, number=number, best=best)
    chosen.restore(built.step)
    loss, batches, metrics = validate(built.step, built.validation)
    values = ", ".join(f"{name} {value:.6f}" for name, value in {"loss": loss, **metrics}.items())
    typer.echo(f"step {chosen.number}: {values} over {batches} batches")


def predict(
    run: RunFolder,
    file: Annotated[Path, typer.Argument(help="The npz file to write.", show_default=False)],
    overrides: Overrides = None,
    number: Annotated[int | None, typer.Option(help="Which checkpoint; the newest one otherwise.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the best monitored value.")] = False,
) -> None:
    """Write what the model of a checkpoint gives for the validation data, in its order."""
    import numpy as np
    from mlx.utils import tree_flatten

    from faststep.config import build
    from faststep.training import predict

    if file.exists():
        raise Exit(f"{file}: there is such a file already")
    built = build(config_of(run, overrides))
    if built.validation is None:
        raise Exit(f"{run}: expected validation data in its config (data.validation), found none")
    chosen = choose(checkpoints_of(run), run, number=number, best=best)
    chosen.restore(built.step)
    found = dict(tree_flatten(predict(built.step, built.validation)))
    outputs = {name or "outputs": array for name, array in found.items()}
    with file.open("xb") as target:
        np.savez(target, **outputs)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
    typer.echo(f"step {chosen.number}: {shapes} in {file}")


def _train(config: Config, supervise: bool) -> None:
    from faststep.cli._supervisor import supervise as watch
    from faststep.config import build

    if supervise:
        raise SystemExit(watch(save(config)))
    built = build(config)
    trainer = trainer_of(built)
    save(config)
    result = trainer.train()
    if result.reason == "signal":
        raise SystemExit(128 + (trainer.signal or signal.SIGTERM))


def save(config: Config) -> Path:
    """Save the config with its run, and return the run's folder."""
    run = Path(config.run)
    run.mkdir(parents=True, exist_ok=True)
    new = run / f"{CONFIG}.new"
    new.write_text(config.text(), encoding="utf-8")
    new.replace(run / CONFIG)
    return run
