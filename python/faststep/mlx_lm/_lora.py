"""Adapters of mlx-lm, LoRA and DoRA, on named layers of one of its models.

Hu et al., "LoRA" (2021, https://arxiv.org/abs/2106.09685); Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation"
(2024, https://arxiv.org/abs/2402.09353). The modules are mlx-lm's own, so that what is trained is what it loads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.nn as nn

from faststep._optional import need
from faststep.mlx_lm._folder import EXTRA
from faststep.recipes import listed

LEAVES = ("lora_a", "lora_b", "m")  # names of the parameters that adapters have and layers have not


@dataclass(frozen=True)
class Lora:
    """Adapters of low rank, with mlx-lm's words and defaults.

    Attributes:
        rank: Of the adapters.
        scale: The factor of what they give.
        dropout: The share of their inputs that training leaves out.
        layers: How many blocks get them, counted from the last one; -1 or None: all.
        keys: The layers that get them by their names in a block, such as `self_attn.q_proj`, or in the model, such as
            `lm_head`; None: all linear ones of the blocks.
    """

    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    layers: int | None = None
    keys: list[str] | None = None
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def parameters(self) -> dict[str, Any]:
        """Return what mlx-lm calls `lora_parameters`."""
        named = {} if self.keys is None else {"keys": list(self.keys)}
        return {"rank": self.rank, "scale": self.scale, "dropout": self.dropout, **named}


def adapt(model: nn.Module, lora: Lora, *, dora: bool = False) -> dict[str, Any]:
    """Freeze a model and give layers of it adapters that train.

    Args:
        model: The model, which changes: a causal language model of mlx-lm.
        lora: Which adapters.
        dora: With a magnitude of each output that trains too.

    Returns:
        What mlx-lm's `adapter_config.json` says of it: `fine_tune_type`, `num_layers` (-1: all), `lora_parameters`.

    Raises:
        ImportError: mlx-lm is not installed.
        ValueError: A number is out of its range, a key names no layer, or a layer takes no such adapter.
    """
    lora = dataclasses.replace(lora, layers=None) if lora.layers == -1 else lora
    _check(model, lora)
    model.freeze()
    count = len(model.layers) if lora.layers is None else lora.layers
    try:
        need("mlx_lm.tuner.utils", EXTRA).linear_to_lora_layers(model, count, lora.parameters(), use_dora=dora)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{'dora' if dora else 'lora'}: {error}; lora.keys chooses other layers") from error
    if dora:
        _check_dora(model)
    return {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": -1 if lora.layers is None else lora.layers,
        "lora_parameters": lora.parameters(),
    }


def _check(model: nn.Module, lora: Lora) -> None:
    """Refuse what mlx-lm would pass over or fail on later.

    Raises:
        ValueError: A number is out of its range, or a key names no layer.
    """
    if lora.rank < 1:
        raise ValueError(f"lora: rank: expected a number from 1 on, got {lora.rank}")
    if not 0 <= lora.dropout < 1:
        raise ValueError(f"lora: dropout: expected a number from 0 below 1, got {lora.dropout}")
    blocks = list(model.layers)
    if lora.layers is not None and not 1 <= lora.layers <= len(blocks):
        raise ValueError(f"lora: layers: expected 1 to {len(blocks)}, as many as the model has, got {lora.layers}")
    chosen = blocks[-(lora.layers or len(blocks)) :]
    names = {name for block in chosen for name, each in block.named_modules() if name and _takes(each)}
    outside = {name for name, each in model.named_modules() if name and _takes(each)}
    for key in lora.keys or ():
        if key not in names | outside:
            raise ValueError(
                f"lora: keys: {key!r} is no layer that takes an adapter; there are {listed(sorted(names))}"
            )
    if lora.keys == [] or not names | outside:
        raise ValueError("lora: keys: expected the name of a layer at least, got none")


def _takes(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") or hasattr(module, "to_lora") or "scales" in module


def _check_dora(model: nn.Module) -> None:
    """Refuse weights whose bits mlx-lm's DoRA counts wrong.

    Raises:
        ValueError: There are some.
    """
    for name, each in model.named_modules():
        inner = each.get("linear")
        if "m" in each and isinstance(inner, nn.QuantizedLinear) and 32 % inner.bits:
            raise ValueError(f"dora: expected weights of 2, 4 or 8 bits under an adapter, {name} has {inner.bits}")
