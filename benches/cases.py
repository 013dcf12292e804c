"""Measured cases: a model, its loss and its batches, the same for every way of taking a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from models import GPT, MLP, Checkpointed, Llama, QLoRA, Recurrent, ResNet

LossFn = Callable[..., mx.array]
MAX_GRAD_NORM = 1.0


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
        compared: The number of first losses that every way has to give; batch norm makes more of rounding each step.
    """

    title: str
    model: type[MLP | GPT | Checkpointed | ResNet | Recurrent | Llama]
    shape: dict[str, int]
    batch: int
    dtype: mx.Dtype = mx.float32
    compared: int = 8

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
    "resnet": Case("ResNet-20 for images of 32 x 32, batch 32", ResNet, {"blocks": 3, "width": 16}, 32, compared=2),
    "lstm": Case(
        "LSTM, 2 layers x 256, vocabulary 64, batch 16, sequence 64",
        Recurrent,
        {"layers": 2, "width": 256, "seq": 64, "vocab": 64},
        batch=16,
    ),
    "llama": Case(
        "Llama, 6 layers x 256, 8 heads over 2 keys, hidden 704, vocabulary 512, batch 4, sequence 128",
        Llama,
        {"layers": 6, "width": 256, "heads": 8, "shared": 4, "hidden": 704, "seq": 128, "vocab": 512},
        batch=4,
    ),
    "moe": Case(
        "Llama, 4 layers x 128, 4 heads, 2 of 8 experts with hidden 256, vocabulary 512, batch 4, sequence 64",
        Llama,
        {"layers": 4, "width": 128, "heads": 4, "shared": 1, "hidden": 256, "seq": 64, "vocab": 512, "experts": 8},
        batch=4,
    ),
    "qlora": Case(
        "Llama, 4 layers x 256, 4 heads, hidden 704, vocabulary 512, 4-bit weights in groups of 64, LoRA of rank 8, "
        "batch 2, sequence 64",
        QLoRA,
        {"rank": 8, "layers": 4, "width": 256, "heads": 4, "shared": 1, "hidden": 704, "seq": 64, "vocab": 512},
        batch=2,
    ),
    "long": gpt(layers=2, width=256, heads=4, batch=1, seq=2048),
    "gpt24": gpt(layers=24, width=64, heads=4, batch=1, seq=16),
    "gpt4": gpt(layers=4, width=128, heads=4, batch=4, seq=64),
    "gpt768": gpt(layers=2, width=768, heads=12, batch=1, seq=32, vocab=512),
    "gpt6": gpt(layers=6, width=384, heads=6, batch=8, seq=256),
    "gpt2": gpt2(),
    "gpt2-bf16": gpt2(dtype=mx.bfloat16),
}
ON_CPU = ("mlp", "blocks", "resnet", "lstm", "llama", "moe", "qlora", "long", "gpt24", "gpt4", "gpt768")
ON_GPU = ("mlp", "gpt24", "gpt6", "gpt2", "gpt2-bf16")
