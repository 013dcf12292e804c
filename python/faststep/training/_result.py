"""The end of a training, and the counts that a checkpoint keeps of its course."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from faststep.training._window import Window

Reason = Literal["done", "early_stop", "callback", "signal", "max_time"]


@dataclass(frozen=True)
class Result:
    """Result of a training.

    Attributes:
        reason: "done": all steps or epochs are made. "early_stop": the monitored value no longer improves. "callback":
            a callback stopped it. "signal": SIGINT or SIGTERM stopped it. "max_time": the time is over.
        steps: How many steps have been made in all.
        loss: The mean training loss of the last interval, None where there was none.
        best: The best value of what is monitored (the validation loss by default), None without validation.
        metrics: The last interval's "train/loss", "train/accuracy" and so on; the last validation's "val/loss", ...
        last_checkpoint: The folder of the newest checkpoint.
        best_checkpoint: The folder of the checkpoint with the best value; None without validation, and where it is not
            kept (`keep_best=0`).
    """

    reason: Reason
    steps: int
    loss: float | None
    best: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    last_checkpoint: Path | None = None
    best_checkpoint: Path | None = None


@dataclass
class TrainingProgress:
    """Counts and marks of a training beyond model, optimizer, step and data; a checkpoint keeps them."""

    number: int = 0
    monitor: str = "val/loss"  # what `best` is of
    mode: str = "min"
    best: float | None = None
    best_step: int | None = None
    stale: int = 0  # validations since the best one
    row: int = 0  # batches skipped in a row
    skipped: int = 0
    seconds: float = 0.0
    window: Window | None = field(default=None)

    def state(self) -> dict[str, Any]:
        """Return plain numbers."""
        kept = dict(vars(self))
        return kept | {"window": None if self.window is None else self.window.state()}
