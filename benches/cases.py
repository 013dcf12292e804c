"""What is measured: models, losses and batches in plain MLX, the same for every way of taking a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

MAX_GRAD_NORM = 1.0
BYTES = 256
CLASSES = 10


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = [nn.Linear(width, width) for _ in range(layers - 1)]
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """Map float32 [batch, width] to logits, float32 [batch, 10]."""
        for layer in self.layers:
            x = nn.relu(layer(x))
        return self.head(x)


class GPT(nn.Module):
    """MLX's own encoder with a causal mask; 24 layers of it make 293 tensors."""

    def __init__(self, layers: int, width: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(seq, width)
        self.blocks = nn.TransformerEncoder(layers, width, num_heads=4, norm_first=True)
        self.head = nn.Linear(width, BYTES, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens, int32 [batch, seq], to logits, float32 [batch, seq, 256]."""
        seq = tokens.shape[1]
        mask = nn.MultiHeadAttention.create_additive_causal_mask(seq)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(mx.arange(seq)), mask))


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return the mean cross entropy, in nats."""
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


@dataclass(frozen=True)
class Case:
    """One model with its batches.

    Attributes:
        title: What the report calls it.
        model: Builds the model.
        batch: Draws x and y from a generator.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]

    def new_run(self) -> tuple[nn.Module, optim.Optimizer]:
        """Build the model, equal each time, and its AdamW."""
        mx.random.seed(0)
        model = self.model()
        mx.eval(model.parameters())
        return model, optim.AdamW(learning_rate=1e-3, weight_decay=0.1)

    def batches(self, count: int = 8) -> list[tuple[mx.array, mx.array]]:
        """Draw batches, equal each time."""
        rng = np.random.default_rng(0)
        pairs = [self.batch(rng) for _ in range(count)]
        return [(mx.array(x), mx.array(y)) for x, y in pairs]


def images(batch: int, width: int) -> Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]:
    """Return a source of float32 [batch, width] with int32 [batch] classes."""

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((batch, width), dtype=np.float32)
        return x, rng.integers(CLASSES, size=batch, dtype=np.int32)

    return draw


def text(batch: int, seq: int) -> Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]:
    """Return a source of int32 [batch, seq] tokens, and the same one later."""

    def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens = rng.integers(BYTES, size=(batch, seq + 1), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]

    return draw


CASES = {
    "mlp": Case("MLP, 4 layers x 128, batch 64", lambda: MLP(4, 128), images(64, 128)),
    "gpt24": Case("GPT, 24 layers x 64, batch 1, sequence 16", lambda: GPT(24, 64, 16), text(1, 16)),
    "gpt4": Case("GPT, 4 layers x 128, batch 4, sequence 64", lambda: GPT(4, 128, 64), text(4, 64)),
}
