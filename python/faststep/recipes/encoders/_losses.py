"""The losses of encoders: masked tokens, and the class of a text. They measure their accuracy too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from faststep.losses import linear_cross_entropy
from faststep.recipes._losses import check_outputs, explained, in_range, mean_cross_entropy

Loss = Callable[..., Any]


def masked_lm(
    *, weighted: bool = False, ignore_index: int = -100, in_chunks: bool = False, outputs: bool = False
) -> Loss:
    """Make the loss of a masked language model: the mean cross entropy of the tokens that were masked, in nats.

    It takes the batches of the dataset `masked_text`, by the collates `pad` and `pack` (`targets: false`), and measures
    the `accuracy` of the masked tokens beside.

    Args:
        weighted: Return `(mean, tokens that count, ...)`, as `Step(weighted=True)` takes it.
        ignore_index: The target of tokens that were not masked.
        in_chunks: Never hold all logits: `faststep.losses.linear_cross_entropy`, for large vocabularies; without the
            accuracy.
        outputs: Return the logits too, for metrics; not with `in_chunks`.

    Raises:
        ValueError: `outputs` with `in_chunks`.
    """
    check_outputs(outputs, in_chunks)
    chunked = linear_cross_entropy if in_chunks else None  # a step reads all that a loss names

    def loss(
        model: nn.Module,
        tokens: mx.array,
        targets: mx.array,
        mask: mx.array | None = None,
        lengths: mx.array | None = None,  # of Pad, whose mask says the same
        **places: mx.array,
    ) -> Any:
        if chunked is None:
            logits = model(tokens, mask, **places)
            return _measured(logits, targets, mask, ignore_index, weighted, outputs)
        weights = (targets != ignore_index).astype(mx.float32) * (1 if mask is None else mask)
        hidden, (weight, bias) = model.hidden(tokens, mask, **places), model.output
        mean = chunked(hidden, weight, targets, bias=bias, token_weights=weights, ignore_index=ignore_index)
        mean = mx.where(((weights != 0) & ~in_range(targets, weight.shape[0])).any(), -mx.inf, mean)
        return (mean, weights.sum()) if weighted else mean

    return explained(loss)


def text_classification(*, weighted: bool = False, ignore_index: int = -100, outputs: bool = False) -> Loss:
    """Make the loss of a classifier of texts: the mean cross entropy of their labels, in nats, and its `accuracy`.

    It takes the batches of the dataset `labelled_text` by the collate `pad`.

    Args:
        weighted: Return `(mean, labels that count, ...)`.
        ignore_index: The label of what does not count.
        outputs: Return the logits too, for metrics.
    """

    def loss(
        model: nn.Module,
        tokens: mx.array,
        labels: mx.array,
        mask: mx.array | None = None,
        lengths: mx.array | None = None,
    ) -> Any:
        return _measured(model(tokens, mask), labels, None, ignore_index, weighted, outputs)

    return explained(loss)


def _measured(
    logits: mx.array, targets: mx.array, mask: mx.array | None, ignore_index: int, weighted: bool, outputs: bool
) -> Any:
    """Return the loss, its weight and the logits where they are asked for, and the accuracy."""
    mean = mean_cross_entropy(logits, targets, mask, ignore_index, weighted)
    counts = (targets != ignore_index).astype(mx.float32) * (1 if mask is None else mask)
    right = ((logits.argmax(axis=-1) == targets) * counts).sum() / mx.maximum(counts.sum(), 1e-9)
    head = mean if isinstance(mean, tuple) else (mean,)
    return (*head, *([logits] if outputs else []), {"accuracy": right})
