"""The commands in one application, and the reports of their failures."""

from __future__ import annotations

import faulthandler
import inspect
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from faststep.cli import (
    _check_ranks,
    _checkpoint,
    _doctor,
    _find_batch,
    _find_rate,
    _from_mlx_lm,
    _launch,
    _new,
    _plan_ranks,
    _profile,
    _runs,
    _train,
    _verify,
)
from faststep.cli._status import FAILED, LOST, WRONG, Exit

if TYPE_CHECKING:
    from faststep._step import RankError

_WAIT = 2.0  # seconds, for the rank that has failed: `mlx.launch` ends it as soon as another one has ended
app = typer.Typer(
    name="faststep",
    help="Train MLX models: a config in, checkpoints that resume exactly, logs and reports out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "new": _new.new,
    "from-mlx-lm": _from_mlx_lm.from_mlx_lm,
    "train": _train.train,
    "resume": _train.resume,
    "launch": _launch.launch,
    "eval": _train.evaluate,
    "predict": _train.predict,
    "report": _runs.report,
    "compare": _runs.compare,
    "verify-resume": _verify.verify_resume,
    "reproduce": _verify.reproduce,
    "doctor": _doctor.doctor,
    "check": _doctor.check,
    "tune": _runs.tune,
    "find-rate": _find_rate.find_rate,
    "find-batch": _find_batch.find_batch,
    "profile": _profile.profile,
    "plan-ranks": _plan_ranks.plan_ranks,
    "schema": _runs.schema,
    "version": _runs.version,
}
for name, command in _COMMANDS.items():
    app.command(name, short_help=(inspect.getdoc(command) or "").partition("\n")[0])(command)  # or it would be cut
app.command("check-ranks", hidden=True)(_check_ranks.check_ranks)  # for `launch --check`
app.add_typer(_checkpoint.app, name="checkpoint")


def _version(asked: bool) -> None:
    if asked:
        _runs.version()
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Take the options before the command."""


def main() -> None:
    """Run the command that stands on the line."""
    faulthandler.enable()  # a memory fault tells where it was
    warnings.formatwarning = _formatted
    try:
        app()
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        if (cause := error.__cause__) is not None and _is_of_users(error, status) and not _says_all(cause):
            traceback.print_exception(type(cause), cause, _users(cause))
        print(f"faststep: {error}", file=sys.stderr, flush=True)
        if _of_ranks(error) is not None:
            time.sleep(_WAIT)
        raise SystemExit(status) from None


_with_place = warnings.formatwarning


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as it is printed: one of this package without the place of the call, which is in the package."""
    text = str(message)
    return f"{text}\n" if text.startswith("faststep: ") else _with_place(message, category, filename, lineno, line)


def _status(error: Exception) -> int | None:
    """Return the exit code of an error that is no fault of the program; None for one that may be."""
    from faststep.checkpoints import CheckpointError
    from faststep.config import ConfigError
    from faststep.report import LogError
    from faststep.training import RunError, TrainingError

    wrong = (ConfigError, CheckpointError, LogError, RunError)
    if isinstance(error, Exit):
        return error.status
    if (of_ranks := _of_ranks(error)) is not None:
        return FAILED if of_ranks.ranks else LOST
    if isinstance(error, TrainingError):
        return FAILED
    return WRONG if isinstance(error, wrong) else None


def _is_of_users(error: Exception, status: int) -> bool:
    """Return whether the cause of an error may be in the user's own code."""
    from faststep.config import CodeError

    return status == FAILED or isinstance(error, CodeError)


def _of_ranks(error: Exception) -> RankError | None:
    """Return the error of other ranks that this one is, or is due to."""
    from faststep._step import RankError
    from faststep.training import TrainingError

    cause = error.__cause__ if isinstance(error, TrainingError) else error
    return cause if isinstance(cause, RankError) else None


def _says_all(cause: BaseException) -> bool:
    """Return whether an error is this package's own word to the user, to which a traceback adds nothing."""
    return isinstance(cause, Exception) and _status(cause) is not None


def _users(error: BaseException) -> TracebackType | None:
    """Return the part of a traceback that begins where this package is left, all of it where it is not.

    A syntax error has its place in its text: None.
    """
    rest = trace = None if isinstance(error, SyntaxError) else error.__traceback__
    while rest is not None and rest.tb_frame.f_globals.get("__name__", "").startswith(("faststep.", "importlib")):
        rest = rest.tb_next
    return rest or trace
