"""Shared parts of encoders: attention, its masks, and first weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx
import mlx.nn as nn

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
}


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """Return an activation by Hugging Face's name.

    Raises:
        ValueError: It is not known here.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"config: expected an activation of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, dropout: float) -> mx.array:
    """Mix values by the attention of queries to keys.

    Args:
        q: Floating point [batch, heads, seq, size], as `k` and `v`.
        k: The keys.
        v: The values.
        mask: bool, broadcast to [batch, heads, seq, seq]: True where a query (row) sees a key. None: everywhere.
        dropout: The share of the attention that is left out.

    Returns:
        Floating point [batch, seq, heads * size].
    """
    scale = q.shape[-1] ** -0.5
    if dropout == 0:
        mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    else:
        scores = (q * scale) @ k.swapaxes(-1, -2)
        if mask is not None:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        kept = mx.random.bernoulli(1 - dropout, scores.shape)
        mixed = mx.where(kept, mx.softmax(scores, axis=-1, precise=True) / (1 - dropout), 0).astype(v.dtype) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)


def who_sees_whom(seq: int, mask: mx.array | None, segments: mx.array | None) -> mx.array | None:
    """Return the mask of global attention, or None where all see all.

    Args:
        seq: The length of the rows.
        mask: bool [batch, seq], True where there is a token, as `faststep.data.Pad` gives it.
        segments: Integers [batch, seq], as `faststep.data.Pack` gives them: tokens see those of their own number.

    Returns:
        bool [batch, 1, 1 or seq, seq].
    """
    if segments is not None:
        return segments[:, None, :, None] == segments[:, None, None, :]  # padding has a number too: no row is empty
    return None if mask is None else mask[:, None, None, :].astype(mx.bool_)


def near(seq: int, reach: int, seen: mx.array | None) -> mx.array | None:
    """Return the mask of local attention: what global attention sees, at most `reach` tokens to each side.

    Every token sees itself, padding too, so that no row of the softmax is empty.
    """
    if seq <= reach + 1:
        return seen
    places = mx.arange(seq)
    distance = mx.abs(places[:, None] - places)
    close = distance <= reach
    return close if seen is None else (seen & close) | (distance == 0)


def mean_of_tokens(x: mx.array, mask: mx.array | None) -> mx.array:
    """Average over the tokens of each text: floating point [batch, seq, width] to [batch, width]."""
    if mask is None:
        return x.mean(axis=1)
    counts = mask[..., None].astype(x.dtype)
    return (x * counts).sum(axis=1) / counts.sum(axis=1)


def truncated(shape: Iterable[int], deviation: float, cutoff: float) -> mx.array:
    """Draw a normal distribution of this standard deviation, cut off at so many of them."""
    return mx.random.truncated_normal(-cutoff, cutoff, tuple(shape)) * deviation
