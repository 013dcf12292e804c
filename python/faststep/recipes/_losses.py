"""Losses of a model's outputs: `loss(model, *batch)`, as `nn.value_and_grad` and `faststep.Step` take them.

A label that is none of the model's outputs makes a loss minus infinity, on the device, where MLX would read past the
end of an array. The batch is skipped then, and the loss's `explain` tells the trainer why.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from faststep.losses import Reduction, linear_cross_entropy
from faststep.recipes._head import parted

Loss = Callable[..., Any]


def next_token(
    *,
    weighted: bool = False,
    ignore_index: int = -100,
    in_chunks: bool = False,
    label_smoothing: float = 0.0,
    outputs: bool = False,
) -> Loss:
    """Make the loss of a language model: the mean cross entropy of every next token, in nats.

    It takes `tokens`, integers [batch, seq], of which each is predicted by the ones before it, or `tokens` and
    `targets` of one shape, which are shifted already; and a `mask` of the targets' shape, 0 where they do not count.
    So it takes what `faststep.data` gives: by `stack`, by `Pad` (a bool array in the place of `targets` is the mask of
    `tokens`), and by `Pack`, whose positions and segments go to the model. Batches of Hugging Face's datasets have
    `input_ids`, `labels` (not shifted) and `attention_mask`.

    Args:
        weighted: Return `(mean, tokens that count)`, as `Step(weighted=True)` takes it.
        ignore_index: The target of tokens that do not count.
        in_chunks: Never hold all logits: `faststep.losses.linear_cross_entropy` over what the last layer gets and its
            weight, for large vocabularies. A model says both by `hidden(tokens)` and `head`; or it has a linear layer
            `lm_head` or is tied to its embedding, and returns its logits as that gives them, as mlx-lm's models do.
        label_smoothing: As in `nn.losses.cross_entropy`; not with `in_chunks`.
        outputs: Return the logits behind loss and weight, for metrics; not with `in_chunks`.

    Raises:
        ValueError: `outputs` or `label_smoothing` with `in_chunks`.
    """
    check_outputs(outputs, in_chunks)
    if label_smoothing and in_chunks:
        raise ValueError("in_chunks: expected no label_smoothing, which takes all logits; drop one or the other")
    part, chunked = (parted, linear_cross_entropy) if in_chunks else (None, None)  # a step reads all that a loss names

    def loss(
        model: nn.Module,
        tokens: mx.array | None = None,
        targets: mx.array | None = None,
        mask: mx.array | None = None,
        lengths: mx.array | None = None,  # of Pad, whose mask says the same
        **places: mx.array,
    ) -> Any:
        if tokens is None:
            tokens, targets, mask, places = _of_hugging_face(mask, **places)
        if targets is not None and targets.dtype == mx.bool_:
            targets, mask = None, targets
        if targets is None:
            tokens, targets = tokens[:, :-1], tokens[:, 1:]
            mask = None if mask is None else mask[:, 1:]
        if part is None or chunked is None:
            logits = model(tokens, **places)
            found = mean_cross_entropy(logits, targets, mask, ignore_index, weighted, label_smoothing)
            return _with(found, logits, outputs)
        weights = (targets != ignore_index).astype(mx.float32) * (1 if mask is None else mask)
        parts = part(model, tokens, **places)
        how: dict[str, Any] = {"bias": parts.bias, "token_weights": weights, "ignore_index": ignore_index}
        mean = chunked(parts.hidden, parts.weight, targets, **how)
        mean = mx.where(((weights != 0) & ~in_range(targets, parts.vocabulary)).any(), -mx.inf, mean)
        return (mean, weights.sum()) if weighted else mean

    return explained(loss)


def _of_hugging_face(
    mask: mx.array | None,
    *,
    input_ids: mx.array | None = None,
    labels: mx.array | None = None,
    attention_mask: mx.array | None = None,
    **places: mx.array,
) -> tuple[mx.array, mx.array, mx.array | None, dict[str, mx.array]]:
    """Return tokens, targets and mask of a batch by Hugging Face's names, whose labels stand at their own tokens.

    Padding at the left goes to the right, where no token sees it.

    Raises:
        TypeError: There are no tokens in it.
    """
    if input_ids is None:
        raise TypeError(f"next_token: expected a batch with tokens or input_ids, got {', '.join(places) or 'none'}")
    labels = input_ids if labels is None else labels
    if attention_mask is not None:
        mask = attention_mask if mask is None else mask * attention_mask
        padded = (attention_mask != 0).argmax(axis=1, keepdims=True)
        order = (mx.arange(input_ids.shape[1]) + padded) % input_ids.shape[1]
        input_ids, labels, mask = (mx.take_along_axis(each, order, axis=1) for each in (input_ids, labels, mask))
    targets = labels[:, 1:]
    return input_ids[:, :-1], targets, None if mask is None else mask[:, 1:], places


def cross_entropy(
    *,
    weighted: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weights: list[float] | None = None,
    outputs: bool = False,
) -> Loss:
    """Make the loss of a classifier: the mean cross entropy of `model(x)` and labels `y`, in nats.

    Args:
        weighted: Return `(mean, labels that count)`.
        ignore_index: The label of what does not count.
        label_smoothing: As in `nn.losses.cross_entropy`.
        class_weights: What a label of each class counts, where some are rare: the mean is over these weights, as in
            PyTorch. None: 1.
        outputs: Return the logits behind loss and weight, for metrics.
    """
    counts = None if class_weights is None else mx.array(class_weights, dtype=mx.float32)

    def loss(
        model: nn.Module, x: mx.array, y: mx.array, mask: mx.array | None = None, lengths: mx.array | None = None
    ) -> Any:
        logits = model(x)
        if counts is not None and counts.size != logits.shape[-1]:
            raise ValueError(f"class_weights: expected {logits.shape[-1]}, one for each class, got {counts.size}")
        found = mean_cross_entropy(logits, y, mask, ignore_index, weighted, label_smoothing, counts)
        return _with(found, logits, outputs)

    return explained(loss)


def mse(*, outputs: bool = False) -> Loss:
    """Make the mean squared error of `model(x)` and `y`.

    Args:
        outputs: Return `model(x)` behind the loss, for metrics.
    """

    def loss(model: nn.Module, x: mx.array, y: mx.array) -> Any:
        found = model(x)
        return _with(nn.losses.mse_loss(found, y), found, outputs)

    return loss


def _with(loss: Any, found: mx.array, outputs: bool) -> Any:
    """Return a loss, or a loss and its weight, with the outputs of the model where they are asked for."""
    if not outputs:
        return loss
    return (*loss, found) if isinstance(loss, tuple) else (loss, found)


def mean_cross_entropy(
    logits: mx.array,
    targets: mx.array,
    mask: mx.array | None,
    ignore_index: int,
    weighted: bool,
    label_smoothing: float = 0.0,
    class_weights: mx.array | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Average over the targets that count; 0 where none does."""
    targets = targets.astype(mx.int32)  # of uint8, -100 is a label
    counts, inside = targets != ignore_index, in_range(targets, logits.shape[-1])
    labels = mx.where(counts & inside, targets, 0)
    losses = nn.losses.cross_entropy(logits.astype(mx.float32), labels, label_smoothing=label_smoothing)
    weights = counts.astype(mx.float32) if mask is None else counts * mask.astype(mx.float32)
    weights = weights if class_weights is None else weights * class_weights[labels]
    total = weights.sum()
    mean = (losses * weights).sum() / mx.maximum(total, 1e-9)
    mean = mx.where(((weights != 0) & ~inside).any(), -mx.inf, mean)
    return (mean, total) if weighted else mean


