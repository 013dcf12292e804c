"""The machine and the installed packages, read from files and commands alone: nothing native is loaded.

Python's standard library only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from faststep.doctor._line import Line, size

LINUX = sys.platform.startswith("linux")
BACK_ENDS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}
_EXTRAS = {"typer": "train", "pydantic": "train", "rich": "train", "matplotlib": "train", "PyYAML": "train"}
LEAST_MEMORY, LEAST_DISK = 1e9, 2e9  # bytes, below which a training is likely to fail


def installed(name: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def lines() -> Iterator[Line]:
    """Yield what is found: Python, packages, back ends, compiler, caches, memory, disk, load."""
    yield _python()
    yield from _packages()
    if LINUX:
        yield _back_end()
        yield from _cuda()
        yield from _compiler()
        yield _kernels()
    yield from _memory()
    yield from _disk()
    yield _load()


def _python() -> Line:
    text = f"{platform.python_version()} on {platform.platform(terse=True)}, {platform.machine()}"
    return Line("Python", "ok", f"{text}: {sys.executable}")


def _packages() -> Iterator[Line]:
    found = {name: installed(name) for name in ("mlx-faststep", "mlx", "numpy")}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    if absent := [name for name, version in found.items() if version is None]:
        yield Line("packages", "failure", text, f"pip install {' '.join(absent)}")
    else:
        yield Line("packages", "ok", text)
    lacking = sorted({name for name in _EXTRAS if installed(name) is None})
    if lacking:
        text = f"without {', '.join(lacking)}: no trainer from configs, reports or command line"
        yield Line("extras", "warning", text, 'pip install "mlx-faststep[train]"')


def _back_end() -> Line:
    found = {name: version for name in BACK_ENDS if (version := installed(name))}
    mlx = installed("mlx")
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        choices = " or ".join(f'"mlx-faststep[{extra}]"' for extra in BACK_ENDS.values())
        return Line("back end", "failure", "MLX has none: there is no libmlx.so", f"pip install {choices}")
    if wrong := [name for name, version in found.items() if version != mlx]:
        pins = " ".join(f'"{name}=={mlx}"' for name in wrong)
        return Line("back end", "failure", f"{text} do not fit mlx {mlx}", f"pip install {pins}")
    if len(found) > 1:  # they share the folder mlx/lib: the one that was installed last is there
        *others, last = found
        remedy = f"pip uninstall {' '.join(others)} && pip install --force-reinstall --no-deps {last}=={mlx}"
        return Line("back end", "warning", f"{text}: they overwrite each other's libmlx.so", remedy)
    return Line("back end", "ok", text)


def _cuda() -> Iterator[Line]:
    wheels = [name for name in BACK_ENDS if "cuda" in name and installed(name)]
    if not wheels:
        if Path("/dev/nvidia0").exists():
            remedy = 'pip install "mlx-faststep[cuda13]"; [cuda12] for drivers before 580'
            yield Line("CUDA", "warning", "there is an NVIDIA GPU, and MLX computes on the CPU", remedy)
        return
    problem = driver()
    if problem is not None:
        remedy = f'on a machine without a GPU: pip uninstall {" ".join(wheels)} && pip install "mlx-faststep[cpu]"; '
        yield Line("CUDA", "failure", f"{wheels[0]} is installed, but {problem}", remedy + "else install the driver")
    known = {name: installed(name) for name in _libraries(wheels[0])}
    text = ", ".join(f"{name.removeprefix('nvidia-')} {version or 'missing'}" for name, version in known.items())
    if missing := [name for name, version in known.items() if version is None]:
        remedy = f"pip install {' '.join(missing)}, unless the system brings them"
        yield Line("libraries", "warning", f"{text} (as packages)", remedy)
    elif known:
        yield Line("libraries", "ok", text)


def _libraries(wheel: str) -> list[str]:
    """Return the packages of NVIDIA's libraries that a wheel of MLX asks for."""
    names = [re.split(r"[^\w.-]", each)[0] for each in metadata.requires(wheel) or ()]
    return [name for name in names if name.startswith("nvidia-")]


