"""Predictions: the outputs of a model for batches, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from faststep._step import Step, call_with
from faststep.training._validate import evaluating


def predict(step: Step, batches: Iterable[Any], function: Callable[..., Any] | None = None) -> Any:
    """Compute a model's outputs, with the average of the weights where the step keeps one.

    The model is in evaluation mode meanwhile, and `mx.random.state` is afterwards what it was.

    Args:
        step: The step, whose model is taken.
        batches: The batches, in an order of which the predictions are: a `Loader` that does not shuffle.
        function: `function(model, *batch)` returns an array, or a tree of arrays, whose first axes are the samples.
            None: `model(x)`, where `x` is the first part of a batch.

    Returns:
        What the function returns, over all batches: NumPy arrays [samples, ...], float32 in place of bfloat16.

    Raises:
        ValueError: There is no batch, or what is returned differs in more than its first axis from batch to batch.
    """
    parts: list[dict[str, np.ndarray[Any, Any]]] = []
    start = getattr(batches, "state", None)
    with evaluating(step):
        for batch in batches:
            found: Any = tree_flatten(call_with(batch, function or _outputs, step.model))
            mx.eval([array for _, array in found])
            parts.append({name: _numpy(array) for name, array in found})
    if start is not None and hasattr(batches, "load_state"):
        batches.load_state(start)
    if not parts:
        raise ValueError("predict: expected batches, got none")
    whole: Any = [(name, np.concatenate([part[name] for part in parts])) for name in parts[0]]
    return whole[0][1] if len(whole) == 1 and whole[0][0] == "" else tree_unflatten(whole)


def _outputs(model: nn.Module, *batch: Any, **named: Any) -> Any:
    first = batch[0] if batch else next(iter(named.values()))
    return model(first)


def _numpy(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
