"""Small models of mlx-lm's kinds with random weights, a folder of one, and JSON lines of the project's own texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from faststep.mlx_lm import new_llama

from support.places import ROOT

_get_classes = pytest.importorskip("mlx_lm.utils", reason="mlx-lm needs Python 3.11")._get_classes

SIZES = {"vocabulary": 512, "layers": 2, "width": 64, "heads": 2, "context": 128}

_ATTENTION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "head_dim": 32,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": _ATTENTION | {"tie_word_embeddings": True},
    "qwen3": _ATTENTION,
    "gemma3_text": _ATTENTION | {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
    "phi3": _ATTENTION | {"head_dim": None},
    "qwen3_moe": _ATTENTION
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "mixtral": _ATTENTION | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba2": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.001, 0.1],
        "time_step_rank": "auto",
        "vocab_size": 256,
    },
}


def new_model(kind: str, **changed: Any) -> nn.Module:
    """Make a small model of a kind, in training mode; the same one every time."""
    config = {"model_type": kind, **KINDS[kind], **changed}
    classes = _get_classes(config)
    mx.random.seed(7)
    model = classes[0](classes[1].from_dict(config))
    mx.eval(model.train().parameters())
    return model


def texts() -> list[str]:
    """Return the paragraphs of the project's pages."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "training.md"]
    return [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n") if len(part) > 40]


def new_folder(folder: Path) -> Path:
    """Make the folder of a small model of Llama's shape."""
    return new_llama(folder, texts(), **SIZES)


def write_lines(file: Path, records: list[Any]) -> Path:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return file


def write_data(folder: Path) -> None:
    """Write `text.jsonl` and `chat.jsonl`."""
    write_lines(folder / "text.jsonl", [{"text": text[:120]} for text in texts()])
    pairs = [text[:120].split(" ", 3) for text in texts() if text.count(" ") > 6]
    chats = [
        [{"role": "user", "content": " ".join(words[:3])}, {"role": "assistant", "content": words[3]}]
        for words in pairs
    ]
    write_lines(folder / "chat.jsonl", [{"messages": chat} for chat in chats])
