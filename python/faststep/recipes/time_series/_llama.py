"""A decoder of Llama's shape without its head: it maps vectors to vectors.

Touvron et al., "LLaMA" (2023, https://arxiv.org/abs/2302.13971); grouped queries as in Llama 3 (2024,
https://arxiv.org/abs/2407.21783). Parameters have the names that Hugging Face and mlx-lm give them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class LlamaSizes:
    """Keys of `config.json`, with the values of Llama-3.2-1B."""

    vocab_size: int = 128_256
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 16
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 131_072

    def __post_init__(self) -> None:
        """Check what shapes do not show."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int" and value < 1:
                raise ValueError(f"decoder: expected {each.name} from 1 on, got {value}")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"decoder: expected hidden_size to be a multiple of twice num_attention_heads "
                f"({self.num_attention_heads}), got {self.hidden_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"decoder: expected num_attention_heads to be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}), got {self.num_attention_heads}"
            )
        kind = (self.rope_scaling or {}).get("rope_type", "llama3")
        if kind != "llama3":
            raise ValueError(f"decoder: expected rope_scaling of rope_type llama3, got {kind!r}")

    @staticmethod
    def clean(keys: dict[str, Any]) -> dict[str, Any]:
        """Return keys without those that say what is always so here.

        Raises:
            ValueError: One says otherwise.
        """
        keys = dict(keys)
        ropes = keys.pop("rope_parameters", None) or {}
        if ropes:
            keys["rope_theta"] = ropes.get("rope_theta", keys.get("rope_theta", LlamaSizes.rope_theta))
            keys["rope_scaling"] = ropes if ropes.get("rope_type", "default") != "default" else None
        always = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
        for name, value in always.items():
            if keys.pop(name, value) != value:
                raise ValueError(f"decoder: expected {name} {value!r}")
        size = keys.pop("head_dim", None)
        if size is not None and size * keys.get("num_attention_heads", 0) != keys.get("hidden_size"):
            raise ValueError(f"decoder: expected head_dim to be hidden_size / num_attention_heads, got {size}")
        for name in ("initializer_range", "pretraining_tp", "tie_word_embeddings"):
            keys.pop(name, None)
        return keys

    def frequencies(self) -> mx.array | None:
        """Return the wavelengths by which positions are turned, float32 [head size / 2]; None: as `rope_theta` says.

        Long ones are stretched, as Llama 3.1 has them.
        """
        scaling = self.rope_scaling
        if scaling is None:
            return None
        size = self.hidden_size // self.num_attention_heads
        lengths = self.rope_theta ** (mx.arange(0, size, 2) / size)
        factor, before = scaling["factor"], scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = before / (2 * math.pi * lengths)  # within the context that it was trained on first
        share = mx.clip((turns - low) / (high - low), 0, 1)
        stretched: mx.array = 1 / ((1 - share) / (lengths * factor) + share / lengths)
        return stretched


class Attention(nn.Module):
    """Causal attention with rotary positions, several query heads to a head of keys and values."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, self.heads, self.groups = sizes.hidden_size, sizes.num_attention_heads, sizes.num_key_value_heads
        self.size, self.base = width // self.heads, sizes.rope_theta
        self._frequencies = sizes.frequencies()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [batch, seq, width] to the same shape."""
        q, k = self._turned(self._heads(self.q_proj(x))), self._turned(self._heads(self.k_proj(x)))
        v = self._heads(self.v_proj(x))
        mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.size**-0.5, mask="causal")
        out: mx.array = self.o_proj(mixed.transpose(0, 2, 1, 3).reshape(x.shape))
        return out

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self.size).transpose(0, 2, 1, 3)

    def _turned(self, x: mx.array) -> mx.array:
        base = self.base if self._frequencies is None else None
        return mx.fast.rope(x, self.size, traditional=False, base=base, scale=1.0, offset=0, freqs=self._frequencies)


class SwiGLU(nn.Module):
    """A network whose hidden values have a gate."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [..., width] to the same shape."""
        out: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and network, each behind a norm and added to the residual stream."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.self_attn, self.mlp = Attention(sizes), SwiGLU(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [batch, seq, width] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The decoder, from embedded tokens and whatever stands in front of them.

    Args:
        sizes: Its sizes.
    """

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = [Layer(sizes) for _ in range(sizes.num_hidden_layers)]
        self.norm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [batch, seq, width] to the same shape."""
        for layer in self.layers:
            x = layer(x)
        out: mx.array = self.norm(x)
        return out
