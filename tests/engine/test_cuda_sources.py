"""What CUDA's rules do, without a GPU: kernels' sources run on the CPU beside float64, and rewritten graphs."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.places import ROOT, TESTS

NATIVE = ROOT / "rust" / "faststep" / "native"
RULES = NATIVE / "cuda" / "rules"
EMULATOR = TESTS / "support" / "cuda_on_cpu.hpp"
MLX = Path(mx.__file__).parent
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Kernel:
    """A kernel: its source, constants that it sees, how it is launched."""

    source: str
    constants: str
    blocks: tuple[int, int]
    threads: tuple[int, int]


def compiled(folder: Path, arrays: Arrays, **kernels: Kernel) -> ctypes.CDLL:
    """Compile kernels for the CPU; each is a function that runs over these float32 arrays, which it sees by name."""
    code = [f'#include "{EMULATOR}"', 'extern "C" {']
    code += [f"float *{name}; Shape {name}_shape; Strides {name}_strides;" for name in arrays]
    for name, kernel in kernels.items():
        grid, block = (f"{{{x}, {y}, 1}}" for x, y in (kernel.blocks, kernel.threads))
        code += [f"void run_{name}() {{ on_cpu::run({grid}, {block}, [] {{", kernel.constants, kernel.source, "}); }"]
    path = folder / "kernels.cpp"
    path.write_text("\n".join([*code, "}"]))
    command = [str(COMPILER), "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-Wno-narrowing"]
    subprocess.run([*command, "-o", str(path.with_suffix(".so")), str(path)], check=True)
    native = ctypes.CDLL(str(path.with_suffix(".so")))
    for name, array in arrays.items():
        ctypes.c_void_p.in_dll(native, name).value = array.ctypes.data
        (ctypes.c_int32 * 8).in_dll(native, f"{name}_shape")[: array.ndim] = list(array.shape)
        strides = [each // array.itemsize for each in array.strides]
        (ctypes.c_int64 * 8).in_dll(native, f"{name}_strides")[: array.ndim] = strides
    return native


def sources(file: str) -> dict[str, str]:
    """Return the kernels' sources in a file, and the pieces that files share, by name."""
    text = (RULES / "pieces.hpp").read_text() + (RULES / file).read_text()
    return dict(re.findall(r'(\w+)_source = R"\((\n.*?\n)\)";', text, re.DOTALL))


def empty(*shape: int) -> np.ndarray:
    """Return an array of what no kernel writes."""
    return np.full(shape, np.nan, np.float32)


def drawn(*shape: int, seed: int = 7) -> np.ndarray:
    """Return normally distributed numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def off(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest error, in units of the largest value."""
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@dataclass(frozen=True)
class Attention:
    """Sizes of an attention, and how its kernels compute."""

    length: int
    width: int
    causal: bool = True
    exact: bool = False
    batch: int = 1
    heads: int = 2
    gap: int = 0  # elements between two positions of the queries: rows that do not begin at 16 bytes


ATTENTIONS = {
    "one tile": Attention(64, 64),
    "odd length": Attention(77, 32),
    "several tiles": Attention(200, 16),
    "no mask": Attention(131, 24, causal=False),
    "exact": Attention(90, 40, exact=True, batch=2),
    "exact, no mask": Attention(45, 64, exact=True, causal=False),
    "exact, many": Attention(330, 8, exact=True, causal=False, heads=1),
    "rows anywhere": Attention(70, 8, gap=3),
}


def attention(case: Attention, scale: float, *inputs: np.ndarray) -> tuple[np.ndarray, ...]:
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


