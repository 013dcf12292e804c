"""The loss of text about time series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from faststep.losses import linear_cross_entropy
from faststep.recipes._losses import check_outputs, explained, in_range, mean_cross_entropy

Loss = Callable[..., Any]


def series_to_text(*, weighted: bool = False, in_chunks: bool = False, outputs: bool = False) -> Loss:
    """Make the mean cross entropy of the tokens of texts about series, in nats.

    It takes the batches of the dataset `series` by the collate `stack`, and measures beside the loss the `accuracy` of
    the tokens, and the share of the `answers` of which every token is right.

    Args:
        weighted: Return `(mean, tokens that count, ...)`, as `Step(weighted=True)` takes it.
        in_chunks: Never hold all logits: `faststep.losses.linear_cross_entropy`, for large vocabularies; nothing is
            measured beside the loss then.
        outputs: Return the logits too, for metrics; not with `in_chunks`.

    Raises:
        ValueError: `outputs` with `in_chunks`.
    """
    check_outputs(outputs, in_chunks)
    chunked = linear_cross_entropy if in_chunks else None  # a step reads all that a loss names

    def loss(model: nn.Module, series: mx.array, tokens: mx.array, mask: mx.array) -> Any:
        weights = mask.astype(mx.float32)
        if chunked is not None:
            alone = chunked(model.hidden(series, tokens), model.head, tokens, token_weights=weights)
            alone = mx.where((mask & ~in_range(tokens, model.head.shape[0])).any(), -mx.inf, alone)
            return (alone, weights.sum()) if weighted else alone
        logits = model(series, tokens)
        mean = mean_cross_entropy(logits, tokens, mask, -100, weighted)
        right = logits.argmax(axis=-1) == tokens
        measured = {
            "accuracy": (right * weights).sum() / mx.maximum(weights.sum(), 1e-9),
            "answers": (right | ~mask).all(axis=-1).mean(),
        }
        head = mean if isinstance(mean, tuple) else (mean,)
        return (*head, *([logits] if outputs else []), measured)

    return explained(loss)
