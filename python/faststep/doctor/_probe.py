"""A child process that loads MLX and the extension module, computes, and writes a line of JSON behind each stage.

It is run as a file, not as a part of the package: what it looks for is why the package cannot be imported. When it
dies or hangs, its last line tells how far it came.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any


def say(stage: str, **facts: Any) -> None:
    """Write the facts of a stage."""
    print(json.dumps({"stage": stage, **facts}), flush=True)


def main(only_speed: bool) -> None:
    """Go through the stages; the first that fails is the last."""
    stages = (load_mlx, load_faststep, speed) if only_speed else (load_mlx, load_faststep, speed, kernel, step)
    for stage in stages:
        say(stage.__name__)  # a crash is in this one
        try:
            stage()
        except BaseException as error:
            say(stage.__name__, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
            break


def load_mlx() -> None:
    """Import MLX, and compute on its device."""
    mx = importlib.import_module("mlx.core")
    device = mx.default_device()
    info = {key: value for key, value in mx.device_info(device).items() if isinstance(value, str | int | float)}
    total = (mx.arange(4) * 2).sum().item()
    kind = "cpu" if device == mx.cpu else "cuda" if mx.cuda.is_available() else "metal"
    say("load_mlx", version=mx.__version__, device=kind, info=info, computed=total == 12)


def load_faststep() -> None:
    """Import this package, with the warnings that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        faststep = importlib.import_module("faststep")
    say("load_faststep", version=faststep.__version__, warnings=[str(each.message) for each in caught])


def speed() -> None:
    """Measure a product of two float32 matrices, [1024, 1024] each."""
    mx = importlib.import_module("mlx.core")
    a = mx.random.normal((1024, 1024))
    mx.eval(a, a @ a)
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < 0.3 and len(seconds) < 50):
        start = time.perf_counter()
        mx.eval(a @ a)
        mx.synchronize()
        seconds.append(time.perf_counter() - start)
    say("speed", gigaflops=2 * 1024**3 / min(seconds) / 1e9, library=blas_library(), threads=blas_threads())


def blas_library() -> str | None:
    """Return the OpenBLAS that MLX computes with; NumPy has one of its own, for itself."""
    try:
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
            return next((line.split()[-1] for line in maps if "/scipy_openblas32/" in line), None)
    except OSError:
        return None


def blas_threads() -> int:
    """Return by how many threads a large product is shared: as many as cores, 16 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    return min(16, cores, int(asked) if asked.isdigit() and int(asked) else cores)


def kernel() -> None:
    """Compile a kernel, as `mx.compile` does for every fused part of a step."""
    mx, core = (importlib.import_module(name) for name in ("mlx.core", "faststep._core"))
    start = time.perf_counter()
    value = mx.compile(lambda x: mx.exp(x) * 2 + x)(mx.zeros((8,))).sum().item()
    seconds = time.perf_counter() - start
    say("kernel", seconds=seconds, right=value == 16, needs_compiler=core.kernels_need_compiler())


def step() -> None:
    """Take one step of a small model natively and in plain MLX, from equal weights, and compare the parameters."""
    mx, nn, optim = (importlib.import_module(name) for name in ("mlx.core", "mlx.nn", "mlx.optimizers"))
    fast_step, tree_flatten = (
        importlib.import_module("faststep").fast_step,
        importlib.import_module("mlx.utils").tree_flatten,
    )

    def new() -> Any:
        mx.random.seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), optim.AdamW(1e-2)

    def loss_fn(model: Any, x: Any) -> Any:
        return mx.square(model(x) - 1).mean()

    x, (native, fast), (plain, slow) = mx.random.normal((32, 8)), new(), new()
    fast_step(native, fast, loss_fn, x)
    _, gradients = nn.value_and_grad(plain, loss_fn)(plain, x)
    slow.update(plain, gradients)
    ours, theirs = dict(tree_flatten(native.parameters())), dict(tree_flatten(plain.parameters()))
    say("step", difference=max(mx.abs(ours[name] - theirs[name]).max().item() for name in theirs))


if __name__ == "__main__":
    main("--speed" in sys.argv)
