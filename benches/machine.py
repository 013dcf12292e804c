"""Origin of a sample, without which its numbers mean nothing: commit, machine, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import mlx.core as mx

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mlx-faststep", "mlx", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal", "scipy-openblas32", "numpy")


def commit() -> str:
    """Return the commit measured, marked when what was measured differs from it."""
    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with uncommitted changes" if changed else head


def git(*arguments: str) -> str:
    """Run git in the checkout and return what it prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def machine() -> dict[str, str]:
    """Describe the machine by what matters for speed, not by name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": processor(),
        "cores": str(cores),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "device": device(),
        "settings": settings(),
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def settings() -> str:
    """Return the environment variables that have a say in the speed."""
    names = sorted(name for name in os.environ if name.startswith(("MLX_", "FASTSTEP_", "OPENBLAS_", "OMP_")))
    return " ".join(f"{name}={os.environ[name]}" for name in names) or "none"


def processor() -> str:
    """Return the processor's model, with family numbers where the name alone says little."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([^\t:]+)\t*: (.*)$", info.read_text(), flags=re.MULTILINE))
    family = f" (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else ""
    return f"{fields.get('model name', platform.machine())}{family}"


def device() -> str:
    """Return the device that MLX runs on, with its name when it is a GPU."""
    default = mx.default_device()
    if default.type == mx.cpu:
        return "CPU"
    return str(mx.device_info().get("device_name", default))


def resident() -> int:
    """Return the bytes of memory that this process has in use (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def versions() -> dict[str, str]:
    """Return the versions of everything whose speed is measured."""
    found = {"Python": platform.python_version(), "g++": compiler()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compiler() -> str:
    """Return the version of the compiler that MLX builds its CPU kernels with."""
    try:
        return subprocess.run(["g++", "-dumpfullversion"], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"
