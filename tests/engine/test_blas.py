"""OpenBLAS in MLX: the same numbers, whichever is imported first, and only when it is wanted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from support.places import Child

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere MLX's own BLAS is fast")
CPU = Path("/proc/cpuinfo")
FLAGS = set(CPU.read_text().split()) if CPU.exists() else set()  # of the processor

ORDERS = {
    "mlx first": "import mlx.core as mx, faststep",
    "faststep first": "import faststep, mlx.core as mx",
    "mlx at work first": "import mlx.core as mx; mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8))); import faststep",
}

# Values that do not depend on the sign or order of eigenvectors. 1024: large enough for OpenBLAS's own threads.
COMPUTE = """
import sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
a, b = (mx.random.normal((1024, 1024), key=mx.random.key(i)) for i in range(2))
m = a[:96, :96]
spd = m @ m.T + mx.eye(96)
u, s, vt = mx.linalg.svd(m)
w, v = mx.linalg.eigh(spd)
q, r = mx.linalg.qr(m)
mx.savez(sys.argv[1], product=a @ b, svd=(u * s) @ vt, singular=s, eigh=(v * w) @ v.T, eigenvalues=w,
    cholesky=mx.linalg.cholesky(spd), inverse=mx.linalg.inv(spd), qr=q @ r,
    halves=(a.astype(mx.bfloat16) @ b.astype(mx.bfloat16)).astype(mx.float32), complex=(m + 1j * m) @ (m - 2j * m))
"""


def compute(child: Child, path: Path, imports: str, **environment: str) -> dict[str, np.ndarray]:
    child(f"import sys; sys.argv = ['', {str(path)!r}]\n{imports}\n{COMPUTE}", **environment)
    with np.load(path) as results:
        return dict(results)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blas") / "own.npz"


@pytest.fixture
def reference(child: Child, own: Path) -> dict[str, np.ndarray]:
    """Results of MLX with its own BLAS; the package is not imported."""
    if not own.exists():
        compute(child, own, "")
    with np.load(own) as results:
        return dict(results)


@pytest.mark.parametrize("order", ORDERS)
def test_openblas_computes_the_same(child: Child, tmp_path: Path, reference: dict[str, np.ndarray], order: str) -> None:
    results = compute(child, tmp_path / "results.npz", ORDERS[order], FASTSTEP_BLAS="1")
    for name, expected in reference.items():
        assert np.abs(results[name] - expected).max() / np.abs(expected).max() < 1e-4, name
    # another order of summation shows that it was another library that computed
    assert not np.array_equal(results["product"], reference["product"])


def test_faststep_blas_0_leaves_mlx_as_it_is(child: Child, tmp_path: Path, reference: dict[str, np.ndarray]) -> None:
    results = compute(child, tmp_path / "results.npz", "import faststep", FASTSTEP_BLAS="0")
    for name, expected in reference.items():
        np.testing.assert_array_equal(results[name], expected, err_msg=name)


# Products with many rows, of every kind that MLX has: rows that are cut anywhere, transposed factors, sums.
PRODUCTS = """
import sys
import mlx.core as mx, faststep
mx.set_default_device(mx.cpu)
def normal(*shape, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)
products = {}
for m, n, k in (192, 300, 500), (289, 100, 700), (517, 129, 331), (1000, 77, 1030):
    a, b, c = normal(m, k), normal(k, n), normal(m, n)
    products |= {f"{m} plain": a @ b, f"{m} turned": normal(k, m).T @ normal(n, k).T, f"{m} sum": mx.addmm(c, a, b)}
    products[f"{m} complex"] = (a + 2j * a) @ (b - 1j * b)
    products[f"{m} float64"] = a.astype(mx.float64) @ b.astype(mx.float64)
    products[f"{m} batch"] = mx.stack([a, 2 * a]) @ b