def driver() -> str | None:
    """Return why CUDA finds no GPU here; None where it finds one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver: libcuda.so.1 cannot be loaded"
    if status := cuda.cuInit(0):
        return f"CUDA finds no GPU: cuInit gives error {status}"
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value else "CUDA finds no GPU"


def _compiler() -> Iterator[Line]:
    path = shutil.which("g++")
    if path is None:
        return  # `no_compiler`, once it is known whether one is needed
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield Line("compiler", "warning", f"{path} does not run: {error}", "install it anew")
    else:
        yield Line("compiler", "ok", f"{path}: {said.partition(chr(10))[0]}")


def no_compiler(*, is_needed: bool) -> Line | None:
    """Return what there being no compiler means; None where there is one."""
    if not LINUX or shutil.which("g++") is not None:
        return None
    if not is_needed:
        return Line("compiler", "ok", "there is no g++, and none is needed: fused kernels are computed in blocks")
    text = "there is no g++: MLX cannot compile kernels for the CPU, and steps run without compilation"
    return Line("compiler", "warning", text, "apt-get install g++, dnf install gcc-c++ or pacman -S gcc")


def kernel_folder() -> Path:
    """Return where compiled kernels are kept."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "mlx-faststep"


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # another process has just put it in its place, or deleted it
        return 0


def _kernels() -> Line:
    if os.environ.get("FASTSTEP_KERNELS") == "0":
        folder, name = Path(tempfile.gettempdir()), "MLX's own (FASTSTEP_KERNELS=0)"
        files: list[Path] = []
    else:
        folder, name = kernel_folder(), str(kernel_folder())
        files = [*folder.rglob("*.so"), *folder.rglob("*.cubin")]
    known = f"{name}: {len(files)} kernels, {sum(map(_size_of, files)) / 1e6:.1f} MB"
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(there, os.W_OK):
        remedy = "make it writable, or set XDG_CACHE_HOME to a folder that is"
        return Line("kernels", "warning", f"{there} cannot be written: kernels go to the temporary folder", remedy)
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        remedy = "set XDG_CACHE_HOME to a folder on another file system"
        return Line("kernels", "warning", f"{there} is mounted noexec: kernels there cannot be loaded", remedy)
    if own := os.environ.get("MLX_PTX_CACHE_DIR"):
        known += f"; those of CUDA in {own} (MLX_PTX_CACHE_DIR)"
    return Line("kernels", "ok", known)


def memory() -> tuple[float, float] | None:
    """Return bytes of memory: what is free for a process here, and what there is in all; None where unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    kilobytes = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    free, whole = 1024.0 * kilobytes["MemAvailable"], 1024.0 * kilobytes["MemTotal"]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = int((Path("/sys/fs/cgroup") / limit).read_text())
            taken = int((Path("/sys/fs/cgroup") / used).read_text())
        except (OSError, ValueError):  # another kind of control groups, or no limit ("max")
            continue
        if most < whole:
            free, whole = min(free, most - taken), most
    return free, whole


def age() -> float:
    """Return for how many seconds this process has been there; the seconds that it has computed where unknown."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return up - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()


def _memory() -> Iterator[Line]:
    if (known := memory()) is None:
        return
    free, whole = known
    text = f"{size(free)} free of {size(whole)}"
    if free < LEAST_MEMORY:
        yield Line("memory", "warning", text, "end other programs, or train with smaller batches")
    else:
        yield Line("memory", "ok", text)


def _disk() -> Iterator[Line]:
    places = {"here": Path.cwd(), "temporary": Path(tempfile.gettempdir())}
    free = {name: shutil.disk_usage(place).free for name, place in places.items()}
    text = ", ".join(f"{size(free[name])} free in {place}" for name, place in places.items())
    if min(free.values()) < LEAST_DISK:
        yield Line("disk", "warning", text, "free some, or let `run` be a folder elsewhere: checkpoints need room")
    else:
        yield Line("disk", "ok", text)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load() -> Line:
    busy, count = os.getloadavg()[0], cores()
    text = f"{busy:.1f} in the last minute on {count} cores"
    if busy > 1.5 * count:
        remedy = "end other programs, or set OPENBLAS_NUM_THREADS=1: threads that wait for each other cost most"
        return Line("load", "warning", text, remedy)
    return Line("load", "ok", text)
