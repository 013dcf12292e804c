"""Models of every kind that the contract names, in plain MLX, small enough to share compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

WIDTH, CLASSES, BATCH, SEQ, EDGES = 16, 4, 8, 6, 20
Draw = Callable[[np.random.Generator], tuple[np.ndarray, ...]]
Batch = tuple[Any, ...]  # arrays


class MLP(nn.Module):
    """Two layers and a Python number that the loss depends on."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = [nn.Linear(width, 2 * width), nn.Linear(2 * width, CLASSES)]
        self.scale = 1.0

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to logits [batch, classes]."""
        return self.scale * self.layers[1](nn.relu(self.layers[0](x)))


class ConvNet(nn.Module):
    """Buffers (BatchNorm's) and random numbers (dropout's); a bias would have the noise of zero as its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm(4)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(4, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to logits [batch, classes], as an image of 4 x 4."""
        x = nn.relu(self.norm(self.conv(x.reshape(-1, 4, 4, 1))))
        return self.head(self.dropout(x.mean(axis=(1, 2))))


class TiedLM(nn.Module):
    """An embedding that is the output too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens [batch, seq] to logits [batch, seq, 32]."""
        return self.embedding.as_linear(self.mix(self.embedding(tokens)))


class Nested(nn.Module):
    """Modules and bare arrays in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, Any] = {
            "in": [nn.Linear(WIDTH, WIDTH), {"deep": nn.Linear(WIDTH, WIDTH)}],
            "out": nn.Linear(WIDTH, CLASSES),
        }
        self.gains: list[Any] = [mx.ones((WIDTH,)), {"late": mx.array(0.5)}]

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to logits [batch, classes]."""
        first, second = self.parts["in"]
        x = nn.relu(first(x)) * self.gains[0]
        return self.parts["out"](second["deep"](x) * self.gains[1]["late"])


class Recurrent(nn.Module):
    """An LSTM over the features of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 8)
        self.head = nn.Linear(8, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to logits [batch, classes], as 4 steps of 4."""
        hidden, _ = self.cell(x.reshape(-1, 4, 4))
        return self.head(hidden[:, -1])


class Looped(nn.Module):
    """One layer that stands in the model three times (Dehghani et al., Universal Transformers)."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = [nn.Linear(WIDTH, WIDTH)] * 2
        self.head = nn.Linear(WIDTH, CLASSES)
        self.last = self.loop[0]

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to logits [batch, classes]."""
        for layer in [*self.loop, self.last]:
            x = x + nn.tanh(layer(x))
        return self.head(x)


class LoRALinear(nn.Module):
    """A quantized layer that stays, and an adapter of low rank that trains."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.QuantizedLinear.from_linear(nn.Linear(inputs, outputs), group_size=32, bits=4)
        self.a = mx.random.normal((inputs, 4)) * 0.1
        self.b = mx.random.normal((4, outputs)) * 0.1

    def __call__(self, x: mx.array) -> mx.array:
        """Add the adapter to the base."""
        return self.base(x) + (x @ self.a) @ self.b


class QuantizedLoRA(nn.Module):
    """Quantized layers with adapters; only those and the head train."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 32)
        self.adapted = [LoRALinear(32, 32), LoRALinear(32, 32)]
        self.head = nn.Linear(32, CLASSES)
        self.widen.freeze()
        for layer in self.adapted:
            layer.base.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to logits [batch, classes]."""
        x = self.widen(x)
        for layer in self.adapted:
            x = nn.relu(layer(x))
        return self.head(x)


class Decorated(nn.Module):
    """A checkpointed part and a compiled one, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to logits [batch, classes]."""
        return self.second(squash(nn.utils.checkpoint(self.first)(x)))


@mx.compile
def squash(x: mx.array) -> mx.array:
    """Apply an activation that is compiled by itself."""
    return x * mx.sigmoid(x)


class GPT(nn.Module):
    """MLX's own encoder, masked, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)
        self.blocks = nn.TransformerEncoder(2, WIDTH, 2, mlp_dims=32, dropout=0.1, norm_first=True)
        self.head = nn.Linear(WIDTH, 32, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens [batch, seq] to logits [batch, seq, 32]."""
        mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens.shape[1])
        return self.head(self.blocks(self.tokens(tokens), mask))


