"""A recording in Chrome's trace format, which Perfetto shows too.

Source of the format: "Trace Event Format", the Chromium project's catapult documentation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from faststep._profile._recording import DATA, LOOP, Held, Recording

_MICRO = 1e6


def write_chrome(path: Path, recording: Recording) -> None:
    """Write a recording; refuse to write over a file."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "faststep"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "loop"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "step"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 3, "args": {"name": "operations, each alone"}},
    ]
    for span in recording.spans:
        track = 1 if span.stage in (LOOP, DATA) else 2
        events.append(_complete(span.stage, track, span.began, span.ended - span.began, {}))
        counter = {"ph": "C", "name": "MLX memory", "pid": 1, "ts": span.began * _MICRO, "args": {"bytes": span.active}}
        events.append(counter)
    columns = zip(*(each.held for each in recording.operations), strict=True)
    known = {kind for kind, column in zip(Held._fields, columns, strict=False) if any(column)}
    at = recording.seconds
    for each in recording.operations:
        held = {kind: size for kind, size in each.held._asdict().items() if kind in known}
        events.append({"ph": "C", "name": "memory of a step", "pid": 1, "ts": at * _MICRO, "args": held})
        events.append(
            _complete(
                each.name, 3, at, each.seconds, {"module": each.module, "output": each.output, "bytes": each.bytes}
            )
        )
        at += each.seconds
    with path.open("x", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _complete(name: str, track: int, began: float, seconds: float, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": 1,
        "tid": track,
        "ts": began * _MICRO,
        "dur": seconds * _MICRO,
        "args": about,
    }
