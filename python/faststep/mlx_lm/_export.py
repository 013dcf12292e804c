"""Exports of a trained model: its adapters as mlx-lm takes them, and all of it as plain weights in a folder."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from faststep._files import sync
from faststep._optional import need
from faststep.mlx_lm import _adapters, _peft
from faststep.mlx_lm._folder import EXTRA
from faststep.mlx_lm._load import Quantize, quantize_model
from faststep.mlx_lm._lora import LEAVES
from faststep.mlx_lm._model import LanguageModel
from faststep.training import Callback, Trainer

_ENOUGH = 0.9  # of a change by adapters, which is to be left in few bits
_WRITTEN = ("config.json", "adapter_config.json", "README.md")  # of a model's folder, not to be copied: written anew


class Adapters(Callback):
    """A callback that writes a model's adapters to `RUN/adapters` at each checkpoint, as mlx-lm takes them.

    The checkpoint beside them has everything that an exact resume needs; the adapters are what is used afterwards:
    `mlx_lm.generate --model DIR --adapter-path RUN/adapters`.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Refuse a model without adapters, and a folder of the user's.

        Raises:
            TypeError: It has none.
            ValueError: There is such a folder.
        """
        if getattr(getattr(trainer.step.model, "origin", None), "adapters", None) is None:
            raise TypeError("adapters: expected a model of `use: mlx_lm` with lora, got one that has no adapters")
        self._folder = trainer.run / "adapters"
        if self._folder.exists() and not _adapters.is_ours(self._folder):
            raise ValueError(
                f"{self._folder}: expected none, or that of the run, found files of yours: choose another run"
            )

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Write them."""
        model: Any = trainer.step.model
        export_adapters(model, self._folder)


def export_adapters(
    model: LanguageModel,
    folder: Path,
    weights: Mapping[str, mx.array] | None = None,
    *,
    new: bool = False,
    peft: bool = False,
) -> Path:
    """Write the adapters of a model in mlx-lm's format: adapters.safetensors and adapter_config.json.

    mlx-lm takes them as `load(path, adapter_path=folder)` and by `generate --adapter-path` and `fuse`.

    Args:
        model: What `load` gave, with `lora`.
        folder: Where they go, made where it is missing.
        weights: Weights of the whole model by name, of which the adapters' are taken; None: the model's own.
        new: Refuse a folder with adapters in it.
        peft: In the format of Hugging Face's PEFT: adapter_model.safetensors and adapter_config.json.

    Returns:
        The folder.

    Raises:
        ValueError: The model has no adapters, or weights are missing.
        OSError: They cannot be written.
    """
    if model.origin.adapters is None:
        raise ValueError(f"expected a model with adapters, {model.origin.folder} was trained without lora")
    kind = _peft if peft else _adapters
    for name in (kind.WEIGHTS, kind.CONFIG) if new else ():
        if os.path.lexists(folder / name):
            raise FileExistsError(errno.EEXIST, "there is such a file already", str(folder / name))
    plain: nn.Module = model
    parameters = dict(tree_flatten(plain.parameters()))
    names = {name: each for name, each in parameters.items() if name.rpartition(".")[2] in LEAVES}
    found = names if weights is None else {name: weights[name] for name in names if name in weights}
    if missing := sorted(names.keys() - found.keys()):
        raise ValueError(f"expected the weights of all adapters, {missing[0]} is missing: is it another training's?")
    written: Path = kind.write(folder, found, model.origin.adapters, model.origin.folder)
    return written


def export_fused(
    model: LanguageModel,
    folder: Path,
    weights: Mapping[str, mx.array] | None = None,
    quantize: Quantize | None = None,
) -> Path:
    """Write a model as plain weights in Hugging Face's layout: adapters added to their layers, few bits made floats.

    Args:
        model: What `load` gave; afterwards it is the fused one.
        folder: Where it goes, which must not exist; it appears when everything is in it.
        weights: Weights of the whole model by name; None: the model's own.
        quantize: Bring the sum into few bits again. What of the adapters' change is smaller than half a step of these
            is rounded away; a warning says so where less than 90 % of the change is left.

    Returns:
        The folder, which mlx-lm and `load` take, with config, tokenizer and what else was in the model's.

    Raises:
        ValueError: The weights are not the model's, or cannot be brought into such few bits.
        OSError: It exists, or cannot be written.
    """
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, "there is such a folder already", str(folder))
    if weights is not None:
        model.load_weights(list(weights.items()))
    modules: dict[str, Any] = dict(nn.Module.named_modules(model))
    fused = [(name, each.fuse(dequantize=True)) for name, each in modules.items() if name and hasattr(each, "fuse")]
    before = {name: _floats(modules[name]) for name, _ in fused} if quantize is not None else {}
    if fused:
        model.update_modules(tree_unflatten(fused))
    utils = need("mlx_lm.utils", EXTRA)
    utils.dequantize_model(model)
    config = {name: each for name, each in model.origin.config.items() if not name.startswith("quantization")}
    if quantize is not None:
        config = quantize_model(model, config, quantize, model.origin.folder)
        _warn_of_loss(before, {name: each.weight for name, each in fused}, model, config["quantization"]["bits"])
    with _appearing(folder) as partial:
        utils.save_model(partial, model)
        with contextlib.redirect_stdout(io.StringIO()):
            utils.save_config(json.loads(json.dumps(config, default=str)), partial / "config.json")
        _copy_rest(model.origin.folder, partial)
    return folder


def _warn_of_loss(before: dict[str, mx.array], fused: dict[str, mx.array], model: nn.Module, bits: int) -> None:
    """Warn where rounding has taken much of the adapters' change back: the share of it that the weights still have."""
    modules: dict[str, Any] = dict(nn.Module.named_modules(model))
    left = whole = 0.0
    for name, weight in before.items():
        change, found = (each.astype(mx.float32) - weight for each in (fused[name], _floats(modules[name])))
        left, whole = left + float((change * found).sum()), whole + float(change.square().sum())
    if left < _ENOUGH * whole:
        warnings.warn(
            f"{left / whole:.0%} of what the adapters have changed is left in {bits} bits, the rest is rounded away: "
            "take more bits, or the adapters beside the base",
            stacklevel=3,
        )


def _floats(module: Any) -> mx.array:
    """Return the weight of a layer, or of the one that has an adapter, float32."""
    layer = module.get("linear", module.get("embedding", module))
    if "scales" not in layer:
        return layer.weight.astype(mx.float32)  # type: ignore[no-any-return]
    few = (layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode)
    return mx.dequantize(*few).astype(mx.float32)


def _copy_rest(origin: Path, folder: Path) -> None:
    """Copy the tokenizer, and all else that stands beside the weights of a model."""
    for file in sorted(origin.iterdir()):
        if file.is_file() and ".safetensors" not in file.name and file.name not in _WRITTEN and file.suffix != ".gguf":
            shutil.copy(file, folder)


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Make a folder beside another, which takes its name when the block ends well, and is removed when it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
