"""Measure a step over 4-bit weights with adapters on a CPU: MLX's quantized products, and ours by way of float32.

``python benches/quantized.py`` takes a minute.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from cases import Run, loss_fn
from samples import measure_alone
from timing import in_turns, run_block
from ways import COMPILED, FAST, WAYS, StepFn

OWN = f"{FAST}, MLX's quantized products"
WIDTH, HIDDEN, LAYERS, HEADS, VOCABULARY, RANK = 256, 704, 4, 4, 512, 8
TITLE = f"Llama, {LAYERS} layers x {WIDTH}, 4-bit weights in groups of 64, LoRA of rank {RANK}, batch 2, sequence 64"


class Adapted(nn.Module):
    """A quantized layer with an adapter of low rank, which alone trains."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        layer = nn.Linear(inputs, outputs, bias=False)
        self.linear = nn.QuantizedLinear.from_linear(layer, group_size=64, bits=4)
        self.down = 0.02 * mx.random.normal((inputs, RANK))
        self.up = 0.02 * mx.random.normal((RANK, outputs))

    def __call__(self, x: mx.array) -> mx.array:
        """Map [..., inputs] to [..., outputs]."""
        y: mx.array = self.linear(x)
        return y + (x @ self.down) @ self.up


class Block(nn.Module):
    """Attention with rotary positions and a gated MLP, as Llama has them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.query, self.key, self.value, self.out = (Adapted(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = Adapted(WIDTH, HIDDEN), Adapted(WIDTH, HIDDEN), Adapted(HIDDEN, WIDTH)
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.rope = nn.RoPE(WIDTH // HEADS)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, seq, width] to the same."""
        y = self.before_attention(x)
        q, k, v = (self.by_head(layer(y)) for layer in (self.query, self.key, self.value))
        scale = (WIDTH // HEADS) ** -0.5
        y = mx.fast.scaled_dot_product_attention(self.rope(q), self.rope(k), v, scale=scale, mask="causal")
        x = x + self.out(y.swapaxes(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(nn.silu(self.gate(y)) * self.up(y))

    def by_head(self, x: mx.array) -> mx.array:
        """Map [batch, seq, width] to [batch, heads, seq, width / heads]."""
        return x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)


class Llama(nn.Module):
    """A small one, all of it frozen but the adapters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.freeze()
        for module in self.modules():
            if isinstance(module, Adapted):
                module.unfreeze(recurse=False, keys=["down", "up"])

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens, int32 [batch, seq], to logits, [batch, seq, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.as_linear(self.norm(x))


def build(way: str) -> StepFn:
    """Make a step, and take two; the first traces it, with the products that the environment asks for by then."""
    mx.random.seed(0)
    model = Llama()
    mx.eval(model.state)
    step = WAYS[COMPILED if way == COMPILED else FAST](Run(model, optim.AdamW(1e-3), loss_fn))
    os.environ["FASTSTEP_QUANTIZED"] = "0" if way == OWN else "1"
    for _ in range(2):
        mx.eval(step(*batch()))
    return step


def batch() -> tuple[mx.array, mx.array]:
    """Draw tokens and those one later, equal each time."""
    tokens = mx.random.randint(0, VOCABULARY, (2, 65), key=mx.random.key(1))
    return tokens[:, :-1], tokens[:, 1:]


def measure(rounds: int, after_round: Callable[[], None]) -> dict[str, Any]:
    """Time every way; return milliseconds by way and round, and how far the losses of three steps are apart."""
    steps = {way: build(way) for way in (COMPILED, OWN, FAST)}
    losses = {way: float(step(*batch())) for way, step in steps.items()}
    blocks = {way: functools.partial(run_block, step, [batch()], 2) for way, step in steps.items()}
    gap = max(abs(loss - losses[COMPILED]) for loss in losses.values())
    return {"title": TITLE, "largest loss difference": gap, "ms": in_turns(blocks, rounds, after_round)}


if __name__ == "__main__":
    measure_alone("quantized", "qlora", "Measure a step over quantized weights.", measure, rounds=10, gpu=False)
