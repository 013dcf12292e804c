"""Records as lines and rows of text."""

from __future__ import annotations

from typing import Any

from faststep._records._format import count, figure, span
from faststep._records._values import Record


def parameter_table(start: Record) -> list[tuple[str, str, str]]:
    """Return the rows of the table of parameters (module, trainable, frozen), the sum last; none without modules."""
    modules: list[Any] = list(start.get("modules") or [])
    if not modules:
        return []
    rows = [(str(each["name"]), count(each["trainable"]), count(each["frozen"])) for each in modules[:20]]
    if rest := modules[20:]:
        sums = (sum(int(each[key]) for each in rest) for key in ("trainable", "frozen"))
        rows.append((f"and {len(rest)} more", *map(count, sums)))  # type: ignore[arg-type]
    sums = (start.get(key, sum(int(each[key]) for each in modules)) for key in ("trainable", "frozen"))
    return [*rows, ("all", *map(count, sums))]  # type: ignore[list-item]


def headline(start: Record) -> str:
    """Return what runs where: `resumed at step 200 on cpu; mlx 0.32.4, ...`."""
    versions = ", ".join(f"{name} {version}" for name, version in (start.get("versions") or {}).items())
    begin = f"resumed at step {count(start.get('step'))}" if start.get("resumed") else "training"
    where = f" on {start['device']}" if start.get("device") else ""
    return f"{begin}{where}{f'; {versions}' if versions else ''}"


def data_lines(start: Record) -> list[str]:
    """Return what the datasets say of themselves, a line for each: `train: 1,024 samples, 90,112 tokens, ...`."""
    lines = []
    for name, each in (start.get("data") or {}).items():
        sizes = f"{count(each['shortest'])} to {count(each['longest'])} a sample, median {count(each['median'])}"
        trained = f"{count(each['trained_tokens'])} of them trained on"
        lines.append(f"{name}: {count(each['samples'])} samples, {count(each['tokens'])} tokens, {trained}; {sizes}")
    return lines


def describe_validation(record: Record) -> str:
    """Return a validation in a line."""
    parts = [f"validation at step {count(record.get('step'))}: loss {figure(record.get('loss'))}"]
    parts += [f"{name} {figure(value)}" for name, value in (record.get("metrics") or {}).items()]
    if record.get("batches") is not None:
        batches = "1 batch" if record["batches"] == 1 else f"{count(record['batches'])} batches"
        parts.append(f"{batches} in {span(record.get('seconds'))}")
    return ", ".join(parts) + (" (best so far)" if record.get("best") else "")


def monitored(record: Record) -> str:
    """Return what is monitored, in words: `loss`, `accuracy`."""
    return str(record.get("monitor") or "val/loss").removeprefix("val/")


def describe_event(record: Record) -> str:
    """Return an event in a line."""
    return f"{record.get('level', 'info')} at step {count(record.get('step'))}: {record.get('text', '')}"


REASONS = {
    "done": "done",
    "early_stop": "stopped early: what is monitored no longer improves",
    "callback": "stopped by a callback",
    "signal": "stopped by a signal",
    "max_time": "the time is up",
    "bad_batches": "stopped: too many batches in a row were skipped",
    "error": "an error",
}
