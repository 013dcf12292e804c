"""OpenBLAS in MLX: the same numbers, whichever is imported first, and only when it is wanted."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Child

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere MLX's own BLAS is fast")

ORDERS = {
    "mlx first": "import mlx.core as mx, faststep",
    "faststep first": "import faststep, mlx.core as mx",
    "mlx at work first": "import mlx.core as mx; mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8))); import faststep",
}

# What is computed does not depend on the sign or order of eigenvectors. 1024: large enough for OpenBLAS's own threads.
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
    """What MLX computes with its own BLAS; the package is not imported."""
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


@pytest.mark.parametrize("variable", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"])
def test_threads_follow_the_environment(child: Child, variable: str) -> None:
    code = """
        import ctypes, os, faststep, scipy_openblas32 as openblas
        library = ctypes.CDLL(os.path.join(openblas.get_lib_dir(), openblas.get_library(fullname=True)))
        print(library.scipy_openblas_get_num_threads())
    """
    environment = {"FASTSTEP_BLAS": "1", "OPENBLAS_NUM_THREADS": "", "OMP_NUM_THREADS": "", variable: "1"}
    assert child(code, **environment).stdout.split() == ["1"]


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
