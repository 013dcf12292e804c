"""What a user's own code is told in the course of a training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faststep.training._trainer import Result, Trainer


class Callback:
    """Is called in the course of a training; a subclass overrides what it needs.

    `trainer.step` is the `faststep.Step`, `trainer.number` says how many steps are made, and `trainer.stop()` ends the
    training behind the one under way. An exception ends it too, as a `TrainingError` of the phase "callback".

    Example:
        >>> from faststep.training import Callback
        >>> class Unfreeze(Callback):
        ...     def on_step(self, trainer, number):
        ...         if number == 1000:
        ...             trainer.step.model.unfreeze()
    """

    def on_start(self, trainer: Trainer) -> None:
        """Be told that training begins, or goes on from a checkpoint."""

    def on_step(self, trainer: Trainer, number: int) -> None:
        """Be told that so many steps are made; the last ones may still be under way on the device."""

    def on_validation(self, trainer: Trainer, loss: float, best: bool) -> None:
        """Be told the mean loss of a validation, and whether it is the best so far."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Be told that a checkpoint has been taken; it may not be written yet."""

    def on_end(self, trainer: Trainer, result: Result) -> None:
        """Be told that training has ended, whatever the reason."""
