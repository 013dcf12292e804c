"""The value by which validations are compared: for the best checkpoint, and for stopping early."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from faststep.metrics import direction
from faststep.training._validate import Evaluation

_PREFIX = "val/"


class Monitor:
    """The value of a validation that is to improve.

    Attributes:
        name: "val/loss", or "val/" and the name of a metric.
        mode: "min": a smaller value is better. "max": a larger one.
    """

    def __init__(self, name: str, mode: str | None, min_delta: float) -> None:
        """Check the arguments.

        Args:
            name: As the attribute.
            mode: As the attribute; None: "min" for the loss and the perplexity.
            min_delta: By how much a better value has to differ.

        Raises:
            ValueError: The name does not begin with "val/", or the mode is not known.
        """
        self.name, self.mode, self._min_delta = name, direction(name, mode), min_delta

    def check(self, names: Iterable[str]) -> None:
        """Refuse a metric that is not among those there are.

        Raises:
            ValueError: It is not.
        """
        there = [f"{_PREFIX}{each}" for each in names]
        if self.name not in there:
            alike = difflib.get_close_matches(self.name, there, 1)
            hint = f": did you mean {alike[0]}?" if alike else ""
            raise ValueError(f"monitor: expected one of {', '.join(there)}, got {self.name}{hint}")

    def value(self, evaluation: Evaluation) -> float:
        """Return the value of a validation.

        Raises:
            ValueError: It has no such metric.
        """
        values = {"loss": evaluation.loss, **evaluation.metrics}
        self.check(values)
        return values[self.name.removeprefix(_PREFIX)]

    def improves(self, value: float, best: float | None) -> bool:
        """Return whether a value is better than the best one so far; one that is not finite never is."""
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        return (best - value if self.mode == "min" else value - best) > self._min_delta
