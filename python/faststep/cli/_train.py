"""Commands that train: from a config, on from a run's checkpoint, and evaluation."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from faststep._files import replacing
from faststep.cli._checkpoint import checkpoints_of, choose
from faststep.cli._saved import config_of, refuse, save
from faststep.cli._stack_dump import StackDump
from faststep.cli._status import FAILED, ConfigFile, Exit, Overrides, RunFolder
from faststep.cli._supervisor import EXIT_ON_HANG

if TYPE_CHECKING:
    from faststep.config import Built, Config
    from faststep.training import Resume, Trainer

Supervise = Annotated[
    bool,
    typer.Option(help="Train in a child process, and restart it from the newest checkpoint if it dies."),
]
_NAMED_BY = {"data": ("data", "train"), "loss": ("loss",), "callback": ("callbacks",)}  # phases, by keys
ExitOnHang = Annotated[bool, typer.Option(EXIT_ON_HANG, hidden=True)]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show the whole config and exit.")] = False,
    fast_dev_run: Annotated[
        bool, typer.Option("--fast-dev-run", help="Try the config out in four steps; keep nothing.")
    ] = False,
    supervise: Supervise = False,
    exit_on_hang: ExitOnHang = False,
) -> None:
    """Train a config, in a folder without an earlier training."""
    from faststep.checkpoints import Checkpoints
    from faststep.config import load

    loaded = load(config, overrides or [])
    if print_config:
        typer.echo(loaded.text(), nl=False)
        return
    if fast_dev_run:
        _try_out(loaded)
        return
    run = Path(loaded.run)
    if (run / "checkpoints").is_dir() and Checkpoints(run / "checkpoints").list():
        raise Exit(
            f"{run}: there are checkpoints of another training. `faststep resume {run}` continues it; "
            f"`--set run=FOLDER` starts another one"
        )
    refuse(loaded, config)
    if supervise:
        _supervise(["train", str(config)], lambda more: load(config, more), [*(overrides or []), f"run={run}"])
    _train(loaded, False, exit_on_hang)


def resume(
    run: RunFolder,
    overrides: Overrides = None,
    supervise: Supervise = False,
    number: Annotated[int | None, typer.Option(help="Continue from the checkpoint of this step.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Continue from the checkpoint with the best validation.")
    ] = False,
    exit_on_hang: ExitOnHang = False,
) -> None:
    """Continue a training from its newest valid checkpoint, as if it had not stopped.

    With --number or --best: from that checkpoint; later ones are moved to RUN/checkpoints_set_aside.
    """
    if best and number is not None:
        raise Exit("--best, --number: expected one of them, got both")
    start: Resume = "best" if best else "auto" if number is None else number
    config = config_of(run, overrides)
    if supervise:
        which = ["--best"] if best else [] if number is None else ["--number", str(number)]
        _supervise(["resume", str(run), *which], lambda more: config_of(run, more), overrides)
    _train(config, start, exit_on_hang)


def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    number: Annotated[
        int | None, typer.Option(help="The checkpoint of this step; the default is the newest one.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the best monitored value.")] = False,
    test: Annotated[bool, typer.Option("--test", help="Use the data of data.test.")] = False,
) -> None:
    """Compute the loss and metrics of a checkpoint on all of the validation data, or of the test data."""
    from faststep.config import build
    from faststep.training import validate

    config, what = config_of(run, overrides), "test" if test else "validation"
    if test:
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"validation": config.data.test, "test": None})}
        )
    if config.data.validation is None:
        raise Exit(f"{run}: expected {what} data in its config (data.{what}), found none")
    built = build(config)
    assert built.validation is not None
    chosen = choose(checkpoints_of(run), run, number=number, best=best)
    chosen.restore(built.step)
    loss, batches, metrics = validate(built.step, built.validation)
    values = ", ".join(f"{name} {value:.6f}" for name, value in {"loss": loss, **metrics}.items())
    if built.step.ranks.rank == 0:
        typer.echo(f"step {chosen.number}: {values} over {batches} batches")


def predict(
    run: RunFolder,
    file: Annotated[Path, typer.Argument(help="The npz file to write.", show_default=False)],
    overrides: Overrides = None,
    number: Annotated[
        int | None, typer.Option(help="The checkpoint of this step; the default is the newest one.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the best monitored value.")] = False,
) -> None:
    """Write the outputs of a checkpoint's model for the validation data, in their order."""
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
    with replacing(file, new=True) as target:
        np.savez(target, **outputs)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
    typer.echo(f"step {chosen.number}: {shapes} in {file}")


