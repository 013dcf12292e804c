"""A small model of Llama's shape in Hugging Face's layout, made of a text: config, tokenizer, random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from faststep._optional import need
from faststep.mlx_lm._folder import EXTRA

BEGIN, END = "<|begin|>", "<|end|>"
_SPECIAL = (BEGIN, END, "<|user|>", "<|assistant|>", "<|system|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def new_llama(
    folder: Path,
    texts: Iterable[str],
    *,
    vocabulary: int = 2048,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 256,
    seed: int = 0,
) -> Path:
    """Make a model of Llama's shape with random weights, and a tokenizer of its own: byte-level BPE trained on texts.

    Its chat template writes `<|user|>...<|assistant|>...<|end|>`.

    Args:
        folder: Where it goes; it must not exist.
        texts: What the tokenizer is trained on.
        vocabulary: The most tokens.
        layers: Blocks.
        width: Of the residual stream; a multiple of 64 can be brought into few bits.
        heads: Of each attention; half as many of keys and values.
        context: The longest sequence, in tokens.
        seed: Of the weights.

    Returns:
        The folder.

    Raises:
        ImportError: mlx-lm, which brings the tokenizer, is not installed.
        ValueError: A size is not positive or does not fit the others.
        FileExistsError: The folder exists.
    """
    if min(layers, width, heads, context) < 1 or width % (2 * heads) or heads % 2:
        raise ValueError(
            f"width: expected a multiple of twice the heads, an even number, got {width} and {heads} heads"
        )
    tokenizer = _tokenizer(texts, vocabulary)
    folder.mkdir(parents=True)
    count = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END, "pad_token": END}
    _write(folder / "tokenizer_config.json", kind | {"model_max_length": context, "chat_template": _TEMPLATE})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "vocab_size": count,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
    }
    _write(folder / "config.json", config)
    need("mlx_lm.utils", EXTRA).save_model(folder, _random(config, seed))
    return folder


def _random(config: dict[str, Any], seed: int) -> nn.Module:
    """Build the model, and draw its weights as Llama's were: normal, with a deviation of 0.02, less where added."""
    llama = need("mlx_lm.models.llama", EXTRA)
    model: nn.Module = llama.Model(llama.ModelArgs.from_dict(config))
    key = mx.random.key(seed)
    for name, each in sorted(dict(model.named_modules()).items()):
        if isinstance(each, nn.Linear | nn.Embedding):
            key, drawn = mx.random.split(key)
            added = name.endswith(("o_proj", "down_proj"))
            scale = 0.02 / (2 * config["num_hidden_layers"]) ** 0.5 if added else 0.02
            each.weight = mx.random.normal(each.weight.shape, scale=scale, key=drawn)
    return model


def _tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a byte-level BPE."""
    library = need("tokenizers", EXTRA)
    if vocabulary < 256 + len(_SPECIAL):
        raise ValueError(f"vocabulary: expected {256 + len(_SPECIAL)} or more, all bytes among them, got {vocabulary}")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
