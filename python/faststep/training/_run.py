"""The folder of a run, and what is known of it before its first step."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from faststep.checkpoints._snapshot import versions


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the folder of a run, so that no other process trains in it.

    Raises:
        RuntimeError: Another process does.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "unknown"
            raise RuntimeError(f"{run}: expected no other training in this folder, process {other} is at it") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def environment() -> dict[str, Any]:
    """Return versions, the device and the command, for the log."""
    known = versions()
    device = mx.default_device()
    info = mx.device_info(device)
    name = info.get("device_name") or info.get("architecture") or platform.machine()
    kind = "gpu" if device == mx.gpu else "cpu"
    shown = {name: known[name] for name in ("python", "mlx", "faststep")}
    return {"versions": shown, "device": f"{kind}: {name}", "command": shlex.join([_program(), *sys.argv[1:]])}


def _program() -> str:
    """Return the name of what runs, without the folder in which it is installed."""
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return path.parent.name
    return path.name if path.is_absolute() else sys.argv[0]


def counts(model: nn.Module) -> dict[str, Any]:
    """Return the numbers of trainable and frozen parameters, in all and by module of the model's top level.

    Quantized weights count as the elements of their packed arrays. Lists of modules count by their parts together.
    """
    modules: dict[str, dict[str, Any]] = {}
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    trainable: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    for name, array in parameters.items():
        top = name.split(".")[0]
        entry = modules.setdefault(top, {"name": top, "trainable": 0, "frozen": 0})
        entry["trainable" if name in trainable else "frozen"] += array.size
    totals = {kind: sum(entry[kind] for entry in modules.values()) for kind in ("trainable", "frozen")}
    return {"modules": list(modules.values()), **totals}
