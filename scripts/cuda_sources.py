"""Compile the package's CUDA kernels without a GPU: errors of NVRTC, registers and spills of each source.

The sources are those that the rules of ``rust/faststep/native/cuda`` make of the graphs in
``tests/support/programs/rules.cpp``. NVRTC and CUDA's headers come from PyPI (80 MB, kept in ``target/nvrtc``).

Usage: cuda_sources.py [--arch sm_80]...
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import mlx.core as mx

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "rust" / "faststep" / "native"
FOLDER = ROOT / "target" / "nvrtc"
PACKAGES = [f"nvidia-cuda-{name}==13.*" for name in ("nvrtc", "runtime", "crt", "cccl")]
# What sources use of a header that MLX has in its library.
UTILS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>
#define INFINITY __int_as_float(0x7f800000)
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
template <typename T, int N>
struct alignas(sizeof(T) * N) AlignedVector {
  T val[N];
  __device__ T& operator[](int i) { return val[i]; }
  __device__ T operator[](int i) const { return val[i]; }
};
template <int N, typename T>
inline __device__ AlignedVector<T, N> load_vector(const T* from, uint32_t offset) {
  return reinterpret_cast<const AlignedVector<T, N>*>(from)[offset];
}
template <int N, typename T>
inline __device__ void store_vector(T* to, uint32_t offset, const AlignedVector<T, N>& values) {
  reinterpret_cast<AlignedVector<T, N>*>(to)[offset] = values;
}
}
"""


def main() -> int:
    """Compile all; 1 where something fails."""
    parser = argparse.ArgumentParser(description="Compile the package's CUDA kernels without a GPU.")
    parser.add_argument("--arch", action="append", help="architectures (default: sm_80 and sm_90a)")
    archs = parser.parse_args().arch or ["sm_80", "sm_90a"]
    nvrtc, include = toolkit()
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        failed = 0
        for path in sorted(Path(folder).glob("*.cu")):
            for arch in archs:
                code, log = compiled(nvrtc, include, path.read_text(), arch)
                failed += code != 0
                said = re.findall(r".*error.*|Used \d+ registers|[1-9]\d* bytes spill stores", log)
                print(f"{path.stem:32} {arch:8} {'failed' if code else 'ok':8} {', '.join(said)}")
    print(f"{failed} failed")
    return int(failed > 0)


def toolkit() -> tuple[ctypes.CDLL, Path]:
    """Return NVRTC and the folder of CUDA's headers, got from PyPI the first time."""
    if not FOLDER.exists():
        with tempfile.TemporaryDirectory() as wheels:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, *PACKAGES]
            subprocess.run(command, check=True)
            for wheel in Path(wheels).glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(FOLDER)
    root = FOLDER / "nvidia" / "cu13"
    return ctypes.CDLL(str(next((root / "lib").glob("libnvrtc.so.*")))), root / "include"


def write_sources(folder: Path) -> None:
    """Run the program that writes each kernel's source there."""
    mlx, program = Path(mx.__file__).parent, folder / "rules"
    includes = [f"-I{NATIVE}", f"-I{NATIVE / 'cuda' / 'declared'}", "-isystem", f"{mlx / 'include'}"]
    library = [f"-L{mlx / 'lib'}", "-lmlx", f"-Wl,-rpath,{mlx / 'lib'}"]
    source = ROOT / "tests" / "support" / "programs" / "rules.cpp"
    subprocess.run(["g++", "-std=c++20", *includes, str(source), *library, "-o", str(program)], check=True)
    subprocess.run([str(program), str(folder)], check=True)


def compiled(nvrtc: ctypes.CDLL, include: Path, source: str, arch: str) -> tuple[int, str]:
    """Compile one source as MLX does; return NVRTC's result and what it said."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    header, name = (ctypes.c_char_p * 1)(UTILS.encode()), (ctypes.c_char_p * 1)(b"mlx/backend/cuda/device/utils.cuh")
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 1, header, name)
    options = [f"--gpu-architecture={arch}", "--device-as-default-execution-space", "--ptxas-options=-v"]
    options += [f"--include-path={include}", f"--include-path={include / 'cccl'}"]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    code = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log.value.decode()


if __name__ == "__main__":
    sys.exit(main())
