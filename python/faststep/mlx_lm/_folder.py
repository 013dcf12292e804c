"""A model's folder in Hugging Face's layout: config.json, safetensors and tokenizer, read by mlx-lm and checked."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import mlx.nn as nn

from faststep._optional import need

EXTRA = "llm"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # of a model on the Hub
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "vocab.txt")


def find_folder(path: Path) -> Path:
    """Return the folder of a model: the one that is named, or that of an id of the Hugging Face Hub in its cache.

    Args:
        path: A folder, or a path that ends in an id, such as `mlx-community/Qwen3-0.6B-4bit`. Nothing is downloaded.

    Raises:
        ValueError: There is none.
    """
    if path.is_dir():
        return path
    missing = f"path: expected a model's folder on this machine, found none at {path}"
    name = "/".join(path.parts[-2:])
    if not _ID.fullmatch(name):
        raise ValueError(f"{missing}; nothing is downloaded")
    try:
        return Path(need("huggingface_hub", EXTRA).snapshot_download(name, local_files_only=True))
    except Exception:  # of as many kinds as there are ways to have no such snapshot
        raise ValueError(
            f"{missing}, and no {name} in the cache of the Hugging Face Hub; nothing is downloaded: "
            f"`hf download {name}` fetches it"
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder.

    Raises:
        ValueError: The file is not there, or is no JSON object with a `model_type`.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"path: expected {file}, found none: is {folder} a model's folder in Hugging Face's layout?")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"path: {file} cannot be read: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"path: {file} names no model_type")
    return config


def read_model(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model and load its weights, all of which have to be there; nothing is evaluated.

    Returns:
        The model as mlx-lm makes it, and its config as mlx-lm completes it.

    Raises:
        ImportError: mlx-lm is not installed.
        ValueError: Something in the folder is missing, cannot be read, or does not fit the rest.
    """
    kind = read_config(folder)["model_type"]
    _check_shards(folder)
    utils = need("mlx_lm.utils", EXTRA)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some models print warnings about their config
            model, config = utils.load_model(folder, lazy=True)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"path: {folder} does not load as the {kind!r} of its config.json: {_cut(what)}") from error
    return model, config


def read_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder, as mlx-lm wraps it.

    Raises:
        ImportError: mlx-lm is not installed.
        ValueError: There is none, or it cannot be read.
    """
    read_config(folder)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ValueError(f"path: expected a tokenizer in {folder} ({', '.join(_TOKENIZERS[:3])}), found none")
    utils = need("mlx_lm.utils", EXTRA)
    try:
        ends = utils.load_config(folder).get("eos_token_id")  # generation_config.json's, where it has some
        tokenizer = utils.load_tokenizer(folder, eos_token_ids=ends)
        tokenizer.model_max_length = 10**30  # no warning about long texts: datasets say what becomes of them
        return tokenizer
    except Exception as error:  # of as many kinds as there are tokenizers
        raise ValueError(
            f"path: the tokenizer in {folder} cannot be read: {_cut(' '.join(str(error).split()))}"
        ) from error


def check_vocabulary(folder: Path, tokenizer: Any, rows: int) -> None:
    """Refuse a tokenizer with tokens that the model has no row for; more rows than tokens are usual.

    Raises:
        ValueError: There are such tokens.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    beyond = {token: number for token, number in vocabulary.items() if number >= rows}
    if beyond:
        token, number = max(beyond.items(), key=lambda pair: pair[1])
        raise ValueError(
            f"path: the tokenizer in {folder} has {len(vocabulary)} tokens up to number {number} ({token!r}), the "
            f"model has rows for {rows} (vocab_size): they are of different models, or its embedding is too small"
        )


def vocabulary_of(config: dict[str, Any]) -> int | None:
    """Return the `vocab_size` of a config, which multimodal models have further in; None where there is none."""
    found = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return found if isinstance(found, int) else None


def longest(config: dict[str, Any]) -> int | None:
    """Return how many tokens a sequence may have by a config; None where it does not say."""
    inner = config.get("text_config", {})
    for name in ("max_position_embeddings", "max_sequence_length", "n_positions", "max_seq_len"):
        found = config.get(name, inner.get(name))
        if isinstance(found, int) and found > 0:
            return found
    return None


def _check_shards(folder: Path) -> None:
    """Refuse a folder that lacks files of weights.

    Raises:
        ValueError: It does; the message names them.
    """
    there = {file.name for file in folder.glob("model*.safetensors")}
    named: set[str] = set()
    if (folder / _INDEX).is_file():
        try:
            named = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"path: {folder / _INDEX} cannot be read: {error!r}") from None
    if missing := sorted(named - there):
        raise ValueError(
            f"path: {folder / _INDEX} names {', '.join(missing[:5])}, not in the folder: copy the rest of it"
        )
    if not there:
        raise ValueError(f"path: expected weights in {folder} (model*.safetensors), found none")


def _cut(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
