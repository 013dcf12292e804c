"""Memory in use, of MLX and of the process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import mlx.core as mx


def memory() -> dict[str, int]:
    """Return what is in use, in bytes: MLX's "active", "cache" and "peak", and the "process" as a whole."""
    active, cache, peak = mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()
    return {"active": active, "cache": cache, "peak": peak, "process": _resident()}


def available() -> int | None:
    """Return how many bytes of the machine's memory are available; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):  # no Linux: the most that there was
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return pages * resource.getpagesize()
