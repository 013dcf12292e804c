"""BERT: learned positions, biases, and norms behind attention and network.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018, https://arxiv.org/abs/1810.04805).
Parameters have the names that Hugging Face's `transformers` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from faststep.recipes._embedding import rows
from faststep.recipes._hugging_face import account, number_of_classes, read_config, read_weights
from faststep.recipes.encoders._parts import activation, attend, mean_of_tokens, truncated, who_sees_whom

_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True)
class Sizes:
    """The keys of `config.json` that say what is computed, with the values of BERT-base; and `classifier_pooling`."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    classifier_dropout: float | None = None
    tie_word_embeddings: bool = True
    classifier_pooling: str = "pooler"

    def __post_init__(self) -> None:
        """Check what shapes do not show."""
        if self.hidden_size % self.num_attention_heads:
            expected = f"a multiple of num_attention_heads ({self.num_attention_heads})"
            raise ValueError(f"config: expected hidden_size to be {expected}, got {self.hidden_size}")
        if self.classifier_pooling not in ("pooler", "mean"):
            raise ValueError(f"config: expected classifier_pooling pooler or mean, got {self.classifier_pooling!r}")
        if not self.tie_word_embeddings:
            raise ValueError("config: expected tie_word_embeddings true, as in every published BERT, got false")

    @staticmethod
    def clean(keys: dict[str, Any]) -> dict[str, Any]:
        """Return keys without those that say what is always so.

        Raises:
            ValueError: Positions are relative, which is not known here.
        """
        keys = dict(keys)
        if keys.pop("position_embedding_type", "absolute") != "absolute":
            raise ValueError("config: expected position_embedding_type absolute")
        return keys


class SelfAttention(nn.Module):
    """Attention of several heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, self.heads = sizes.hidden_size, sizes.num_attention_heads
        self.dropout = sizes.attention_probs_dropout_prob
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Map floating point [batch, seq, width] to the same shape."""
        q, k, v = (
            layer(x).reshape(*x.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)
            for layer in (self.query, self.key, self.value)
        )
        return attend(q, k, v, mask, self.dropout if self.training else 0.0)


