"""ModernBERT: rotary positions, GeGLU, norms before and no biases, global and local attention by turns.

Warner et al., "Smarter, Better, Faster, Longer" (2024, https://arxiv.org/abs/2412.13663). Parameters have the names
that Hugging Face's `transformers` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from faststep.recipes._embedding import rows
from faststep.recipes._hugging_face import account, number_of_classes, read_config, read_weights
from faststep.recipes.encoders._parts import (
    activation,
    attend,
    attend_near,
    in_blocks,
    mean_of_tokens,
    near,
    truncated,
    who_sees_whom,
)

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Sizes:
    """The keys of `config.json` that say what is computed, with the values of ModernBERT-base."""

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    initializer_cutoff_factor: float = 2.0
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    global_attn_every_n_layers: int = 3
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float | None = 10_000.0
    embedding_dropout: float = 0.0
    mlp_bias: bool = False
    mlp_dropout: float = 0.0
    decoder_bias: bool = True
    classifier_pooling: str = "cls"
    classifier_dropout: float = 0.0
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    tie_word_embeddings: bool = True
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        """Check what shapes do not show."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"config: expected {name} from 1 on, got {getattr(self, name)}")
        if self.hidden_size % (2 * self.num_attention_heads):
            expected = f"a multiple of twice num_attention_heads ({self.num_attention_heads})"
            raise ValueError(f"config: expected hidden_size to be {expected}, got {self.hidden_size}")
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"config: expected classifier_pooling cls or mean, got {self.classifier_pooling!r}")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"config: expected {self.num_hidden_layers} layer_types, got {len(self.layer_types)}")

    @staticmethod
    def clean(keys: dict[str, Any]) -> dict[str, Any]:
        """Return keys with those of `rope_parameters`, as newer files have them, under their older names.

        Raises:
            ValueError: The rotary positions are scaled, which is not known here.
        """
        keys = dict(keys)
        if keys.pop("position_embedding_type", "absolute") not in ("absolute", "rope", "sans_pos"):
            raise ValueError("config: expected rotary positions (position_embedding_type)")
        keys.pop("layer_norm_eps", None)  # files have it beside norm_eps, which is the one that is read
        ropes = keys.pop("rope_parameters", None) or {}
        for kind, name in ((FULL, "global_rope_theta"), (SLIDING, "local_rope_theta")):
            rope = dict(ropes.get(kind) or {})
            if rope.pop("rope_type", "default") != "default":
                raise ValueError(f"config: expected rope_type default for {kind}, got {ropes[kind]['rope_type']!r}")
            if "rope_theta" in rope:
                keys[name] = rope["rope_theta"]
        return keys

    def reach(self, layer: int) -> int | None:
        """Return how far a layer's attention sees to each side, in tokens; None: everywhere."""
        kinds = self.layer_types
        is_global = layer % self.global_attn_every_n_layers == 0 if kinds is None else kinds[layer] == FULL
        return None if is_global else self.local_attention // 2


