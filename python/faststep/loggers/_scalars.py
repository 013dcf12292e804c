"""Records as scalars with tags, for TensorBoard and Weights & Biases."""

from __future__ import annotations

from faststep._records import Record, number

STEP = {"loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate"}
INTERVAL = {
    "steps_per_second": "speed/steps_per_second",
    "samples_per_second": "speed/samples_per_second",
    "tokens_per_second": "speed/tokens_per_second",
    "padding": "speed/padding_efficiency",
    "skipped": "train/skipped",
    "update_ratio": "train/update_ratio",
    "traces": "train/traces",
    "epoch": "train/epoch",
}


def scalars(record: Record) -> dict[str, float]:
    """Return the record's numbers by tag, without those that are unknown.

    Steps give loss, metrics, gradient norm and learning rate; intervals the rest of what they know, times in seconds
    and memory in bytes; validations their loss and metrics; `values` those of the user's own, by their own names;
    checkpoints how long the training paused.
    """
    kind = record["kind"]
    found = {}
    if kind == "step":
        found = {tag: record.get(name) for name, tag in STEP.items()}
        found |= {f"train/{name}": each for name, each in (record.get("metrics") or {}).items()}
    elif kind == "interval":
        found = {tag: record.get(name) for name, tag in INTERVAL.items()}
        found |= {f"seconds/{part}": each for part, each in (record.get("seconds") or {}).items()}
        found |= {f"memory/{part}": each for part, each in (record.get("memory") or {}).items()}
        found |= {f"rank_seconds/{rank}": each for rank, each in (record.get("rank_seconds") or {}).items()}
    elif kind == "validation":
        found = {f"val/{name}": each for name, each in (record.get("metrics") or {}).items()}
        found["val/loss"] = record.get("loss")
    elif kind == "values":
        found = dict(record.get("values") or {})
    elif kind == "checkpoint":
        found = {"checkpoint/pause": record.get("pause")}
    return {tag: number(value) for tag, value in found.items() if value is not None}