class Output(nn.Module):
    """A dense layer that is added to the residual stream, and a norm behind."""

    def __init__(self, inputs: int, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dense = nn.Linear(inputs, sizes.hidden_size)
        self.LayerNorm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.dropout = nn.Dropout(sizes.hidden_dropout_prob)

    def __call__(self, x: mx.array, stream: mx.array) -> mx.array:
        """Map floating point [batch, seq, inputs] to [batch, seq, width]."""
        out: mx.array = self.LayerNorm(self.dropout(self.dense(x)) + stream)
        return out


class Dense(nn.Module):
    """A dense layer under the name that files have for it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dense = nn.Linear(inputs, outputs)


class Attention(nn.Module):
    """Attention and its output."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.self = SelfAttention(sizes)
        self.output = Output(sizes.hidden_size, sizes)


class Layer(nn.Module):
    """Attention and a network of two layers, each with a norm behind it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = Attention(sizes)
        self.intermediate = Dense(sizes.hidden_size, sizes.intermediate_size)
        self.output = Output(sizes.intermediate_size, sizes)
        self.activation = activation(sizes.hidden_act)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Map floating point [batch, seq, width] to the same shape."""
        x = self.attention.output(self.attention.self(x, mask), x)
        out: mx.array = self.output(self.activation(self.intermediate.dense(x)), x)
        return out


class Embeddings(nn.Module):
    """Tokens, positions and the kind of text, added up and normalised."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.word_embeddings = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.position_embeddings = nn.Embedding(sizes.max_position_embeddings, sizes.hidden_size)
        self.token_type_embeddings = nn.Embedding(sizes.type_vocab_size, sizes.hidden_size)
        self.LayerNorm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.dropout = nn.Dropout(sizes.hidden_dropout_prob)

    def __call__(self, tokens: mx.array, positions: mx.array | None) -> mx.array:
        """Map integers [batch, seq] to floating point [batch, seq, width]."""
        places = mx.arange(tokens.shape[1]) if positions is None else positions
        x = rows(self.word_embeddings, tokens) + rows(self.position_embeddings, places)
        embedded: mx.array = self.dropout(self.LayerNorm(x + self.token_type_embeddings.weight[0]))
        return embedded


class Layers(nn.Module):
    """The layers under the name that files have for them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = [Layer(sizes) for _ in range(sizes.num_hidden_layers)]


class Encoder(nn.Module):
    """Embeddings and layers; and, where it is used, the layer over the first token that a classifier gets."""

    def __init__(self, sizes: Sizes, pooler: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embeddings = Embeddings(sizes)
        self.encoder = Layers(sizes)
        if pooler:
            self.pooler = Dense(sizes.hidden_size, sizes.hidden_size)

    def __call__(
        self, tokens: mx.array, mask: mx.array | None, segments: mx.array | None, positions: mx.array | None
    ) -> mx.array:
        """Map integers [batch, seq] to floating point [batch, seq, width]."""
        seen = who_sees_whom(tokens.shape[1], mask, segments)
        x = self.embeddings(tokens, positions)
        for layer in self.encoder.layer:
            x = layer(x, seen)
        return x


class Predictions(nn.Module):
    """The head of a masked language model, but for its last weight, which is the embedding's."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.transform = Dense(sizes.hidden_size, sizes.hidden_size)
        self.transform.LayerNorm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.bias = mx.zeros(sizes.vocab_size)
        self.activation = activation(sizes.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [..., width] to the same shape."""
        out: mx.array = self.transform.LayerNorm(self.activation(self.transform.dense(x)))
        return out


class Heads(nn.Module):
    """The head under the name that files have for it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.predictions = Predictions(sizes)


class Bert(nn.Module):
    """BERT with a head: `bert` makes it.

    Attributes:
        vocabulary: How many tokens it knows.
        context: The longest sequence.
        classes: How many classes it tells apart, None with the head of a masked language model.
    """

    def __init__(self, sizes: Sizes, classes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary, self.context, self.classes = sizes.vocab_size, sizes.max_position_embeddings, classes
        pools = classes is not None and sizes.classifier_pooling == "pooler"
        self.bert = Encoder(sizes, pools)
        if classes is None:
            self.cls = Heads(sizes)
        else:
            share = sizes.classifier_dropout
            self.dropout = nn.Dropout(sizes.hidden_dropout_prob if share is None else share)
            self.classifier = nn.Linear(sizes.hidden_size, classes)
        for module in self.modules():  # type: ignore[no-untyped-call]
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight = truncated(module.weight.shape, sizes.initializer_range, 3.0)
            if isinstance(module, nn.Linear):
                module.bias = mx.zeros_like(module.bias)

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
            positions: Integers [batch, seq], of `Pack` too. Default: from 0 on.

        Returns:
            Floating point [batch, seq, vocabulary] or [batch, classes].

        Raises:
            ValueError: The sequences are longer than `context`; several texts in a row are to be classified.
        """
        hidden = self.hidden(tokens, mask, segments, positions)
        if self.classes is None:
            weight, bias = self.output
            logits: mx.array = hidden @ weight.T + bias
            return logits
        if segments is not None:
            raise ValueError("segments: expected one text in a row to classify, got packed ones; use the collate pad")
        if "pooler" in self.bert:
            pooled = mx.tanh(self.bert.pooler.dense(hidden[:, 0]))
        else:
            pooled = mean_of_tokens(hidden, mask)
        classes: mx.array = self.classifier(self.dropout(pooled))
        return classes

    def hidden(
        self,
        tokens: mx.array,
        mask: mx.array | None = None,
        segments: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Map tokens to what the last layer gets (masked language model) or what is pooled, [batch, seq, width]."""
        if positions is None and tokens.shape[1] > self.context:
            raise ValueError(f"tokens: expected sequences of at most {self.context}, got {tokens.shape[1]}")
        x: mx.array = self.bert(tokens, mask, segments, positions)
        return self.cls.predictions(x) if self.classes is None else x

    @property
    def output(self) -> tuple[mx.array, mx.array]:
        """Weight [vocabulary, width] and bias [vocabulary] of the last layer of a masked language model."""
        return self.bert.embeddings.word_embeddings.weight, self.cls.predictions.bias


def bert(
    path: Path | None = None,
    config: dict[str, Any] | Path | None = None,
    head: Literal["masked_lm", "classification"] = "masked_lm",
    classes: int | None = None,
) -> Bert:
    """BERT, an encoder of text, with the head of a masked language model or of a classifier.

    Args:
        path: A folder with `config.json` and `model.safetensors` as Hugging Face writes them. Default: new weights.
        config: Keys of `config.json` (`hidden_size`, `hidden_dropout_prob`, ...), which count before the file's, or
            such a file; and `classifier_pooling`: `pooler` (BERT's own layer over the first token) or `mean` (of all
            tokens, as sentence encoders do). Default: the folder's, or those of BERT-base.
        head: What it gives: the logits of all tokens at all places, or of the classes of a text.
        classes: How many classes. Default: as many as the folder's `config.json` says.

    Raises:
        ValueError: A key or a weight is unknown, missing or of another shape; the message names it.
    """
    sizes = read_config(path, config or {}, Sizes, "bert")
    model = Bert(sizes, number_of_classes(head, classes, path))
    if path is not None:
        _load(model, path, read_weights(path))
    return model


def _load(model: Bert, path: Path, weights: Mapping[str, mx.array]) -> None:
    named = {_name(name): each for name, each in weights.items()}
    if not any(name.startswith("bert.") for name in named):
        named = {name if name.startswith(("cls.", "classifier.")) else f"bert.{name}": a for name, a in named.items()}
    aside = ["bert.embeddings.position_ids", "bert.pooler", "cls.seq_relationship", "cls.predictions.decoder"]
    if model.classes is None:
        account(model, path, named, aside=[*aside, "classifier"], new=[])
    else:
        account(model, path, named, aside=[*aside, "cls"], new=["classifier", "bert.pooler"])


def _name(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        name = name.replace(old, new)
    return name
