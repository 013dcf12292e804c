"""Folders of adapters in mlx-lm's format: adapters.safetensors and adapter_config.json.

They have one key more than mlx-lm's, which it passes over: `faststep`, by which adapters of another model are known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from faststep._files import replacing, write_text
from faststep.recipes import listed

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"
_ENDS = 1 << 16  # bytes of a file of weights that are compared, at its beginning and at its end


def write(folder: Path, weights: Mapping[str, mx.array], config: Mapping[str, Any], base: Path) -> Path:
    """Write adapters; files of that name in the folder are replaced, each at once.

    Args:
        folder: The folder, which is made where it is missing.
        weights: The adapters' parameters by name.
        config: `fine_tune_type`, `num_layers` and `lora_parameters`.
        base: The folder of the model that they belong to.

    Returns:
        The folder.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as file:
        mx.save_safetensors(file, dict(weights), metadata={"format": "mlx"})
    about = {**config, "model": str(base), "faststep": {"base": fingerprint(base)}}
    write_text(folder / CONFIG, json.dumps(dict(sorted(about.items())), indent=4) + "\n")
    return folder


def read_config(folder: Path, base: Path) -> dict[str, Any]:
    """Read the config of adapters that are to go on a model.

    Raises:
        ValueError: There are none, they are no LoRA or DoRA, or they were trained on another model.
    """
    file = folder / CONFIG
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"adapters: expected {' and '.join(missing)} in {folder}, found none")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind, given = config.get("fine_tune_type", "lora"), config["lora_parameters"]
        layers = config.get("num_layers", config.get("lora_layers"))  # as mlx-lm wrote it before 0.20
        complete = kind in ("lora", "dora") and isinstance(layers, int) and {"rank", "scale", "dropout"} <= given.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"adapters: {file} cannot be read: {error!r}") from None
    if not complete:
        raise ValueError(f"adapters: {file}: expected lora or dora with num_layers, rank, scale and dropout")
    trained_on = config.get("faststep", {}).get("base")
    if trained_on is not None and trained_on != fingerprint(base):
        raise ValueError(
            f"adapters: {folder} was trained on another model: on that in {config.get('model')}, whose weights are not "
            f"those in {base}"
        )
    return {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": given}


def read_weights(folder: Path) -> dict[str, mx.array]:
    """Read the weights of adapters by name.

    Raises:
        ValueError: They cannot be read.
    """
    file = folder / WEIGHTS
    try:
        found: Any = mx.load(str(file), format="safetensors")
    except (RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"adapters: {file} cannot be read: {error}") from None
    return dict(found)


def load_weights(model: nn.Module, folder: Path, found: Mapping[str, mx.array]) -> None:
    """Load the weights of adapters, from a folder, into a model that has such adapters.

    Raises:
        ValueError: They are of other layers or shapes than the model's.
    """
    there: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    differ = sorted(found.keys() ^ there.keys())
    shapes = [name for name in found if name in there and found[name].shape != there[name].shape]
    if differ or shapes:
        texts = [f"{name} is {list(found[name].shape)}, expected {list(there[name].shape)}" for name in shapes]
        what = f"only one of both has {listed(differ, 4)}" if differ else listed(texts, 4)
        raise ValueError(f"adapters: {folder} is of another model: {what}")
    model.load_weights(list(found.items()), strict=False)


def is_ours(folder: Path) -> bool:
    """Return whether a folder is empty, or holds adapters that `write` wrote."""
    if not any(folder.iterdir()):
        return True
    try:
        return "faststep" in json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def fingerprint(base: Path) -> str:
    """Return a hash of a model's weights: the names, sizes, headers and ends of its files."""
    digest = hashlib.sha256()
    for file in sorted(base.glob("model*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_ENDS))
            opened.seek(max(0, size - _ENDS))
            digest.update(opened.read(_ENDS))
    return digest.hexdigest()
