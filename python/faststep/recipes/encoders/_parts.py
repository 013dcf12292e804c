"""Shared parts of encoders: attention, its masks, and first weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx
import mlx.nn as nn

from faststep.recipes._activations import gelu_approx

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": gelu_approx,
    "gelu_pytorch_tanh": gelu_approx,
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


def in_blocks(seq: int, reach: int) -> bool:
    """Return whether local attention of such rows is computed in blocks: a part of all scores, for some copies more."""
    return 0 < 4 * reach < seq


def near(seq: int, reach: int, mask: mx.array | None, segments: mx.array | None) -> mx.array | None:
    """Return the mask of local attention: what global attention sees, at most `reach` tokens to each side.

    Every token sees itself, padding too, so that no row of the softmax is empty.

    Args:
        seq: The length of the rows.
        reach: How far a token sees to each side.
        mask: As for `who_sees_whom`.
        segments: As for `who_sees_whom`.

    Returns:
        bool [batch or 1, 1, seq, seq] for `attend`; None where all see all. Of long rows (`in_blocks`) what
        `attend_near` takes, bool [batch or 1, blocks, 1, reach, 3 * reach].
    """
    if in_blocks(seq, reach):
        return _near_in_blocks(seq, reach, mask, segments)
    seen = who_sees_whom(seq, mask, segments)
    if seq <= reach + 1:
        return seen
    places = mx.arange(seq)
    distance = mx.abs(places[:, None] - places)
    close = distance <= reach
    return close if seen is None else (seen & close) | (distance == 0)


def attend_near(q: mx.array, k: mx.array, v: mx.array, mask: mx.array, reach: int, dropout: float) -> mx.array:
    """Mix values by the attention of queries to keys that are near: blocks of queries, each to three blocks of keys.

    Args:
        q: Floating point [batch, heads, seq, size], as `k` and `v`.
        k: The keys.
        v: The values.
        mask: bool [batch or 1, blocks, 1, reach, 3 * reach], of `near`.
        reach: How far a token sees to each side; the length of a block.
        dropout: The share of the attention that is left out.

    Returns:
        Floating point [batch, seq, heads * size].
    """
    batch, _, seq, _ = q.shape
    q, k, v = (each.transpose(0, 2, 1, 3) for each in (q, k, v))  # [batch, seq, heads, size]
    blocks = [_blocks(q, reach), *(_neighbours(each, reach) for each in (k, v))]
    q, k, v = (each.flatten(0, 1).transpose(0, 2, 1, 3) for each in blocks)  # [batch * blocks, heads, ..., size]
    seen = mx.broadcast_to(mask, (batch, *mask.shape[1:])).flatten(0, 1)
    return attend(q, k, v, seen, dropout).reshape(batch, -1, q.shape[1] * q.shape[3])[:, :seq]


def _near_in_blocks(seq: int, reach: int, mask: mx.array | None, segments: mx.array | None) -> mx.array:
    distance = mx.abs(mx.arange(reach)[:, None] + reach - mx.arange(3 * reach))  # [reach, 3 * reach]
    if segments is None:
        keys = mx.ones((1, seq), mx.bool_) if mask is None else mask.astype(mx.bool_)
        seen = _neighbours(keys, reach)[:, :, None]
    else:
        numbers = segments + 1 - segments.min()  # what lies around the rows is 0
        seen = _blocks(numbers, reach)[..., None] == _neighbours(numbers, reach)[:, :, None]
    return ((seen & (distance <= reach)) | (distance == 0))[:, :, None]


def _blocks(x: mx.array, length: int) -> mx.array:
    """Cut rows [batch, seq, ...] into blocks [batch, blocks, length, ...], the last one filled up with zeros."""
    x = mx.pad(x, [(0, 0), (0, -x.shape[1] % length), *[(0, 0)] * (x.ndim - 2)])
    return x.reshape(x.shape[0], -1, length, *x.shape[2:])


def _neighbours(x: mx.array, length: int) -> mx.array:
    """Return each block of rows [batch, seq, ...] between those beside it: [batch, blocks, 3 * length, ...]."""
    x = _blocks(x, length)
    around = mx.pad(x, [(0, 0), (1, 1), *[(0, 0)] * (x.ndim - 2)])
    count = x.shape[1]
    return mx.concatenate([around[:, i : i + count] for i in range(3)], axis=2)


def mean_of_tokens(x: mx.array, mask: mx.array | None) -> mx.array:
    """Average over the tokens of each text: floating point [batch, seq, width] to [batch, width]."""
    if mask is None:
        return x.mean(axis=1)
    counts = mask[..., None].astype(x.dtype)
    return (x * counts).sum(axis=1) / counts.sum(axis=1)


def truncated(shape: Iterable[int], deviation: float, cutoff: float) -> mx.array:
    """Draw a normal distribution of this standard deviation, cut off at so many of them."""
    return mx.random.truncated_normal(-cutoff, cutoff, tuple(shape)) * deviation