def _supervise(command: list[str], load: Callable[[list[str]], Config], overrides: list[str] | None) -> None:
    if "MLX_RANK" in os.environ:
        raise Exit(
            "--supervise: expected one process, got a rank of several, which end and start together: "
            "`faststep launch --supervise` starts them all again"
        )
    from faststep.cli._supervisor import supervise

    raise SystemExit(supervise(command, load, overrides or []))


def _train(config: Config, start: Resume, exit_on_hang: bool) -> None:
    trainer = _trainer_of(config)
    if exit_on_hang:
        trainer.on_hang = "exit"
    with StackDump(trainer.hang_timeout), _named(config):
        result = trainer.train(start)
    if result.reason == "signal" and trainer.ranks.rank == 0:  # the last to leave; `mlx.launch` ends those behind it
        raise SystemExit(128 + (trainer.signal or signal.SIGTERM))


@contextlib.contextmanager
def _named(config: Config) -> Iterator[None]:
    """Name the line of the config behind which an error of the training is.

    Raises:
        Exit: For a `TrainingError`, with the same cause.
    """
    from faststep.training import TrainingError

    try:
        yield
    except TrainingError as error:
        path = _NAMED_BY.get(error.phase, ())
        place = config.source.problem(path, "").place if path else ""
        raise Exit(": ".join(filter(None, [place, str(error)])), FAILED) from error.__cause__


def _try_out(config: Config) -> None:
    from faststep.config import build
    from faststep.loggers import Progress
    from faststep.training import Trainer

    built = build(config)
    parts: dict[str, Any] = {"validation": built.validation, "callbacks": built.callbacks, "config": built.config}
    trainer = Trainer(built.step, built.loader, loggers=[Progress()], **parts, **built.options, fast_dev_run=True)
    with _named(config):
        trainer.train()
    typer.echo("tried out: four steps, their validation and checkpoint. Nothing is kept")


def _trainer_of(config: Config) -> Trainer:
    """Build a config, and make the trainer of it; it saves the config when it holds the run's folder."""
    from faststep.config import build
    from faststep.training import Trainer

    built = build(config)

    def begin() -> list[Any]:
        loggers = _loggers_of(built)
        save(config)
        return loggers

    parts: dict[str, Any] = {"validation": built.validation, "callbacks": built.callbacks, "config": built.config}
    return Trainer(built.step, built.loader, loggers=begin, **parts, **built.options)


def _loggers_of(built: Built) -> list[Any]:
    """Make the loggers of a config.

    Raises:
        Exit: A built-in one cannot be made; what a logger of the user's raises passes as it is.
    """
    from faststep.loggers import Csv, MLflow, Progress, TensorBoard, Trackio, WandB

    run, logs = Path(built.options["run"]), built.logs
    loggers: list[Any] = [Progress()]
    try:  # those first that write nothing before their first record
        for name, kind in {"wandb": WandB, "mlflow": MLflow, "trackio": Trackio}.items():
            loggers += [kind(run, **logs[name])] if logs[name] is not None else []
        loggers += [TensorBoard(run / "tensorboard")] if logs["tensorboard"] else []
        loggers += [Csv(run / "steps.csv"), Csv(run / "validations.csv", "validation")] if logs["csv"] else []
    except (ImportError, OSError, ValueError) as error:
        raise Exit(str(error)) from None
    return [*loggers, *(make() for make in built.loggers)]