products["32 few"] = normal(32, 700) @ normal(700, 1500)
mx.savez(sys.argv[1], **products)
"""
THREADS = "{path.read_text() for path in pathlib.Path('/proc/self/task').glob('*/comm')}"


def products(child: Child, path: Path, **environment: str) -> tuple[dict[str, np.ndarray], bool]:
    """Compute them; also whether threads of ours took part."""
    helped = f"import pathlib; print('faststep-blas\\n' in {THREADS})"
    code = f"import sys; sys.argv = ['', {str(path)!r}]\n{PRODUCTS}\n{helped}"
    done = child(code, FASTSTEP_BLAS="1", OMP_NUM_THREADS="", **environment)
    with np.load(path) as results:
        return dict(results), done.stdout.strip() == "True"


def test_products_by_several_threads_have_the_bits_of_those_by_one(child: Child, tmp_path: Path) -> None:
    shared, helped = products(child, tmp_path / "shared.npz", OPENBLAS_NUM_THREADS="")
    alone, _ = products(child, tmp_path / "alone.npz", OPENBLAS_NUM_THREADS="1")
    assert helped == (len(os.sched_getaffinity(0)) > 1)
    for name, expected in alone.items():
        if name == "32 few":  # cut between columns
            np.testing.assert_allclose(shared[name], expected, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_array_equal(shared[name], expected, err_msg=name)


# Each product of float32, and the difference from OpenBLAS's own in bits.
FEW_ROWS = """
import ctypes, os, numpy as np, scipy_openblas32 as openblas
import mlx.core as mx, faststep
mx.set_default_device(mx.cpu)
sgemm = ctypes.CDLL(os.path.join(openblas.get_lib_dir(), openblas.get_library(fullname=True))).scipy_cblas_sgemm
number, pointer = ctypes.c_float, lambda a: a.ctypes.data_as(ctypes.c_void_p)
def product(a, b, c):  # a and b by rows or by columns
    c = c.copy()
    ways = [111 if x.flags.c_contiguous else 112 for x in (a, b)]
    widths = [max(x.strides) // 4 for x in (a, b)]
    (m, k), n = a.shape, b.shape[1]
    sgemm(101, *ways, m, n, k, number(1), pointer(a), widths[0], pointer(b), widths[1], number(1), pointer(c), n)
    return c
rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
few = [(2, 1000, 600), (7, 333, 1100), (16, 1024, 256), (16, 256, 1024), (64, 47, 500), (128, 100, 3000)]
for m, n, k in [*few, (129, 96, 96), (3, 31, 40000)]:
    for a in normal(m, k), normal(k, m).T:
        for b in normal(k, n), normal(n, k).T:
            for c in np.zeros((m, n), np.float32), normal(m, n):
                x, y = (mx.array(v) if v.flags.c_contiguous else mx.array(v.T).T for v in (a, b))
                ours = mx.addmm(mx.array(c), x, y) if c.any() else x @ y
                assert np.array(ours).tobytes() == product(a, b, c).tobytes(), (m, n, k, a.strides, b.strides, c.any())
"""


@pytest.mark.skipif("avx512f" not in FLAGS, reason="needs AVX-512, or all are OpenBLAS's")
@pytest.mark.parametrize("threads", ["1", ""])
def test_products_of_few_rows_have_the_bits_of_openblas(child: Child, threads: str) -> None:
    child(FEW_ROWS, FASTSTEP_BLAS="1", OPENBLAS_CORETYPE="SKYLAKEX", OPENBLAS_NUM_THREADS=threads, OMP_NUM_THREADS="")


# Small products of float32, whose transposes have the same bits, and those of few rows: near to float64.
SMALL = """
import itertools, numpy as np, mlx.core as mx, faststep
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
laid = lambda a, turned: mx.array(np.ascontiguousarray(a.T)).T if turned else mx.array(a)
bits = lambda a: np.array(a).tobytes()
shapes = list(itertools.product((2, 6, 7, 8, 13, 16, 17), (2, 8, 9, 16, 17, 25, 64, 101), (1, 7, 8, 33, 600)))
for m, n, k in [*shapes, (64, 128, 128), (3, 300, 1024), (16, 3000, 600), (33, 200, 1000), (64, 768, 768)]:
    a, b, c = normal(m, k), normal(k, n), normal(m, n)
    exact, limit = a.astype(float) @ b, np.abs(a).astype(float) @ np.abs(b) * (k + 1) * 2.0**-24
    for ways in itertools.product((False, True), repeat=2):
        x, y = laid(a, ways[0]), laid(b, ways[1])
        product = x @ y
        assert (np.abs(np.array(product) - exact) <= limit).all(), (m, n, k, ways)
        is_small = m * n * k <= 2**20
        assert not is_small or bits((y.T @ x.T).T) == bits(product), (m, n, k, ways)
        if is_small or ways[1]:
            assert bits(mx.addmm(mx.array(c), x, y)) == (c + np.array(product)).tobytes(), (m, n, k, ways)
"""


NEEDS_SMALL = pytest.mark.skipif(
    "avx512f" in FLAGS or not {"avx2", "fma"} <= FLAGS, reason="OpenBLAS computes them on this processor"
)


@NEEDS_SMALL
def test_small_products_have_the_bits_of_their_transposes(child: Child) -> None:
    child(SMALL, FASTSTEP_BLAS="1")


# The products of a step with two layers of one shape, whose gradients go into one buffer.
BRANCHES = """
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, faststep
model = nn.Module()
model.one, model.other = (nn.Linear(64, 96) for _ in range(2))
loss_fn = lambda model, x: mx.square(mx.tanh(model.one(x)) * mx.tanh(model.other(x))).mean()
step = faststep.Step(model, optim.Adam(1e-3), loss_fn)
x = mx.random.normal((16, 64))
step(x)
with faststep.profile(step) as found:
    step(x)
found.measure(x)
print([each.output for each in found.operations if each.name == "Matmul"])
"""


@NEEDS_SMALL
def test_no_gradient_of_small_layers_is_computed_as_its_transpose(child: Child) -> None:
    assert child(BRANCHES, FASTSTEP_BLAS="1").stdout == "['float32 (96,64)', 'float32 (96,64)']\n"


# Weights after the steps of a captured MLP, of some of whose products half is given to a thread that waits.
HALVES = """
import sys, numpy as np, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, faststep
mx.random.seed(0)
model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
step = faststep.Step(model, optim.Adam(1e-3), lambda model, x: mx.square(model(x) - 1).mean(), replay=True)
x = mx.random.normal((64, 128))
for _ in range(300):
    step(x)
sys.stdout.write(np.concatenate([np.array(each.weight) for each in model.layers]).tobytes().hex())
"""


def test_halves_of_small_products_have_the_bits_of_the_whole(child: Child) -> None:
    one, several = (child(HALVES, OPENBLAS_NUM_THREADS=threads, OMP_NUM_THREADS="").stdout for threads in ("1", ""))
    assert one == several


@pytest.mark.parametrize("variable", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"])
def test_threads_follow_the_environment(child: Child, variable: str) -> None:
    code = f"""
        import pathlib, mlx.core as mx, faststep
        mx.eval(mx.ones((1024, 1024)) @ mx.ones((1024, 1024)))
        print(any(name == "faststep-blas\\n" for name in {THREADS}))
    """
    environment = {"FASTSTEP_BLAS": "1", "OPENBLAS_NUM_THREADS": "", "OMP_NUM_THREADS": "", variable: "1"}
    assert child(code, **environment).stdout.split() == ["False"]


def test_openblas_itself_computes_by_one_thread(child: Child) -> None:
    code = """
        import ctypes, os, faststep, scipy_openblas32 as openblas
        library = ctypes.CDLL(os.path.join(openblas.get_lib_dir(), openblas.get_library(fullname=True)))
        print(library.scipy_openblas_get_num_threads())
    """
    assert child(code, FASTSTEP_BLAS="1", OPENBLAS_NUM_THREADS="").stdout.split() == ["1"]


def test_the_child_of_a_fork_multiplies(child: Child) -> None:
    code = """
        import os, mlx.core as mx, faststep
        mx.set_default_device(mx.cpu)
        a = mx.ones((1024, 1024))
        mx.eval(a @ a)
        pid = os.fork()
        if pid == 0:
            with mx.stream(mx.new_stream(mx.cpu)):  # the parent's thread is not there
                product = a @ a
                mx.eval(product)
                os._exit(int(product[3, 5].item() != 1024))
        print(os.waitpid(pid, 0)[1])
    """
    assert child(code, FASTSTEP_BLAS="1").stdout.split() == ["0"]


MISSING = """
import sys, warnings
sys.modules["scipy_openblas32"] = None  # as if it were not installed
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import faststep
    import mlx.core as mx
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
for warning in caught:
    print(warning.category.__name__, warning.message)
"""


def test_without_openblas_one_warning_says_what_to_do(child: Child) -> None:
    (line,) = child(MISSING, FASTSTEP_BLAS="1").stdout.splitlines()
    assert line.startswith("RuntimeWarning MLX computes on the CPU with its own BLAS")
    assert 'pip install "mlx-faststep[cpu]"' in line


def test_without_openblas_and_not_wanted_there_is_no_warning(child: Child) -> None:
    assert child(MISSING, FASTSTEP_BLAS="0").stdout == ""


def test_a_library_that_cannot_be_loaded_is_a_warning(child: Child) -> None:
    code = """
        import types, sys, warnings
        from importlib.machinery import ModuleSpec
        broken = types.ModuleType("scipy_openblas32")
        broken.__spec__ = ModuleSpec("scipy_openblas32", None)
        broken.get_lib_dir = lambda: "/nowhere"
        broken.get_library = lambda fullname: "libscipy_openblas.so"
        sys.modules["scipy_openblas32"] = broken
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import faststep
        (warning,) = caught
        print(warning.message)
    """
    assert "/nowhere/libscipy_openblas.so" in child(code, FASTSTEP_BLAS="1").stdout
