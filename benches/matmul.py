"""Measure a matmul on the CPU with OpenBLAS, as ``faststep`` binds it, and with the BLAS of MLX's wheel.

``python benches/matmul.py`` takes seconds.
"""

from __future__ import annotations

import json
import statistics
import time

import mlx.core as mx
import numpy as np
from samples import Sample, answer, arguments, on_gpu, use_device

SETTINGS = {"with `faststep` imported": "1", "with `FASTSTEP_BLAS=0`": "0"}


def matmul(size: int) -> dict[str, float]:
    """Time a float32 product on the CPU, in milliseconds, and compare it with float64."""
    import faststep  # noqa: F401  it binds the BLAS

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    x, y = mx.array(a), mx.array(b)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        product = x @ y
        mx.eval(product)
        times.append(1e3 * (time.perf_counter() - start))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.abs(np.array(product) - exact).max() / np.abs(exact).max()
    return {"ms": statistics.median(times[1:]), "error": float(error)}


def main() -> None:
    """Measure each setting in a process of its own."""
    args = arguments("Measure a matmul with each BLAS.", ["1024"]).parse_args()
    use_device(args.device)
    if on_gpu():
        print("matmul: nothing to measure on a GPU, which has no BLAS of ours")
    elif args.alone:
        print(json.dumps(matmul(int(args.alone[0]))))
    else:
        sample = Sample("matmul", args)
        for size in args.cases or ["1024"]:
            sample.add(size, {name: answer(size, FASTSTEP_BLAS=value) for name, value in SETTINGS.items()})
        print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
