"""LoRA: a frozen linear layer with an adapter of low rank that trains.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021, https://arxiv.org/abs/2106.09685), section 4.1:
`h = W0 x + scale * B A x`, where the paper's factor `alpha / r` is `scale`. Over a layer of few bits it is QLoRA
(Dettmers et al., 2023, https://arxiv.org/abs/2305.14314). Parameters have the names that mlx-lm gives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from faststep.recipes._models import unfreeze
from faststep.recipes._patterns import check_matched, matches


class LoRALinear(nn.Module):
    """`linear(x) + scale * (dropout(x) @ lora_a) @ lora_b`.

    Args:
        linear: The layer, `nn.Linear` or `nn.QuantizedLinear`; it is frozen.
        rank: Of the adapter.
        scale: The factor of what the adapter gives.
        dropout: The share of inputs of the adapter that training leaves out.

    Attributes:
        lora_a: float32 [inputs, rank], uniform within `1 / sqrt(inputs)`.
        lora_b: float32 [rank, outputs], zero at first, so that the model is the one that it was.
    """

    def __init__(
        self, linear: nn.Linear | nn.QuantizedLinear, rank: int = 8, scale: float = 20.0, dropout: float = 0.0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        outputs, inputs = linear.weight.shape
        if isinstance(linear, nn.QuantizedLinear):
            inputs = inputs * 32 // linear.bits  # so many weights are packed in 32 bits
        bound = 1 / math.sqrt(inputs)
        self.linear = linear.freeze()
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = mx.random.uniform(-bound, bound, (inputs, rank))
        self.lora_b = mx.zeros((rank, outputs))

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [..., inputs] to [..., outputs]."""
        y: mx.array = self.linear(x)
        adapted = (self.dropout(x) @ self.lora_a) @ self.lora_b
        return y + (self.scale * adapted).astype(y.dtype)

    def fuse(self) -> nn.Linear:
        """Return a linear layer that gives what this one gives; of a layer of few bits, one in floating point."""
        weight = self.linear.weight
        if isinstance(self.linear, nn.QuantizedLinear):
            few = self.linear
            weight = mx.dequantize(weight, few.scales, few.get("biases"), few.group_size, few.bits, few.mode)
        outputs, inputs = weight.shape
        fused = nn.Linear(inputs, outputs, bias="bias" in self.linear)
        delta = self.scale * (self.lora_a @ self.lora_b).T
        fused.weight = (weight + delta).astype(weight.dtype)
        if "bias" in self.linear:
            fused.bias = self.linear.bias
        return fused


def add_lora(
    model: nn.Module,
    rank: int = 8,
    scale: float = 20.0,
    dropout: float = 0.0,
    modules: Sequence[str] = ("*",),
    trainable: Sequence[str] = (),
) -> None:
    """Freeze a model and give its linear layers adapters.

    Args:
        model: The model, which changes.
        rank: Of the adapters.
        scale: The factor of what they give.
        dropout: The share of their inputs that training leaves out.
        modules: Patterns of the layers that get one: linear ones among what they match.
        trainable: Patterns of other parameters that go on training.

    Raises:
        ValueError: A pattern matches nothing.
    """
    kinds = (nn.Linear, nn.QuantizedLinear)
    linear = {path: each for path, each in model.named_modules() if path and isinstance(each, kinds)}
    check_matched(modules, linear, "linear layer")
    model.freeze()
    unfreeze(model, trainable)
    chosen = [(path, each) for path, each in sorted(linear.items()) if matches(path, modules)]
    adapted = [(path, LoRALinear(each, rank, scale, dropout)) for path, each in chosen]
    model.update_modules(tree_unflatten(adapted))


def fuse(model: nn.Module) -> None:
    """Replace all `LoRALinear` of a model by the linear layers that give the same."""
    found = [(path, each.fuse()) for path, each in model.named_modules() if isinstance(each, LoRALinear)]
    if found:
        model.update_modules(tree_unflatten(found))