class GraphNet(nn.Module):
    """Two rounds of messages along the edges: gathered where they begin, summed where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.kept = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.head = nn.Linear(WIDTH, CLASSES)

    def __call__(self, nodes: mx.array, edges: mx.array) -> mx.array:
        """Map nodes [batch, width] and edges int32 [2, edges] to logits [batch, classes]."""
        source, target = edges
        for send, keep in zip(self.sent, self.kept, strict=True):
            messages = mx.take(send(nodes), source, axis=0)
            nodes = nn.tanh(keep(nodes).at[target].add(messages))
        return self.head(nodes)


class VAE(nn.Module):
    """An encoder and a decoder; its loss draws between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def cross_entropy(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return the loss of most rows."""
    return nn.losses.cross_entropy(model(x).astype(mx.float32), y, reduction="mean")


def graph_cross_entropy(model: nn.Module, nodes: mx.array, edges: mx.array, y: mx.array) -> mx.array:
    """Return the loss of a graph's nodes."""
    return nn.losses.cross_entropy(model(nodes, edges), y, reduction="mean")


def evidence_bound(model: VAE, x: mx.array, _: mx.array) -> mx.array:
    """Return the negative evidence lower bound of one draw (Kingma and Welling, Auto-Encoding Variational Bayes)."""
    mean, log_variance = mx.split(model.encoder(x), 2, axis=-1)
    latent = mean + mx.exp(0.5 * log_variance) * mx.random.normal(mean.shape)
    divergence = -0.5 * (1 + log_variance - mean.square() - mx.exp(log_variance)).sum(axis=-1).mean()
    return nn.losses.mse_loss(model.decoder(latent), x) + 0.1 * divergence


def draw_classes(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw float32 [batch, width] and int32 [batch]."""
    return rng.standard_normal((BATCH, WIDTH), dtype=np.float32), rng.integers(CLASSES, size=BATCH, dtype=np.int32)


def draw_tokens(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw int32 [batch, seq] tokens and their successors."""
    tokens = rng.integers(32, size=(BATCH, SEQ + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def draw_graph(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Draw float32 nodes [batch, width], int32 edges [2, edges] between them and int32 classes [batch]."""
    nodes, classes = draw_classes(rng)
    return nodes, rng.integers(BATCH, size=(2, EDGES), dtype=np.int32), classes


@dataclass(frozen=True)
class ModelCase:
    """A model with its batches, and how far a step may be from the reference's."""

    make: Callable[[], nn.Module]
    draw: Draw = draw_classes
    tolerance: float = 2e-6
    loss_fn: Callable[..., Any] = cross_entropy

    def batches(self, count: int) -> list[Batch]:
        """Draw batches, equal each time."""
        rng = np.random.default_rng(3)
        return [tuple(mx.array(part) for part in self.draw(rng)) for _ in range(count)]


def frozen_mlp() -> nn.Module:
    """Build an MLP whose first layer does not train."""
    model = MLP()
    model.layers[0].freeze()
    return model


def bfloat16_mlp() -> nn.Module:
    """Build an MLP in bfloat16."""
    model = MLP()
    model.set_dtype(mx.bfloat16)
    return model


def mixed_mlp() -> nn.Module:
    """Build an MLP with layers of different dtypes."""
    model = MLP()
    model.layers[0].set_dtype(mx.bfloat16)
    return model


MODELS = {
    "mlp": ModelCase(MLP),
    "looped": ModelCase(Looped),
    "conv": ModelCase(ConvNet),
    "tied": ModelCase(TiedLM, draw_tokens),
    "nested": ModelCase(Nested),
    "lstm": ModelCase(Recurrent),
    "lora": ModelCase(QuantizedLoRA),
    "frozen": ModelCase(frozen_mlp),
    "decorated": ModelCase(Decorated),
    "gpt": ModelCase(GPT, draw_tokens),
    "graph": ModelCase(GraphNet, draw_graph, loss_fn=graph_cross_entropy),
    "vae": ModelCase(VAE, loss_fn=evidence_bound),
    "bf16": ModelCase(bfloat16_mlp, tolerance=5e-3),
    "mixed": ModelCase(mixed_mlp, tolerance=5e-3),
}
