"""Configs of `mlx_lm.lora` as configs of this package."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx.optimizers import schedulers

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "muon": "Muon", "sgd": "SGD", "adafactor": "Adafactor"}
_FEATURES = {
    "prompt_feature": "prompt",
    "completion_feature": "completion",
    "chat_feature": "messages",
    "text_feature": "text",
}
_DEFAULTS: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6b",
    "data": "data",
    "fine_tune_type": "lora",
    "optimizer": "adam",
    "seed": 0,
    "num_layers": 16,
    "batch_size": 4,
    "iters": 1000,
    "val_batches": 25,
    "learning_rate": 1e-5,
    "steps_per_report": 10,
    "steps_per_eval": 200,
    "save_every": 100,
    "max_seq_length": 2048,
    "grad_accumulation_steps": 1,
}
_SILENT = ("train", "config", "adapter_path", "optimizer_config", "clear_cache_threshold", "project_name")
_ELSEWHERE = {
    "test": "`faststep eval RUN --test` with data.test",
    "test_batches": "`faststep eval` takes all of the data",
    "hf_dataset": "nothing is downloaded: write the dataset as JSON lines or Parquet",
    "resume_adapter_file": "model.adapters: DIR begins with adapters, in place of model.lora",
    "trust_remote_code": "a model's own code is not run",
}


def from_mlx_lm(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert the values of a config of `mlx_lm.lora`.

    Args:
        values: Of its YAML file, or of an `adapter_config.json`.

    Returns:
        Values of a config of this package that trains the same, and what of the file it does not have.

    Raises:
        ValueError: A value is none that mlx-lm knows.
    """
    given = {**_DEFAULTS, **{key: each for key, each in values.items() if each is not None}}
    window = int(given["grad_accumulation_steps"])

    def updates(name: str) -> int:
        return max(1, math.ceil(int(given[name]) / window))

    batches = given["val_batches"]
    made: dict[str, Any] = {
        "seed": given["seed"],
        "model": _model(given),
        "loss": {"use": "next_token"},
        "data": _data(given),
        "optimizer": _optimizer(given),
        "step": {"weighted": True, "accumulate": window, "max_grad_norm": None},
        "train": {
            "steps": updates("iters"),
            "log_every": updates("steps_per_report"),
            "validate_every": updates("steps_per_eval"),
            "validate_at_start": True,
            "validation_batches": None if batches < 0 else batches,
        },
        "checkpoints": {"every": updates("save_every")},
        "callbacks": [] if given["fine_tune_type"] == "full" else [{"use": "adapters"}],
    }
    if given.get("report_to") == "wandb":
        made["logs"] = {"wandb": {"project": given.get("project_name") or "mlx-lm"}}
    return made, list(_left_out(given))


def _model(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given["fine_tune_type"]
    if kind not in ("lora", "dora", "full"):
        raise ValueError(f"fine_tune_type: expected lora, dora or full, got {kind!r}")
    made: dict[str, Any] = {"use": "mlx_lm", "path": _local(given["model"])}
    if kind != "full":
        known = ("rank", "scale", "dropout", "keys")
        parameters = {"rank": 8, "scale": 20.0, "dropout": 0.0, **(given.get("lora_parameters") or {})}
        lora = {name: each for name, each in parameters.items() if name in known}
        lora |= {"scale": float(lora["scale"]), "dropout": float(lora["dropout"])}
        made |= {"lora": {**lora, "layers": given["num_layers"]}, "dora": kind == "dora"}
    return made | {"checkpoint": bool(given.get("grad_checkpoint"))}


def _data(given: Mapping[str, Any]) -> dict[str, Any]:
    jsonl: dict[str, Any] = {"use": "jsonl", "file": _local(given["data"]), "tokenizer": _local(given["model"])}
    jsonl |= {"train_on": "last" if given.get("mask_prompt") else "all"}
    jsonl |= {"max_length": given["max_seq_length"], "longer": "cut"}
    keys = {ours: given[theirs] for theirs, ours in _FEATURES.items() if theirs in given}
    jsonl |= {"keys": keys} if keys else {}
    made: dict[str, Any] = {"train": {**jsonl, "split": "train"}, "validation": {**jsonl, "split": "valid"}}
    return made | {"batch_size": given["batch_size"], "collate": {"use": "pad", "multiple": 32}}


def _local(name: str) -> str:
    """Return a path as it is called from anywhere: mlx-lm takes it from the working directory. Ids stay as they are."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _optimizer(given: Mapping[str, Any]) -> dict[str, Any]:
    name = str(given["optimizer"]).lower()
    if name not in _OPTIMIZERS:
        raise ValueError(f"optimizer: expected {', '.join(_OPTIMIZERS)}, got {given['optimizer']!r}")
    options = (given.get("optimizer_config") or {}).get(name) or {}
    schedule = given.get("lr_schedule")
    rate: Any = _schedule(schedule) if schedule else float(given["learning_rate"])
    return {"use": _OPTIMIZERS[name], "learning_rate": rate, **options}


def _schedule(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schedule whose arguments have names; mlx-lm's warm-up ends a step later than ours."""
    function = getattr(schedulers, str(schedule.get("name")), None)
    if function is None:
        raise ValueError(f"lr_schedule: name: expected a schedule of mlx.optimizers, got {schedule.get('name')!r}")
    arguments = dict(zip(inspect.signature(function).parameters, schedule["arguments"], strict=False))
    made = {"use": schedule["name"], **arguments}
    if not (warmup := schedule.get("warmup", 0)):
        return made
    start = {"init": schedule.get("warmup_init", 0.0), "end": schedule["arguments"][0], "steps": warmup}
    rising = {"use": "linear_schedule", **start}
    return {"use": "join_schedules", "schedules": [rising, made], "boundaries": [warmup + 1]}


def _left_out(given: Mapping[str, Any]) -> list[str]:
    known = {*_DEFAULTS, *_SILENT, *_FEATURES, "lora_parameters", "lr_schedule", "mask_prompt", "grad_checkpoint"}
    told = [f"{key}: {_ELSEWHERE[key]}" for key in _ELSEWHERE if given.get(key)]
    told += [f"{key}: unknown here" for key in given if key not in {*known, *_ELSEWHERE, "report_to"}]
    if given["fine_tune_type"] == "full" and given["num_layers"] > 0:
        told.append("num_layers: all blocks train; `frozen: [PATTERN]` leaves some as they are")
    if (alpha := (given.get("lora_parameters") or {}).get("alpha")) is not None:
        told.append(
            f"lora_parameters.alpha: the factor is scale itself; alpha {alpha} over the rank, in other packages"
        )
    return told
