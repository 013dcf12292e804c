"""The CUDA kernels of attention in tiles, their source run on the CPU, beside attention in float64."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "rust" / "faststep" / "native" / "cuda" / "rules" / "attention_tiles.hpp"
EMULATOR = ROOT / "tests" / "support" / "cuda_on_cpu.hpp"
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

INPUTS = ("queries", "keys", "values", "out", "cotangent")  # by their strides
RESULTS = ("normalizers", "dots", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """Sizes of an attention, and how its kernels compute."""

    length: int
    width: int
    causal: bool = True
    exact: bool = False
    batch: int = 1
    heads: int = 2
    gap: int = 0  # elements between two positions of the queries: rows that do not begin at 16 bytes


CASES = {
    "one tile": Case(64, 64),
    "odd length": Case(77, 32),
    "several tiles": Case(200, 16),
    "no mask": Case(131, 24, causal=False),
    "exact": Case(90, 40, exact=True, batch=2),
    "exact, no mask": Case(45, 64, exact=True, causal=False),
    "rows anywhere": Case(70, 8, gap=3),
}


def kernels(folder: Path, case: Case, scale: float) -> ctypes.CDLL:
    """Compile the kernels' source for a CPU."""
    parts = dict(re.findall(r'(\w+)_source = R"\(\n(.*?)\n\)";', SOURCE.read_text(), re.DOTALL))
    assert set(parts) == {"tensor_cores", "tiles", "tiles_forward", "tiles_queries", "tiles_keys"}
    code = f"""
#include "{EMULATOR}"
constexpr int WIDTH = {case.width};
constexpr bool CAUSAL = {int(case.causal)}, EXACT = {int(case.exact)};
constexpr float scale = {scale!r}f;
extern "C" {{
Shape queries_shape = {{{case.batch}, {case.heads}, {case.length}, {case.width}}};
float {", ".join("*" + name for name in (*INPUTS, *RESULTS))};
Strides {", ".join(name + "_strides" for name in INPUTS)};
"""
    for name in ("forward", "queries", "keys"):
        code += f"""
void run_{name}(int blocks, int tiles) {{
  on_cpu::run({{blocks, tiles, 1}}, 128, [] {{
{parts["tiles"]}
{parts["tiles_" + name]}
  }});
}}
"""
    (folder / "kernels.cpp").write_text(code + "}\n")
    command = [str(COMPILER), "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-Wno-narrowing"]
    subprocess.run([*command, "-o", str(folder / "kernels.so"), str(folder / "kernels.cpp")], check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


def attention(case: Case, scale: float, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return output and gradients, of arrays [batch, heads, positions, width] in float64."""
    q, k, v, g = inputs
    scores = scale * q @ k.swapaxes(-1, -2)
    if case.causal:
        scores = np.where(np.tri(case.length, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = g @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    return p @ v, scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_are_those_of_float64(case: Case, tmp_path: Path) -> None:
    scale = case.width**-0.5
    native = kernels(tmp_path, case, scale)
    rng = np.random.default_rng(7)
    shape = (case.batch, case.length, case.heads, case.width)  # as projections lie
    rows = (case.batch * case.heads, case.length)
    held = {name: np.full(shape, np.nan, np.float32) for name in ("out", "dq", "dk", "dv")}
    held |= {name: np.full(rows, np.nan, np.float32) for name in ("normalizers", "dots")}
    for name in ("queries", "keys", "values", "cotangent"):
        wide = (*shape[:3], case.width + (case.gap if name == "queries" else 0))
        held[name] = rng.standard_normal(wide, dtype=np.float32)[..., : case.width]
    for name, array in held.items():
        ctypes.c_void_p.in_dll(native, name).value = array.ctypes.data
        if name in INPUTS:
            strides = (ctypes.c_int64 * 8).in_dll(native, f"{name}_strides")
            strides[:4] = [each // 4 for each in array.transpose(0, 2, 1, 3).strides]
    for name in ("forward", "queries", "keys"):
        getattr(native, f"run_{name}")(case.batch * case.heads, -(-case.length // 64))
    moved = {name: held[name].transpose(0, 2, 1, 3).astype(np.float64) for name in held if held[name].ndim == 4}
    wanted = attention(case, scale, *(moved[name] for name in ("queries", "keys", "values", "cotangent")))
    near = 2e-6 if case.exact else 2e-3
    for name, value in zip(("out", "dq", "dk", "dv"), wanted, strict=True):
        error = np.abs(moved[name] - value).max() / np.abs(value).max()
        assert error < near, name