@pytest.mark.parametrize("case", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_in_tiles(case: Attention, tmp_path: Path) -> None:
    scale = case.width**-0.5
    shape = (case.batch, case.length, case.heads, case.width)  # as projections lie
    queries = drawn(*shape[:3], case.width + case.gap)[..., : case.width]
    others = {name: drawn(*shape, seed=i) for i, name in enumerate(("keys", "values", "cotangent"))}
    rows = (case.batch * case.heads, case.length)
    held = {"queries": queries, **others, "normalizers": empty(*rows), "dots": empty(*rows)}
    held |= {name: empty(*shape) for name in ("out", "dq", "dk", "dv")}
    by_heads = {name: array.transpose(0, 2, 1, 3) if array.ndim == 4 else array for name, array in held.items()}
    constants = f"constexpr int WIDTH = {case.width}; constexpr float scale = {scale!r}f;"
    constants += f"constexpr bool CAUSAL = {int(case.causal)}, EXACT = {int(case.exact)};"
    parts = sources("attention_tiles.hpp")
    blocks = case.batch * case.heads, -(-case.length // 64)
    kernels = {
        name: Kernel(parts["tiles"] + parts[f"tiles_{name}"], constants, blocks, (128, 1))
        for name in ("forward", "queries", "keys")
    }
    native = compiled(tmp_path, by_heads, **kernels)
    native.run_forward(), native.run_queries(), native.run_keys()
    exact = {name: array.astype(np.float64) for name, array in by_heads.items()}
    wanted = attention(case, scale, *(exact[name] for name in ("queries", "keys", "values", "cotangent")))
    for name, value in zip(("out", "dq", "dk", "dv"), wanted, strict=True):
        assert off(by_heads[name], value) < (1e-6 if case.exact else 2e-3), name


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("shape", [(1, 320), (11, 384), (9, 772)], ids=["one row", "rows left over", "odd threads"])
def test_layer_norm_and_its_gradients(shape: tuple[int, int], added: bool, tmp_path: Path) -> None:
    rows, columns = shape
    eps, parts = 1e-5, 2
    x, g, before = (drawn(*shape, seed=i) for i in range(3))
    x += 3  # a mean
    w, b = drawn(columns, seed=3), drawn(columns, seed=4)
    normed, gx, sums, stats = empty(*shape), empty(*shape), empty(parts, 2, columns), empty(rows, 2)
    arrays = {"x": x, "w": w, "b": b, "normed": normed, "g": g, "added_to": before, "gx": gx, "sums": sums}
    arrays["rows"] = stats
    source = sources("layer_norm.cpp")
    opening = source["row"] + source["warp_sum"]
    constants = f"using T = float; constexpr int COLUMNS = {columns}, WIDE = 4, WARPS = 8;"
    constants += f"constexpr float eps = {eps!r}f; constexpr bool ADDS = {int(added)};"
    native = compiled(
        tmp_path,
        arrays,
        forward=Kernel(opening + source["norm"], constants, (-(-rows // 8), 1), (32, 8)),
        backward_rows=Kernel(opening + source["norm_gradient"], constants, (-(-rows // 4), 1), (32, 4)),
        backward_sums=Kernel(source["norm_sums"], constants, (-(-columns // 128), parts), (32, 8)),
        backward_few=Kernel(source["warp_sum"] + source["norm_few_gradients"], constants, (parts, 1), (32, 8)),
    )
    exact = x.astype(np.float64)
    centered = exact - exact.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
    hat, wg = centered * inverse, w * g.astype(np.float64)
    wanted = inverse * (wg - wg.mean(-1, keepdims=True) - hat * (wg * hat).mean(-1, keepdims=True)) + before * added
    native.run_forward()
    assert off(normed, hat * w + b) < 1e-6
    for kernels in ((native.run_backward_rows, native.run_backward_sums), (native.run_backward_few,)):
        gx[:], sums[:] = np.nan, np.nan
        for kernel in kernels:
            kernel()
        assert off(gx, wanted) < 1e-6
        assert off(sums.astype(np.float64).sum(0), np.stack([(g * hat).sum(0), g.astype(np.float64).sum(0)])) < 1e-6


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)], ids=["as they lie", "left", "right"])
@pytest.mark.parametrize("shape", [(16, 64, 64), (10, 300, 21)], ids=["whole", "left over"])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "added"])
def test_small_products(shape: tuple[int, int, int], turned: tuple[bool, bool], adds: bool, tmp_path: Path) -> None:
    rows, depth, columns = shape
    a = drawn(depth, rows).T if turned[0] else drawn(rows, depth)
    b = drawn(columns, depth).T if turned[1] else drawn(depth, columns, seed=1)
    row, out = drawn(columns, seed=2), empty(rows, columns)
    constants = f"constexpr int DEPTH = {min(-(-depth // 16) * 16, 256)}; constexpr bool ADDS = {int(adds)};"
    kernel = Kernel(sources("small.cpp")["small"], constants, (-(-columns // 16), -(-rows // 16)), (256, 1))
    compiled(tmp_path, {"a": a, "b": b, "row": row, "out": out}, product=kernel).run_product()
    assert off(out, a.astype(np.float64) @ b + adds * row) < 1e-6


def test_the_gradient_of_relu_and_of_the_bias_before_it(tmp_path: Path) -> None:
    y, g, gx, out = np.maximum(drawn(70, 200), 0), drawn(70, 200, seed=1), empty(70, 200), empty(3, 200)
    y[3, 5], y[4, 6] = np.nan, -0.0
    constants = "using T = float; constexpr int WIDE = 4, WARPS = 8;"
    source = sources("relu.cpp")
    kernel = Kernel(source["relu_vjp"] + source["column_sums"], constants, (2, len(out)), (32, 8))
    compiled(tmp_path, {"y": y, "g": g, "gx": gx, "out": out}, vjp=kernel).run_vjp()
    assert np.array_equal(gx, g * (y > 0))
    assert off(out.astype(np.float64).sum(0), gx.astype(np.float64).sum(0)) < 1e-6


@pytest.mark.parametrize("wide", [1, 4])
def test_sums_of_columns(wide: int, tmp_path: Path) -> None:
    x, out = drawn(3, 31, 200), empty(3, 200)
    constants = f"using IN = float; using OUT = float; constexpr int WIDE = {wide}, WARPS = 8;"
    constants += "constexpr int x_ndim = 3;"
    blocks = -(-200 // (32 * wide)), len(out)
    source = sources("columns.cpp")
    kernel = Kernel(source["sums"] + source["column_sums"], constants, blocks, (32, 8))
    compiled(tmp_path, {"x": x, "out": out}, sum=kernel).run_sum()
    assert off(out.astype(np.float64).sum(0), x.astype(np.float64).sum((0, 1))) < 1e-6


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="needs MLX's CPU, whose operations stand in for kernels")
def test_a_rewritten_graph_gives_what_it_gave(tmp_path: Path) -> None:
    program = tmp_path / "rules"
    folders = [f"-I{NATIVE}", f"-I{NATIVE / 'cuda' / 'declared'}", "-isystem", str(MLX / "include")]
    library = [f"-L{MLX / 'lib'}", "-lmlx", f"-Wl,-rpath,{MLX / 'lib'}"]
    source = TESTS / "support" / "programs" / "rules.cpp"
    subprocess.run([str(COMPILER), "-std=c++20", *folders, str(source), *library, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
