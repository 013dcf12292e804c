"""Changes of a model before it trains: weights, freezing, quantization."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from faststep.recipes._patterns import check_matched, listed, matches


def own_parameters(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return all parameters of a model by path: the module that each is in, and its name there.

    Parameters in lists and dicts of a module go by the name of the list: MLX freezes them together.
    """
    found: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for key, value in module.items():
            if module.valid_parameter_filter(module, key, value) and not isinstance(value, nn.Module):
                arrays = [name for name, each in _arrays(value) if isinstance(each, mx.array)]
                found.update({".".join(filter(None, [path, key, name])): (module, key) for name in arrays})
    return found


def _arrays(value: object) -> list[tuple[str, object]]:
    return list(dict(tree_flatten(value, is_leaf=nn.Module.is_module)).items())


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose paths, or modules around them, match.

    Args:
        model: The model.
        patterns: What `fnmatch` takes: `embedding*`, `blocks.0`, `*.bias`.

    Raises:
        ValueError: A pattern matches nothing; the message lists what there is.
    """
    parameters = own_parameters(model)
    check_matched(patterns, parameters, "module or parameter")
    for path, (module, name) in parameters.items():
        if matches(path, patterns):
            module.freeze(keys=name, recurse=False)


def unfreeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Unfreeze the parameters whose paths match, except quantized ones.

    Raises:
        ValueError: A pattern matches nothing.
    """
    parameters = own_parameters(model)
    check_matched(patterns, parameters, "module or parameter")
    for path, (module, name) in parameters.items():
        if matches(path, patterns) and not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            module.unfreeze(keys=name, recurse=False)


def quantize(model: nn.Module, bits: int = 4, group_size: int = 64, modules: Sequence[str] = ("*",)) -> None:
    """Put the weights of modules into few bits, by `mlx.nn.quantize`; they are frozen by that.

    Args:
        model: The model, which changes.
        bits: Of each weight.
        group_size: How many weights share scale and bias; the inputs of every module must be a multiple.
        modules: Patterns of the modules: those that have a `to_quantized` among what they match.

    Raises:
        ValueError: A pattern matches nothing, or a module does not fit the group size.
    """
    able = {path: each for path, each in model.named_modules() if hasattr(each, "to_quantized") and path}
    check_matched(modules, able, "module that can be quantized")
    chosen = {path: each for path, each in able.items() if matches(path, modules)}
    odd = [path for path, each in chosen.items() if each.weight.shape[-1] % group_size]
    if odd:
        shapes = listed(f"{path} {list(chosen[path].weight.shape)}" for path in sorted(odd))
        raise ValueError(f"group_size: expected one that divides the last dimension, got {group_size} for {shapes}")
    nn.quantize(model, group_size, bits, class_predicate=lambda path, _: path in chosen)


def load_weights(model: nn.Module, file: str | os.PathLike[str], weights: Mapping[str, mx.array] | None = None) -> None:
    """Load the weights of all parameters from a safetensors file.

    Args:
        model: The model.
        file: The file, as `model.save_weights` writes it.
        weights: What has been read of it, by name; None: it is read.

    Raises:
        ValueError: The file cannot be read, or names or shapes differ from the model's; the message names them.
    """
    weights = _read(file) if weights is None else weights
    there = dict(tree_flatten(model.parameters()))
    both = [name for name in there if name in weights and weights[name].shape != there[name].shape]
    wrong = [f"{name} is {list(weights[name].shape)}, expected {list(there[name].shape)}" for name in both]
    found = {
        "it lacks": [name for name in there if name not in weights],
        "it has besides": [name for name in weights if name not in there],
        "of other shapes": wrong,
    }
    if any(found.values()):
        text = "; ".join(f"{what} {listed(names, 10)}" for what, names in found.items() if names)
        raise ValueError(f"{os.fspath(file)} has other weights than the model: {text}")
    model.load_weights(list(weights.items()))


def _read(file: str | os.PathLike[str]) -> dict[str, mx.array]:
    try:
        weights = mx.load(os.fspath(file), format="safetensors")
    except (RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"{os.fspath(file)} cannot be read: {error}") from None
    assert isinstance(weights, dict)
    return weights
