"""A small encoder of ModernBERT's kind, and texts for it: local and global attention by turns, RoPE, GeGLU, masked LM.

The layout is that of "Smarter, Better, Faster, Longer" (Warner et al., 2024, https://arxiv.org/abs/2412.13663).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

VOCABULARY, MASKED, IGNORED = 64, 1, -100
HEADS, WIDTH, LAYERS, LOCAL = 4, 32, 4, 4  # every second layer sees LOCAL tokens to each side


class Layer(nn.Module):
    """Attention and GeGLU, normalised before."""

    def __init__(self, reach: int | None) -> None:
        super().__init__()
        self.reach = reach
        self.norms = [nn.LayerNorm(WIDTH, bias=False) for _ in range(2)]
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rope = nn.RoPE(WIDTH // HEADS, base=10_000 if reach else 160_000)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        """Return [batch, length, width]; mask is bool [batch, length]."""
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).reshape(batch, length, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
        allowed = mask[:, None, None, :]
        if self.reach:
            place = mx.arange(length)
            allowed = allowed & (mx.abs(place[:, None] - place) <= self.reach)
        allowed = allowed | mx.eye(length, dtype=mx.bool_)  # padding sees itself: no row of the softmax is empty
        q, k = self.rope(heads[0]), self.rope(heads[1])
        seen = mx.fast.scaled_dot_product_attention(q, k, heads[2], scale=q.shape[-1] ** -0.5, mask=allowed)
        x = x + self.out(seen.transpose(0, 2, 1, 3).reshape(batch, length, -1))
        gate, value = mx.split(self.up(self.norms[1](x)), 2, axis=-1)
        return x + self.down(nn.gelu(gate) * value)


class Encoder(nn.Module):
    """Layers between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = [Layer(LOCAL if i % 2 else None) for i in range(LAYERS)]
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def __call__(self, tokens: mx.array, mask: mx.array) -> mx.array:
        """Return logits, [batch, length, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embedding.as_linear(self.norm(x))


def loss_fn(model: Encoder, tokens: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
    """Return the mean cross entropy of the masked tokens."""
    counts = targets != IGNORED
    losses = nn.losses.cross_entropy(model(tokens, mask), mx.where(counts, targets, 0), weights=counts)
    return losses.sum() / mx.maximum(counts.sum(), 1)


class MaskedTexts:
    """Texts that count upwards; a fifth of each is masked, otherwise in each epoch."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng((index, self.epoch))
        length, start = 8 + index % 40, random.integers(0, VOCABULARY)
        tokens = 2 + (start + np.arange(length)) % (VOCABULARY - 2)
        hidden = random.random(length) < 0.2
        hidden[length // 2] = True
        return {"tokens": np.where(hidden, MASKED, tokens), "targets": np.where(hidden, tokens, IGNORED)}
