"""Actions for a training that makes no progress: a report, and the end of the process where that is wanted."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from faststep._command import HUNG
from faststep._step import Step, end_hung_rank

OnHang = Literal["report", "exit"]
_LOG_SECONDS = 5.0  # for the log, which may be what hangs


class Training(Protocol):
    """The part of a trainer that a report reads."""

    step: Step
    run: Path
    on_hang: OnHang

    @property
    def number(self) -> int:
        """Steps made so far."""


def report(trainer: Training, event: Callable[..., Any], phase: str, seconds: float) -> None:
    """Write and show the report of a phase that makes no progress; end the process where the trainer is told so.

    Args:
        trainer: The trainer, whose training is in another thread.
        event: Takes what, text and level of an event for the log.
        phase: The phase of its clock.
        seconds: How long there has been no progress.
    """
    stage = trainer.step.stage()[0]
    waits = stage == "collective"  # for other ranks, in a validation too
    stage = stage if waits or phase == "step" else phase
    text = trainer.step.hang_report(stage, seconds, {"step": str(trainer.number + 1)})
    path, shown = _free(trainer.run, trainer.number + 1), text
    with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as file:
        file.write(text)
        shown = "\n".join([*text.partition("\n\n")[0].splitlines(), f"  all stacks: {path}"])
    print(f"faststep: {shown}", file=sys.stderr, flush=True)
    summary = f"{text.splitlines()[0]}; see {path.name}"
    logging = threading.Thread(target=event, args=("hang", summary, "error"), daemon=True)
    logging.start()
    logging.join(_LOG_SECONDS)
    if trainer.on_hang == "exit":
        print(f"faststep: ending this process (on_hang: exit), exit code {HUNG}", file=sys.stderr, flush=True)
        os._exit(HUNG)
    if waits and trainer.step.ranks.size > 1:
        end_hung_rank()


def _free(run: Path, step: int) -> Path:
    """Return a name that no file has: a step may hang again after a restart."""
    names = (f"hang-{step}{again}.txt" for again in ("", *(f"-{number}" for number in range(2, 1000))))
    return next((run / name for name in names if not (run / name).exists()), run / f"hang-{step}.txt")