def check_outputs(outputs: bool, in_chunks: bool) -> None:
    """Refuse to return outputs that are computed in chunks.

    Raises:
        ValueError: Both are asked for.
    """
    if outputs and in_chunks:
        raise ValueError("in_chunks: expected no metrics of the outputs, which are never held; drop one or the other")


def in_range(labels: mx.array, classes: int) -> mx.array:
    """Return whether each label is among so many classes, bool of their shape."""
    return (labels >= 0) & (labels < classes)


def explained(loss: Loss) -> Loss:
    """Give a loss over labels its words for a batch that was skipped."""
    loss.explain = _explain  # type: ignore[attr-defined]
    return loss


def _explain(value: float, *batch: Any, **named: Any) -> str | None:
    """Say why the loss of a batch has this value, where it is for a label that is none of the model's outputs."""
    if value != -math.inf:
        return None
    arrays = [each for each in (*batch, *named.values()) if isinstance(each, mx.array)]
    integers = [each for each in arrays if mx.issubdtype(each.dtype, mx.integer) and each.size]
    ranges = " and ".join(f"{each.min().item()} to {each.max().item()}" for each in integers)
    return (
        "a label is out of range: expected whole numbers from 0 to one less than the model's outputs, or ignore_index, "
        f"got a batch of integers from {ranges}"
    )


def _nll_loss(inputs: mx.array, targets: mx.array, axis: int = -1, reduction: Reduction = "mean") -> mx.array:
    inside = in_range(targets, inputs.shape[axis])
    loss = nn.losses.nll_loss(inputs, mx.where(inside, targets, 0), axis, reduction)
    return mx.where(inside.all(), loss, -mx.inf)


def _of_outputs(function: Callable[..., mx.array]) -> Callable[..., Loss]:
    """Make what makes a loss of `model(x)` and `y` of a function of predictions and targets, the mean by default."""

    def make(*, outputs: bool = False, **options: Any) -> Loss:
        def loss(model: nn.Module, x: mx.array, y: mx.array) -> Any:
            found = model(x)
            return _with(function(found, y, **{"reduction": "mean", **options}), found, outputs)

        return explained(loss) if function is _nll_loss else loss

    options = list(inspect.signature(function).parameters.values())[2:]
    defaults = {each.name: each.default for each in options if each.name != "weights"} | {"reduction": "mean"}
    plain = [
        each.replace(kind=each.KEYWORD_ONLY, default=defaults[each.name]) for each in options if each.name in defaults
    ]
    plain.append(inspect.Parameter("outputs", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool"))
    make.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    make.__doc__ = (
        f"Make `mlx.nn.losses.{function.__name__.removeprefix('_')}` of `model(x)` and `y`, the mean by default."
    )
    return make


_OF_OUTPUTS = (
    "binary_cross_entropy",
    "hinge_loss",
    "huber_loss",
    "kl_div_loss",
    "l1_loss",
    "log_cosh_loss",
    "mse_loss",
    "smooth_l1_loss",
)
LOSSES: dict[str, Callable[..., Loss]] = {  # each makes a loss
    "next_token": next_token,
    "cross_entropy": cross_entropy,
    "mse": mse,
    **{name: _of_outputs(getattr(nn.losses, name)) for name in _OF_OUTPUTS},
    "nll_loss": _of_outputs(_nll_loss),
}
METRICS = {"cross_entropy": "accuracy", "next_token": "perplexity"}  # of a loss, unless others are given
