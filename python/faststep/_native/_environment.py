"""Requirements of the environment, checked before anything native is loaded; OpenBLAS and kernels for MLX's CPU.

Python's standard library only: this runs before MLX and the extension module are imported, because a module built
against another MLX would crash instead of telling why.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from importlib import metadata, util
from pathlib import Path
from types import ModuleType

_NAME = "mlx-faststep"
# MLX's wheels that bring libmlx on Linux, and our extra that installs each
_BACK_ENDS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}


def version() -> str:
    """Return the version of this package: that of the Cargo workspace, which the build writes into the metadata.

    Raises:
        ImportError: The package is not installed, only its source is on the path.
    """
    try:
        return metadata.version(_NAME)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{_NAME} is not installed: `pip install .` or `make dev` in its checkout") from None


def check() -> None:
    """Refuse an environment whose MLX is not the one that the extension module was built against.

    Raises:
        ImportError: MLX, or its back end, has another version or is missing. The message has the command that mends it.
    """
    wanted = _pinned_mlx()
    installed = {name: found for name in ("mlx", *_BACK_ENDS) if (found := _installed(name))}
    wrong = {name: found for name, found in installed.items() if found != wanted}
    if "mlx" not in installed or wrong:
        has = " and ".join(f"{name} {found}" for name, found in wrong.items()) or "none"
        pins = " ".join(f'"{name}=={wanted}"' for name in installed | {"mlx": wanted})
        raise ImportError(
            f"{_NAME} {version()} is built against MLX {wanted} and works with no other; "
            f"this environment has {has}. To mend it: pip install {pins}"
        )
    if sys.platform.startswith("linux") and not _has_libmlx():
        extras = ", ".join(f'pip install "{_NAME}[{extra}]"' for extra in _BACK_ENDS.values())
        raise ImportError(f"MLX has no back end in this environment (no libmlx.so). Install one of them: {extras}")


def bind_blas() -> None:
    """Make MLX's CPU use OpenBLAS, when the package `scipy-openblas32` is there: about 50 times faster products.

    `FASTSTEP_BLAS=0` in the environment leaves MLX as it is. Without the package, or when it cannot be loaded, MLX
    keeps its own BLAS and one warning says what to do.
    """
    if not sys.platform.startswith("linux") or os.environ.get("FASTSTEP_BLAS") == "0":
        return
    if util.find_spec("scipy_openblas32") is None:
        if [name for name in _BACK_ENDS if _installed(name)] == ["mlx-cpu"]:
            _warn(f'scipy-openblas32 is not installed: pip install "{_NAME}[cpu]"')
        return
    openblas = importlib.import_module("scipy_openblas32")
    try:
        _core().bind_blas(Path(openblas.get_lib_dir(), openblas.get_library(fullname=True)))
    except (OSError, RuntimeError) as error:
        _warn(str(error))


def bind_kernels() -> None:
    """Make MLX compile the fused kernels of the CPU for this machine's processor, at the same numbers.

    They are kept in the user's cache directory, apart from MLX's own, and so are the kernels of a GPU, which are
    compiled several at a time. `FASTSTEP_KERNELS=0` in the environment leaves MLX as it is.
    """
    if not sys.platform.startswith("linux") or os.environ.get("FASTSTEP_KERNELS") == "0":
        return
    try:
        _core().bind_kernels()
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"MLX compiles its kernels without this processor's vectors: {error} "
            "(FASTSTEP_KERNELS=0 leaves MLX as it is, without this warning)",
            RuntimeWarning,
            stacklevel=3,
        )


def _core() -> ModuleType:
    try:
        importlib.import_module("mlx.core")  # first: it brings the libmlx that the extension module is linked with
    except ImportError as error:
        raise ImportError(f"MLX cannot be loaded: {error}; `faststep doctor` says what to do") from error
    return importlib.import_module("faststep._core")


def _warn(reason: str) -> None:
    warnings.warn(
        f"MLX computes on the CPU with its own BLAS, many times slower than OpenBLAS: {reason} "
        "(FASTSTEP_BLAS=0 leaves MLX as it is, without this warning)",
        RuntimeWarning,
        stacklevel=4,
    )


def _pinned_mlx() -> str:
    """Return the version in our own metadata, the only place that has it at run time."""
    for requirement in metadata.requires(_NAME) or ():
        if pin := re.match(r"mlx\s*\(?==\s*([^\s;,)]+)", requirement):
            return pin[1]
    raise ImportError(f"the metadata of {_NAME} pins no version of mlx: install it again")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _has_libmlx() -> bool:
    spec = util.find_spec("mlx")
    locations = spec.submodule_search_locations if spec else None
    return any(Path(location, "lib", "libmlx.so").is_file() for location in locations or ())
