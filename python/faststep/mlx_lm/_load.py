"""The recipe `mlx_lm`: a causal language model out of a local folder, in few bits, with adapters, as a config says."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import mlx.nn as nn

from faststep._optional import need
from faststep.mlx_lm import _adapters, _peft
from faststep.mlx_lm._folder import EXTRA, check_vocabulary, find_folder, read_model, read_tokenizer, vocabulary_of
from faststep.mlx_lm._lora import Lora, adapt
from faststep.mlx_lm._model import LanguageModel, Origin, as_language_model
from faststep.recipes import checkpoint_gradients


@dataclass(frozen=True)
class Quantize:
    """Weights in few bits, as mlx-lm makes them: layers whose inputs are no multiple of the group stay as they are.

    Attributes:
        bits: Of each weight; None: what is usual for the mode.
        group_size: How many weights share scale and bias; None: what is usual for the mode, 64 for "affine".
        mode: How: whole numbers with scale and bias ("affine"), or small floating-point numbers.
    """

    bits: Literal[2, 3, 4, 5, 6, 8] | None = None
    group_size: Literal[16, 32, 64, 128] | None = None
    mode: Literal["affine", "mxfp4", "nvfp4", "mxfp8"] = "affine"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def load(
    path: Path,
    quantize: Quantize | None = None,
    lora: Lora | None = None,
    dora: bool = False,
    adapters: Path | None = None,
    checkpoint: bool = False,
) -> LanguageModel:
    """Load a causal language model of mlx-lm from a local folder in Hugging Face's layout, with LoRA or DoRA adapters.

    Args:
        path: The folder: config.json, `model*.safetensors`, tokenizer; or an id of the Hugging Face Hub, such as
            `mlx-community/Qwen3-0.6B-4bit`, that is in its cache. Nothing is downloaded.
        quantize: Bring the weights into few bits, `{bits: 4, group_size: 64}`; None: as they are.
        lora: Freeze all and train adapters, `{rank, scale, dropout, layers, keys}`; None: all trains that can.
        dora: The adapters are DoRA's.
        adapters: A folder of adapters to begin with, mlx-lm's or PEFT's; they say themselves what they are.
        checkpoint: Compute the activations of each block again in the backward pass, in place of keeping them.

    Raises:
        ImportError: mlx-lm is not installed.
        ValueError: The folder is incomplete, weights are missing, unknown or of other shapes, the tokenizer has tokens
            that the model has not, an argument does not fit, or the adapters are of another model.
    """
    path = find_folder(Path(path))
    model, config = read_model(path)
    tokenizer = read_tokenizer(path)
    rows = vocabulary_of(config)
    if rows is not None:
        check_vocabulary(path, tokenizer, rows)
    if quantize is not None:
        config = quantize_model(model, config, quantize, path)
    made = _adapted(model, path, lora, dora, adapters)
    if checkpoint:
        blocks = {id(each) for each in model.layers}
        checkpoint_gradients(model, [name for name, each in model.named_modules() if id(each) in blocks])
    model.train()
    return as_language_model(model, Origin(path, config, tokenizer, made))


def quantize_model(model: nn.Module, config: dict[str, Any], quantize: Quantize, path: Path) -> dict[str, Any]:
    """Bring a model into few bits; return its config with what was done.

    Args:
        model: The model, which changes.
        config: Its config.
        quantize: How.
        path: Its folder, for messages.

    Raises:
        ValueError: It is in few bits already, or has no layer that can be.
    """
    if "quantization" in config:
        raise ValueError(f"quantize: the weights in {path} are in few bits already: leave quantize out")
    utils = need("mlx_lm.utils", EXTRA)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
        _, made = _quantized(utils, model, config, quantize)
    if not any("scales" in each for _, each in model.named_modules()):
        size = made["quantization"]["group_size"]
        raise ValueError(f"quantize: group_size: no layer has inputs that are a multiple of {size}")
    return dict(made)


def _quantized(utils: Any, model: nn.Module, config: dict[str, Any], quantize: Quantize) -> Any:
    try:
        return utils.quantize_model(model, config, quantize.group_size, quantize.bits, quantize.mode)
    except ValueError as error:  # bits or groups that a mode has not
        raise ValueError(f"quantize: {error}") from None


def _adapted(
    model: nn.Module, path: Path, lora: Lora | None, dora: bool, adapters: Path | None
) -> dict[str, Any] | None:
    """Give a model its adapters; return what `adapter_config.json` says of them."""
    if adapters is None:
        if lora is None and dora:
            raise ValueError("dora: expected lora beside it, with rank and scale, got none")
        return None if lora is None else adapt(model, lora, dora=dora)
    if lora is not None or dora:
        raise ValueError(f"adapters: expected no lora or dora beside it: {adapters} says what its adapters are")
    if _peft.is_peft(adapters):
        config, weights = _peft.read(adapters, len(model.layers))
    else:
        config, weights = _adapters.read_config(adapters, path), _adapters.read_weights(adapters)
    given, names = dict(config["lora_parameters"]), Lora.__dataclass_fields__
    layers = config["num_layers"]
    known = Lora(**{name: each for name, each in given.items() if name in names}, layers=None if layers < 1 else layers)
    made = adapt(model, known, dora=config["fine_tune_type"] == "dora")
    _adapters.load_weights(model, adapters, weights)
    return made
