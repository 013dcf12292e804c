"""Adapters in the format of Hugging Face's PEFT: adapter_model.safetensors and adapter_config.json.

PEFT's matrices are the transposed ones of mlx-lm, and its factor is `lora_alpha` over the rank, or over the rank's root
(`use_rslora`): https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from faststep._files import replacing, write_text
from faststep.recipes import listed

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_BESIDE = ("rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "alora_invocation_tokens")
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")  # ways to begin, which leave other weights in the base
_PREFIX = "base_model.model."
_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector.weight"}
_BLOCK = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(.+)$")


def is_peft(folder: Path) -> bool:
    """Return whether a folder has adapters of PEFT."""
    return (folder / WEIGHTS).is_file()


def write(folder: Path, weights: Mapping[str, mx.array], config: Mapping[str, Any], base: Path) -> Path:
    """Write adapters; the arguments are those of `_adapters.write`.

    Raises:
        ValueError: One of them is no adapter of a linear layer.
        OSError: They cannot be written.
    """
    odd = [name for name, each in weights.items() if each.ndim != (1 if name.endswith(".m") else 2)]
    odd += [name for name in weights if "embed" in name]
    if odd:
        raise ValueError(f"expected adapters of linear layers, which PEFT has the same; {odd[0]} is of another kind")
    given, modules = config["lora_parameters"], sorted({name.rpartition(".")[0] for name in weights})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": given["rank"],
        "lora_alpha": given["scale"] * given["rank"],
        "lora_dropout": given["dropout"],
        "target_modules": modules,
        "use_dora": config["fine_tune_type"] == "dora",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {_theirs(name): mx.contiguous(each.T) for name, each in weights.items()}
    with replacing(folder / WEIGHTS) as file:
        mx.save_safetensors(file, arrays, metadata={"format": "pt"})
    write_text(folder / CONFIG, json.dumps(about, indent=2) + "\n")
    return folder


def _theirs(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{_PREFIX}{module}.{_NAMES[leaf]}"


def read(folder: Path, blocks: int) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Read adapters.

    Args:
        folder: Where they are.
        blocks: How many blocks the model has.

    Returns:
        Config and weights by name, as mlx-lm has them.

    Raises:
        ValueError: They cannot be read, or are of a kind that mlx-lm has not.
    """
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        found: Any = mx.load(str(folder / WEIGHTS), format="safetensors")
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"adapters: {folder} cannot be read: {error!r}") from None
    _refuse(file, config)
    ends = {f".{theirs}": f".{ours}" for ours, theirs in _NAMES.items()} | {".lora_magnitude_vector": ".m"}
    weights: dict[str, mx.array] = {}
    for name, each in found.items():
        end = next((end for end in ends if name.endswith(end)), None)
        if end is None:
            raise ValueError(f"adapters: {folder}: {name} is no weight of LoRA or DoRA")
        weights[name.removeprefix(_PREFIX).removesuffix(end) + ends[end]] = each.T
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    layers, keys = _places(folder, weights, blocks)
    dropout = float(config.get("lora_dropout") or 0.0)
    return {
        "fine_tune_type": "dora" if config.get("use_dora") else "lora",
        "num_layers": layers,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": dropout, "keys": keys},
    }, weights


def _refuse(file: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"adapters: {file}: expected adapters of the type LORA, got {config.get('peft_type')!r}")
    odd = [key for key in _BESIDE if config.get(key)]
    odd += ["bias"] if config.get("bias", "none") != "none" else []
    if odd:
        raise ValueError(f"adapters: {file}: {listed(odd)}: mlx-lm has one rank and scale for all, and nothing beside")
    if (init := str(config.get("init_lora_weights"))).startswith(_OTHER_BASE):
        raise ValueError(
            f"adapters: {file}: init_lora_weights {init!r} has changed the base's weights too, which are not in the "
            "folder: save them with path_initial_model_for_weight_conversion, which makes plain LoRA of them"
        )


def _places(folder: Path, weights: Mapping[str, mx.array], blocks: int) -> tuple[int, list[str]]:
    """Return which blocks and layers have adapters, as mlx-lm says it."""
    modules = {name.rpartition(".")[0] for name in weights}
    inside = {name: found for name in modules if (found := _BLOCK.match(name))}
    numbers = [int(found[1]) for found in inside.values()]
    if not numbers:
        raise ValueError(f"adapters: {folder}: expected adapters of layers in blocks, found {listed(sorted(modules))}")
    keys = {found[2] for found in inside.values()} | (modules - inside.keys())
    return blocks - min(numbers), sorted(keys)