class Attention(nn.Module):
    """Attention of several heads with rotary positions."""

    def __init__(self, sizes: Sizes, reach: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, self.heads, self.dropout = sizes.hidden_size, sizes.num_attention_heads, sizes.attention_dropout
        self.reach = reach
        local = sizes.global_rope_theta if sizes.local_rope_theta is None else sizes.local_rope_theta
        self.Wqkv = nn.Linear(width, 3 * width, bias=sizes.attention_bias)
        self.rope = nn.RoPE(width // self.heads, base=sizes.global_rope_theta if reach is None else local)
        self.Wo = nn.Linear(width, width, bias=sizes.attention_bias)
        self.out_drop = nn.Dropout(sizes.attention_dropout)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Map floating point [batch, seq, width] to the same shape."""
        batch, seq, _ = x.shape
        q, k, v = self.Wqkv(x).reshape(batch, seq, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        q, k, dropout = self.rope(q), self.rope(k), self.dropout if self.training else 0.0
        if mask is not None and self.reach is not None and in_blocks(seq, self.reach):
            mixed = attend_near(q, k, v, mask, self.reach, dropout)
        else:
            mixed = attend(q, k, v, mask, dropout)
        out: mx.array = self.out_drop(self.Wo(mixed))
        return out


class GeGLU(nn.Module):
    """Two layers, of whose hidden values one half is the gate of the other."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.Wi = nn.Linear(sizes.hidden_size, 2 * sizes.intermediate_size, bias=sizes.mlp_bias)
        self.Wo = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=sizes.mlp_bias)
        self.drop = nn.Dropout(sizes.mlp_dropout)
        self.activation = activation(sizes.hidden_activation)

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [batch, seq, width] to the same shape."""
        hidden, gate = mx.split(self.Wi(x), 2, axis=-1)
        out: mx.array = self.Wo(self.drop(self.activation(hidden) * gate))
        return out


class Layer(nn.Module):
    """Attention and GeGLU, each behind a norm and added to the residual stream."""

    def __init__(self, sizes: Sizes, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reach = sizes.reach(number)
        self.attn_norm = _norm(sizes) if number else nn.Identity()
        self.attn = Attention(sizes, self.reach)
        self.mlp_norm = _norm(sizes)
        self.mlp = GeGLU(sizes)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Map floating point [batch, seq, width] to the same shape."""
        x = x + self.attn(self.attn_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class Embeddings(nn.Module):
    """Tokens as vectors, normalised."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tok_embeddings = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.norm = _norm(sizes)
        self.drop = nn.Dropout(sizes.embedding_dropout)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map integers [batch, seq] to floating point [batch, seq, width]."""
        embedded: mx.array = self.drop(self.norm(rows(self.tok_embeddings, tokens)))
        return embedded


class Encoder(nn.Module):
    """Embeddings, layers, and a norm behind them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embeddings = Embeddings(sizes)
        self.layers = [Layer(sizes, number) for number in range(sizes.num_hidden_layers)]
        self.final_norm = _norm(sizes)

    def __call__(self, tokens: mx.array, mask: mx.array | None, segments: mx.array | None) -> mx.array:
        """Map integers [batch, seq] to floating point [batch, seq, width]."""
        seq = tokens.shape[1]
        masks: dict[int | None, mx.array | None] = {None: who_sees_whom(seq, mask, segments)}
        for reach in {each.reach for each in self.layers if each.reach is not None}:
            masks[reach] = near(seq, reach, mask, segments)
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, masks[layer.reach])
        hidden: mx.array = self.final_norm(x)
        return hidden


class Head(nn.Module):
    """A dense layer and a norm in front of the outputs."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dense = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=sizes.classifier_bias)
        self.norm = _norm(sizes)
        self.activation = activation(sizes.classifier_activation)

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [..., width] to the same shape."""
        out: mx.array = self.norm(self.activation(self.dense(x)))
        return out


class TiedDecoder(nn.Module):
    """The bias of a layer whose weight is the embedding's."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bias = mx.zeros(vocabulary)


class ModernBert(nn.Module):
    """ModernBERT with a head: `modernbert` makes it.

    Attributes:
        vocabulary: How many tokens it knows.
        context: The longest sequence.
        classes: How many classes it tells apart, None with the head of a masked language model.
    """

    def __init__(self, sizes: Sizes, classes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary, self.context, self.classes = sizes.vocab_size, sizes.max_position_embeddings, classes
        self.pooling = sizes.classifier_pooling
        self.model = Encoder(sizes)
        self.head = Head(sizes)
        if classes is not None:
            self.drop = nn.Dropout(sizes.classifier_dropout)
            self.classifier = nn.Linear(sizes.hidden_size, classes)
        elif not sizes.tie_word_embeddings:
            self.decoder: nn.Module = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=sizes.decoder_bias)
        elif sizes.decoder_bias:
            self.decoder = TiedDecoder(sizes.vocab_size)
        _draw(self, sizes)

    def __call__(
        self,
        tokens: mx.array,
        mask: mx.array | None = None,
        segments: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Map tokens to the logits of all tokens, or of the classes.

        Args:
            tokens: Integers [batch, seq].
            mask: bool [batch, seq], True where there is a token. Default: everywhere.
            segments: Integers [batch, seq] of packed texts, as `faststep.data.Pack` gives them.
            positions: Integers [batch, seq], of `Pack` too; rotary positions are relative and need none.

        Returns:
            Floating point [batch, seq, vocabulary] or [batch, classes].

        Raises:
            ValueError: The sequences are longer than `context`; several texts in a row are to be classified.
        """
        hidden = self.hidden(tokens, mask, segments)
        if self.classes is None:
            weight, bias = self.output
            logits = hidden @ weight.T
            return logits if bias is None else logits + bias
        if segments is not None:
            raise ValueError("segments: expected one text in a row to classify, got packed ones; use the collate pad")
        pooled = hidden[:, 0] if self.pooling == "cls" else mean_of_tokens(hidden, mask)
        classes: mx.array = self.classifier(self.drop(self.head(pooled)))
        return classes

    def hidden(
        self,
        tokens: mx.array,
        mask: mx.array | None = None,
        segments: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Map tokens to what the last layer gets (masked language model) or what is pooled, [batch, seq, width]."""
        if tokens.shape[1] > self.context:
            raise ValueError(f"tokens: expected sequences of at most {self.context}, got {tokens.shape[1]}")
        x = self.model(tokens, mask, segments)
        return self.head(x) if self.classes is None else x

    @property
    def output(self) -> tuple[mx.array, mx.array | None]:
        """Weight [vocabulary, width] and bias [vocabulary] of the last layer of a masked language model."""
        decoder = self.get("decoder", {})
        return decoder.get("weight", self.model.embeddings.tok_embeddings.weight), decoder.get("bias")


def modernbert(
    path: Path | None = None,
    config: dict[str, Any] | Path | None = None,
    head: Literal["masked_lm", "classification"] = "masked_lm",
    classes: int | None = None,
) -> ModernBert:
    """ModernBERT, an encoder of text, with the head of a masked language model or of a classifier.

    Args:
        path: A folder with `config.json` and `model.safetensors` as Hugging Face writes them. Default: new weights, as
            published: a normal distribution that is cut off.
        config: Keys of `config.json` (`hidden_size`, `local_attention`, ...), which count before the file's; or
            such a file. Default: the folder's, or those of ModernBERT-base.
        head: What it gives: the logits of all tokens at all places, or of the classes of a text.
        classes: How many classes. Default: as many as the folder's `config.json` says.

    Raises:
        ValueError: A key or a weight is unknown, missing or of another shape; the message names it.
    """
    sizes = read_config(path, config or {}, Sizes, "modernbert")
    model = ModernBert(sizes, number_of_classes(head, classes, path))
    if path is not None:
        weights = read_weights(path)
        if not any(name.startswith("model.") for name in weights):
            weights = {f"model.{name}": each for name, each in weights.items()}  # of the encoder alone
        _load(model, path, weights)
    return model


def _load(model: ModernBert, path: Path, weights: Mapping[str, mx.array]) -> None:
    if model.classes is not None:
        account(model, path, weights, aside=["decoder"], new=["classifier", "head"])
        return
    tied = "decoder" not in model or isinstance(model.decoder, TiedDecoder)
    account(model, path, weights, aside=["classifier", *(["decoder.weight"] if tied else [])], new=[])


def _norm(sizes: Sizes) -> nn.LayerNorm:
    return nn.LayerNorm(sizes.hidden_size, eps=sizes.norm_eps, bias=sizes.norm_bias)


def _draw(model: ModernBert, sizes: Sizes) -> None:
    """Draw the first weights as published: those in front of the residual stream smaller by its depth."""
    into, cutoff = sizes.initializer_range, sizes.initializer_cutoff_factor
    out = into / math.sqrt(2 * sizes.num_hidden_layers)
    deviations = {"Wqkv": into, "Wi": into, "tok_embeddings": into, "Wo": out, "dense": out, "decoder": out}
    deviations["classifier"] = sizes.hidden_size**-0.5
    for path, module in model.named_modules():  # type: ignore[no-untyped-call]
        name = path.rpartition(".")[2]
        if name in deviations and "weight" in module:
            module.weight = truncated(module.weight.shape, deviations[name], cutoff)
            if "bias" in module:
                module.bias = mx.zeros_like(module.bias)
