"""Versions, device and command of this process, for logs and checkpoints."""

from __future__ import annotations

import functools
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from faststep._native._environment import version


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of this package, MLX, NumPy and Python."""
    return {
        "faststep": version(),
        "mlx": metadata.version("mlx"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def environment() -> dict[str, Any]:
    """Return versions, the device and the command, for the log."""
    known = versions()
    device = mx.default_device()
    info = mx.device_info(device)
    name = info.get("device_name") or info.get("architecture") or platform.machine()
    kind = "gpu" if device == mx.gpu else "cpu"
    shown = {name: known[name] for name in ("python", "mlx", "faststep")}
    return {"versions": shown, "device": f"{kind}: {name}", "command": _command()}


def _command() -> str:
    if Path(sys.argv[0]).name == "ipykernel_launcher.py":
        return "a notebook"  # whose arguments are files of its kernel
    return shlex.join([_program(), *sys.argv[1:]])


def _program() -> str:
    """Return the name of the running program, without its installation folder."""
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return path.parent.name
    return path.name if path.is_absolute() else sys.argv[0]
