"""A learning rate that is lowered when validations no longer improve."""

from __future__ import annotations

from typing import Any

from faststep._records import figure
from faststep.training import _rates
from faststep.training._trainer import Callback, Trainer


class ReduceOnPlateau(Callback):
    """A callback that multiplies the learning rate when so many validations in a row have brought no better value.

    The trainer's `monitor`, `mode` and `min_delta` define "better". After a resume it goes on from the same state.

    Args:
        factor: What the rate is multiplied by.
        patience: How many validations without a better value.
        min_rate: The rate below which it is not lowered.
    """

    def __init__(self, factor: float = 0.5, patience: int = 3, min_rate: float = 0.0) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor: expected a number above 0 and below 1, got {factor}")
        if patience < 1:
            raise ValueError(f"patience: expected a number from 1 on, got {patience}")
        self._factor, self._patience, self._min_rate = factor, patience, min_rate
        self._stale = 0

    @property
    def state(self) -> dict[str, Any]:
        """How many validations have brought no better value."""
        return {"stale": self._stale}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._stale = int(state["stale"])

    def on_start(self, trainer: Trainer) -> None:
        """Refuse a schedule, which sets the rate at each step, and a training without validation.

        Raises:
            ValueError: There is one.
        """
        if trainer.validation is None:
            raise ValueError("reduce_on_plateau: expected validation data, got none")
        if any(_rates.schedule_of(each) is not None for each in _rates.parts(trainer.step.optimizer)):
            raise ValueError("reduce_on_plateau: expected a learning rate, got a schedule, which sets it at each step")

    def on_validation(self, trainer: Trainer, loss: float, best: bool) -> None:
        """Count, and lower the rate."""
        self._stale = 0 if best else self._stale + 1
        if self._stale < self._patience:
            return
        self._stale = 0
        for each in _rates.parts(trainer.step.optimizer):
            before = _rates.rate_of(each)
            if before is not None and before > self._min_rate:
                each.learning_rate = max(before * self._factor, self._min_rate)
                trainer.log({"learning rate": f"lowered from {figure(before)} to {figure(_rates.rate_of(each))}"})
