"""The folder of a model in Hugging Face's layout: `config.json`, and weights as safetensors, in one file or several."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from faststep.recipes._models import load_weights
from faststep.recipes._patterns import matches

Sizes = TypeVar("Sizes")
Weights = dict[str, mx.array]

# Keys of a config.json that say nothing about what a model computes.
_ASIDE = frozenset(
    "_attn_implementation _name_or_path add_cross_attention architectures attn_implementation auto_map bad_words_ids "
    "begin_suppress_tokens bos_token_id chunk_size_feed_forward cls_token_id cross_attention_hidden_size "
    "decoder_start_token_id deterministic_flash_attn diversity_penalty do_sample dtype early_stopping "
    "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id "
    "forced_eos_token_id gradient_checkpointing id2label is_decoder is_encoder_decoder label2id length_penalty "
    "max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences "
    "output_attentions output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads "
    "reference_compile remove_invalid_values repad_logits_with_grad repetition_penalty return_dict "
    "return_dict_in_generate sep_token_id sparse_pred_ignore_index sparse_prediction suppress_tokens "
    "task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers_version typical_p use_bfloat16 use_cache".split()
)


def read_config(folder: Path | None, given: Mapping[str, Any] | Path, kind: type[Sizes], model_type: str) -> Sizes:
    """Read the sizes of a model.

    Args:
        folder: Where its `config.json` is; None: there is none.
        given: Keys that count before those of the file, or a file of them.
        kind: A dataclass whose fields are the keys that matter; its `clean(keys)` resolves older names of them.
        model_type: What the file has to say that it is.

    Raises:
        ValueError: The file is not there, is of another model, or has a key that is not known here; the message
            names all of them.
    """
    own = {} if folder is None else _read_json(folder / "config.json")
    found = own.get("model_type", model_type)
    if found != model_type:
        raise ValueError(f"path: expected a model of type {model_type}, {folder}/config.json is of {found!r}")
    keys = {key: value for key, value in kind.clean(own).items() if key not in _ASIDE}  # type: ignore[attr-defined]
    _refuse_unknown(keys, kind, f"path: {folder}/config.json has")
    given = _read_json(given, "config") if isinstance(given, Path) else given
    mine = {key: value for key, value in kind.clean(dict(given)).items() if key not in _ASIDE}  # type: ignore[attr-defined]
    _refuse_unknown(mine, kind, "config: expected keys of config.json, got")
    return kind(**keys | mine)


def number_of_classes(head: str, classes: int | None, path: Path | None) -> int | None:
    """Return the number of classes of a head, None for that of a masked language model.

    Raises:
        ValueError: It is not known, or given for the other head.
    """
    if head == "masked_lm":
        if classes is not None:
            raise ValueError("classes: expected none for the head masked_lm; head: classification has classes")
        return None
    found = _labels_of(path) if classes is None else classes
    if found is None or found < 2:
        raise ValueError(f"classes: expected a number from 2 on for head: classification, got {found}")
    return found


def read_weights(folder: Path) -> Weights:
    """Read all weights of a model, floating point as float32.

    Raises:
        ValueError: There are none as safetensors, or a file cannot be read.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = [whole.name] if whole.is_file() else []
    if index.is_file():
        places = _read_json(index).get("weight_map")
        names = sorted(set(places.values())) if isinstance(places, dict) else []
    if not names:
        raise ValueError(f"path: expected model.safetensors in {folder}, found none; other formats are not read")
    weights: Weights = {}
    for name in names:
        try:
            found = mx.load(str(folder / name), format="safetensors")
        except (RuntimeError, ValueError, OSError) as error:
            raise ValueError(f"path: {folder / name} cannot be read: {error}") from None
        assert isinstance(found, dict)
        weights |= found
    halves = (mx.float16, mx.bfloat16)
    return {name: each.astype(mx.float32) if each.dtype in halves else each for name, each in weights.items()}


def account(
    model: nn.Module, folder: Path, weights: Mapping[str, mx.array], *, aside: Iterable[str], new: Iterable[str]
) -> None:
    """Load the weights of a folder by name, and account for each of them and for each of the model's.

    Args:
        model: The model, which has Hugging Face's names.
        folder: Where they are from.
        weights: By the model's names.
        aside: Patterns of those that the model has no use for: other heads, buffers.
        new: Patterns of parts that keep their first weights where the folder has nothing of them: new heads.

    Raises:
        ValueError: One is left over or missing, or has another shape; the message names them.
    """
    own = dict(tree_flatten(model.parameters()))
    used = {name: each for name, each in weights.items() if name in own or not matches(name, aside)}
    for pattern in new:
        if not any(matches(name, [pattern]) for name in weights):
            used |= {name: each for name, each in own.items() if matches(name, [pattern])}
    try:
        load_weights(model, folder, used)
    except ValueError as error:
        raise ValueError(f"path: {error}") from None


def _read_json(file: Path, argument: str = "path") -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}: {file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{argument}: expected a JSON object in {file}, got {type(values).__name__}")
    return values


def _refuse_unknown(keys: Mapping[str, Any], kind: type[Any], what: str) -> None:
    names = [each.name for each in fields(kind)]
    unknown = [key for key in keys if key not in names]
    if unknown:
        close = difflib.get_close_matches(unknown[0], names, 1)
        hint = f": did you mean {close[0]!r}?" if close else f"; known are {', '.join(names)}"
        raise ValueError(f"{what} {', '.join(map(repr, unknown))}, which is unknown here{hint}")


def _labels_of(folder: Path | None) -> int | None:
    """Return how many classes the model of a folder has, None where its `config.json` does not say."""
    config = {} if folder is None else _read_json(folder / "config.json")
    names = config.get("id2label")
    return len(names) if isinstance(names, dict) else config.get("num_labels")
