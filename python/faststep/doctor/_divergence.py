"""A training that diverges: the loss rises from step to step, and the updates are as large as the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from faststep._records import figure
from faststep.doctor._finding import Finding
from faststep.doctor._held import is_floating, leaves_of, values_of
from faststep.doctor._subject import Subject

_PEAK = 100.0  # times the loss before the first step
_LEAST = 3  # steps
_LARGE = 0.1  # of an update, beside the weights
_SCALE = 100.0  # of inputs, by root mean square


def finding(
    begin: float | None, losses: Sequence[float], updates: dict[str, float], rate: float | None, subject: Subject
) -> Finding | None:
    """Return the finding of losses that rise.

    Args:
        begin: The mean loss of the batches before the first step.
        losses: The loss of each step, on the same few batches again and again; the last may not be finite.
        updates: The largest update of each module beside its weights, by root mean squares.
        rate: The learning rate of the last step.
        subject: Whose batches they are.
    """
    large = {module: each for module, each in updates.items() if each > _LARGE}
    count = min(len(subject.some()), len(losses))
    if begin is None or len(losses) < _LEAST or not large:
        return None
    end, scale = sum(losses[-count:]) / count, max(abs(begin), 1e-3)
    peak = max(losses)
    if math.isfinite(end) and end - begin < scale and peak - begin < _PEAK * scale:
        return None
    module, most = max(large.items(), key=lambda item: item[1])
    text = (
        f"the training diverges: the loss is {figure(begin)} before the first step, up to {figure(peak)} in "
        f"{len(losses)} steps, and {figure(end)} in the last {count}. An update of {module} is "
        f"{most:.2g} times its weights"
    )
    text += f"; the learning rate is {rate:.3g}" if rate is not None else ""
    wide = [(name, size) for name, size in _scales(subject) if size > _SCALE]
    remedy = "a smaller learning rate, warm-up, max_grad_norm=1.0"
    if wide:
        name, size = max(wide, key=lambda item: item[1])
        text += f"; {name} has values around {size:.2g}"
        remedy = f"scale {name} to values around 1: subtract the mean, divide by the standard deviation"
    return Finding("diverges", "failure", text, remedy, "Step(..., max_grad_norm=1.0)   # and a tenth of the rate")


def _scales(subject: Subject) -> list[tuple[str, float]]:
    """Return the root mean square of each floating argument of the first batch."""
    leaves = [(name, values_of(leaf)) for name, leaf in leaves_of(subject.some()[0]) if is_floating(leaf) and leaf.size]
    return [(name, float(math.sqrt((values.astype("float64") ** 2).mean()))) for name, values in leaves]
