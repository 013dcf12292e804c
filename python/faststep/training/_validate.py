"""Validation: the mean loss on data that is not trained on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from faststep._random import mlx_seed
from faststep._records import number
from faststep._step import Step, call_with
from faststep.training._window import arrays_of, mean


def validate(step: Step, batches: Iterable[Any], most: int | None = None) -> tuple[float, int]:
    """Compute the mean loss of some batches, with the average of the weights where the step keeps one.

    The model is in evaluation mode meanwhile, and `mx.random.state` is afterwards what it was, so that training goes on
    as if nothing had happened. A batch counts by its weight where the loss has one (`weighted=True`), otherwise by the
    length of its first array.

    Args:
        step: The step, whose model and loss function are taken.
        batches: The batches.
        most: Take at most so many; None: all.

    Returns:
        The mean loss, NaN where nothing had weight, and the number of batches.
    """
    model, losses = step.model, []
    start = getattr(batches, "state", None)
    key, training = mlx_seed(), [module for module in model.modules() if module.training]
    try:
        model.eval()
        with step.average() if step.options.ema_decay is not None else contextlib.nullcontext():
            for batch in itertools.islice(batches, most):
                value = call_with(batch, step.loss_fn, model)
                losses.append(_loss_and_weight(value, batch, step.options.weighted))
    finally:
        for module in training:
            module._set_training_mode(True)
        mx.random.seed(key)
        if start is not None and hasattr(batches, "load_state"):
            batches.load_state(start)  # the same batches the next time
    total = mean(losses)
    return float("nan") if total is None else total, len(losses)


def _loss_and_weight(value: Any, batch: Any, weighted: bool) -> tuple[float, float]:
    if weighted:
        return number(value[0]), number(value[1])
    rows = next((array.shape[0] for array in arrays_of(batch) if array.ndim), 1)
    return number(value[0] if isinstance(value, tuple) else value), float(rows)
