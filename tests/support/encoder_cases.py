"""Encoders with the same weights and texts on both sides: `transformers` in PyTorch, and the recipes. NumPy alone."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

IGNORED = -100
LENGTHS = (23, 14, 9)
MODERNBERT = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
BERT = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
BIASES = {name: True for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")}


@dataclass(frozen=True)
class Case:
    """A model with a head; the architecture is the class's name in `transformers`."""

    recipe: str
    architecture: str
    config: dict[str, Any]
    classes: int | None = None
    own: dict[str, Any] = field(default_factory=dict)  # keys that only the recipe has


CASES = {
    "modernbert": Case("modernbert", "ModernBertForMaskedLM", MODERNBERT),
    "modernbert, classes": Case("modernbert", "ModernBertForSequenceClassification", MODERNBERT, 3),
    "modernbert, mean and biases": Case(
        "modernbert",
        "ModernBertForSequenceClassification",
        MODERNBERT | BIASES | {"classifier_pooling": "mean", "hidden_activation": "gelu_pytorch_tanh"},
        3,
    ),
    "bert": Case("bert", "BertForMaskedLM", BERT),
    "bert, classes": Case("bert", "BertForSequenceClassification", BERT, 3),
}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Draw a weight from its name: those of norms around 1."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
    return 1 + 0.2 * drawn if "norm" in name.lower() and name.endswith("weight") else 0.2 * drawn


def texts(case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """Draw padded texts: tokens, a mask of them, and targets or labels."""
    rng = np.random.default_rng(7)
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    tokens = np.where(mask, rng.integers(3, case.config["vocab_size"], mask.shape), 0)
    if case.classes is not None:
        return {"tokens": tokens, "mask": mask, "labels": rng.integers(0, case.classes, len(tokens))}
    hidden = mask & (rng.random(mask.shape) < 0.3)
    return {"tokens": np.where(hidden, 3, tokens), "mask": mask, "targets": np.where(hidden, tokens, IGNORED)}
