"""A small GPT."""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from faststep.recipes._activations import gelu_approx
from faststep.recipes._embedding import rows

ACTIVATIONS = {"relu2": nn.relu2, "gelu": gelu_approx}


class Block(nn.Module):
    """Causal attention, then a network of two layers, each added to the residual stream."""

    def __init__(self, width: int, heads: int, activation: str = "relu2") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads, self.activation = heads, ACTIVATIONS[activation]
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.network_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def __call__(self, x: mx.array, mask: mx.array | str = "causal") -> mx.array:
        """Map floating point [batch, seq, width] to the same shape; a mask is bool [batch, 1, seq, seq]."""
        x = x + self.attend(self.attention_norm(x), mask)
        return x + self.down(self.activation(self.up(self.network_norm(x))))

    def attend(self, x: mx.array, mask: mx.array | str) -> mx.array:
        """Mix every position with those that the mask lets it see."""
        batch, seq, width = x.shape
        heads = self.qkv(x).reshape(batch, seq, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        q, k, v = heads  # each [batch, heads, seq, width / heads]
        mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)
        return self.out(mixed.transpose(0, 2, 1, 3).reshape(batch, seq, width))


class GPT(nn.Module):
    """A decoder over tokens, bytes by default, with learned positions and its output tied to its embedding.

    Args:
        layers: How many blocks.
        width: Of the residual stream; a multiple of `heads`.
        heads: Of each attention.
        context: The longest sequence.
        vocabulary: How many tokens there are.
        activation: Between the two layers of a block: `relu2`, or `gelu` (approximately).

    Raises:
        ValueError: A size is not positive, or `width` no multiple of `heads`.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        context: int = 64,
        vocabulary: int = 256,
        activation: Literal["relu2", "gelu"] = "relu2",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        sizes = {"layers": layers, "width": width, "heads": heads, "context": context, "vocabulary": vocabulary}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected a number from 1 on, got {size}")
        if width % heads:
            raise ValueError(f"width: expected a multiple of heads ({heads}), got {width}")
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = [Block(width, heads, activation) for _ in range(layers)]
        self.norm = nn.RMSNorm(width)

    def __call__(
        self, tokens: mx.array, positions: mx.array | None = None, segments: mx.array | None = None
    ) -> mx.array:
        """Map tokens to logits of the next one.

        Args:
            tokens: Integers [batch, seq].
            positions: Integers [batch, seq], as `faststep.data.Pack` gives them. Default: from 0 on.
            segments: Integers [batch, seq]: tokens see those of their own number only. Default: all before them.

        Returns:
            Floating point [batch, seq, vocabulary].
        """
        logits: mx.array = self.embedding.as_linear(self.hidden(tokens, positions, segments))
        return logits

    def generate(self, tokens: list[int], count: int, temperature: float = 1.0) -> list[int]:
        """Draw the tokens that go on with others, each from what the ones before it say.

        Args:
            tokens: The beginning, one token at least; of a longer one the last `context` count.
            count: How many to draw.
            temperature: What the logits are divided by; 0: always the likeliest.

        Returns:
            The tokens that were drawn.
        """
        whole, context = list(tokens), self.positions.weight.shape[0]
        for _ in range(count):
            logits = self(mx.array([whole[-context:]]))[0, -1].astype(mx.float32)
            drawn = mx.random.categorical(logits / temperature) if temperature > 0 else logits.argmax()
            token: Any = drawn.item()
            whole.append(token)
        return whole[len(tokens) :]

    @property
    def head(self) -> mx.array:
        """The weight of the last layer, [vocabulary, width]: the embedding's."""
        weight: mx.array = self.embedding.weight
        return weight

    def hidden(self, tokens: mx.array, positions: mx.array | None = None, segments: mx.array | None = None) -> mx.array:
        """Map tokens to what the last layer gets, floating point [batch, seq, width].

        Raises:
            ValueError: The sequences are longer than `context`.
        """
        seq, context = tokens.shape[1], self.positions.weight.shape[0]
        if positions is None and seq > context:
            raise ValueError(f"tokens: expected sequences of at most {context} (context), got {seq}")
        x = rows(self.embedding, tokens) + rows(self.positions, mx.arange(seq) if positions is None else positions)
        mask: mx.array | str = "causal"
        if segments is not None:
            same = segments[:, None, :, None] == segments[:, None, None, :]  # [batch, 1, seq, seq]
            mask = same & mx.tri(seq, dtype=mx.bool_)
        for block in self.blocks:
            x = block(x, mask)
        hidden: mx.array = self.norm(x)
        return hidden
