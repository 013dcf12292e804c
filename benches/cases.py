"""Measured cases: models, losses and batches in plain MLX, the same for every way of taking a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

LossFn = Callable[..., mx.array]
Batch = tuple[np.ndarray, np.ndarray]
MAX_GRAD_NORM = 1.0
CLASSES = 10


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [nn.Linear(width, width) for _ in range(layers - 1)]
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """Map float32 [batch, width] to logits, float32 [batch, 10]."""
        for layer in self.layers:
            x = nn.relu(layer(x))
        return self.head(x)

    @staticmethod
    def draw(rng: np.random.Generator, batch: int, width: int, **_: int) -> Batch:
        """Draw float32 [batch, width] and classes, int32 [batch]."""
        x = rng.standard_normal((batch, width), dtype=np.float32)
        return x, rng.integers(CLASSES, size=batch, dtype=np.int32)


class GPT(nn.Module):
    """MLX's own encoder with a causal mask; 24 layers of it make 293 tensors."""

    def __init__(self, layers: int, width: int, heads: int, seq: int, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(seq, width)
        self.blocks = nn.TransformerEncoder(layers, width, num_heads=heads, norm_first=True)
        self.head = nn.Linear(width, vocab, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens, int32 [batch, seq], to logits, [batch, seq, vocab] in the dtype of the parameters."""
        x = self.tokens(tokens) + self.positions(mx.arange(tokens.shape[1]))
        return self.head(self.blocks(x, "causal"))  # the mask for which MLX's GPU attention has a kernel

    @staticmethod
    def draw(rng: np.random.Generator, batch: int, seq: int, vocab: int, **_: int) -> Batch:
        """Draw tokens, int32 [batch, seq], and those one later."""
        tokens = rng.integers(vocab, size=(batch, seq + 1), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """A norm, and two linear layers with SiLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to [batch, width]."""
        y: mx.array = self.down(nn.silu(self.up(self.norm(x))))
        return y


class Checkpointed(nn.Module):
    """Blocks whose activations are computed once more for the gradient: small tensors, large activations."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = [Block(width) for _ in range(layers)]
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """Map float32 [batch, width] to logits, float32 [batch, 10]."""
        for block in self.blocks:
            x = nn.utils.checkpoint(block)(x)
        return self.head(x)

    draw = staticmethod(MLP.draw)


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return the mean cross entropy, a float32 scalar in nats."""
    return nn.losses.cross_entropy(model(x).astype(mx.float32), y, reduction="mean")


@dataclass(frozen=True)
class Run:
    """Inputs that a way of taking a step is made of.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        loss_fn: What ``nn.value_and_grad(model, loss_fn)`` takes.
        max_grad_norm: The norm that gradients are clipped to; None: no clipping.
        beside: Other models, which the loss reaches: what is compiled has to capture them.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    loss_fn: LossFn
    max_grad_norm: float | None = MAX_GRAD_NORM
    beside: Sequence[nn.Module] = ()


@dataclass(frozen=True)
class Case:
    """One model with its batches.

    Attributes:
        title: What the report calls it.
        model: The model's class.
        shape: Its arguments.
        batch: The number of examples in a batch.
        dtype: The dtype of parameters and optimizer state.
    """

    title: str
    model: type[MLP] | type[GPT] | type[Checkpointed]
    shape: dict[str, int]
    batch: int
    dtype: mx.Dtype = mx.float32

    def new_run(
        self,
        loss_fn: LossFn = loss_fn,
        max_grad_norm: float | None = MAX_GRAD_NORM,
        optimizer: Callable[[], optim.Optimizer] | None = None,
    ) -> Run:
        """Build the model, equal each time, and its optimizer, AdamW unless told otherwise."""
        mx.random.seed(0)
        model = self.model(**self.shape)
        model.set_dtype(self.dtype)
        mx.eval(model.state)
        return Run(model, (optimizer or adamw)(), loss_fn, max_grad_norm)

    def batches(self, count: int = 8) -> list[tuple[mx.array, ...]]:
        """Draw batches, equal each time; images in the dtype of the parameters."""
        rng = np.random.default_rng(0)
        pairs = [self.model.draw(rng, self.batch, **self.shape) for _ in range(count)]
        return [(cast(mx.array(x), self.dtype), mx.array(y)) for x, y in pairs]


def adamw() -> optim.Optimizer:
    """Return the optimizer that all else is measured with."""
    return optim.AdamW(learning_rate=1e-3, weight_decay=0.1)


def cast(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast numbers, leave tokens."""
    return x if mx.issubdtype(x.dtype, mx.integer) else x.astype(dtype)


def gpt(
    layers: int, width: int, heads: int, batch: int, seq: int, vocab: int = 256, dtype: mx.Dtype = mx.float32
) -> Case:
    """Return the case of a GPT; its title says all its sizes."""
    title = f"GPT, {layers} layers x {width}, {heads} heads, vocabulary {vocab:,}, batch {batch}, sequence {seq}"
    shape = {"layers": layers, "width": width, "heads": heads, "seq": seq, "vocab": vocab}
    return Case(title + (", bfloat16" if dtype == mx.bfloat16 else ""), GPT, shape, batch, dtype)


# GPT-2 small (Radford et al., 2019), without biases in the attention and with an output layer of its own
gpt2 = functools.partial(gpt, layers=12, width=768, heads=12, batch=8, seq=512, vocab=50257)
CASES = {
    "mlp": Case("MLP, 4 layers x 128, batch 64", MLP, {"layers": 4, "width": 128}, batch=64),
    "blocks": Case(
        "8 checkpointed blocks of RMSNorm, Linear 128 -> 512, SiLU, Linear 512 -> 128, batch 2048",
        Checkpointed,
        {"layers": 8, "width": 128},
        batch=2048,
    ),
    "gpt24": gpt(layers=24, width=64, heads=4, batch=1, seq=16),
    "gpt4": gpt(layers=4, width=128, heads=4, batch=4, seq=64),
    "gpt768": gpt(layers=2, width=768, heads=12, batch=1, seq=32, vocab=512),
    "gpt6": gpt(layers=6, width=384, heads=6, batch=8, seq=256),
    "gpt2": gpt2(),
    "gpt2-bf16": gpt2(dtype=mx.bfloat16),
}
ON_CPU = ("mlp", "blocks", "gpt24", "gpt4", "gpt768")
ON_GPU = ("mlp", "gpt24", "gpt6", "gpt2", "gpt2-bf16")
