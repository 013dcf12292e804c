"""Build the wheel for macOS on Apple silicon from another system, and look at what its library asks for.

Usage: macos.py   (RUSTC and CARGO name the compiler and its cargo where those of PATH are not to be taken)

Nothing can be run here: that it compiles, links and finds its libraries by name is all that this shows. zig compiles
and links, with its own headers and list of macOS's symbols; all of it comes from PyPI and lies below target/macos. Rust
has to have the standard library for aarch64-apple-darwin, or its source (docs/building.md).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "target" / "macos"
TARGET = "aarch64-apple-darwin"
RUSTC, CARGO = (os.environ.get(name, name.lower()) for name in ("RUSTC", "CARGO"))
# what macOS itself has, and what MLX's wheel brings; Rust's standard library asks for libiconv
SYSTEM = {"/usr/lib/libSystem.B.dylib", "/usr/lib/libiconv.2.dylib"}
MLX = "@rpath/libmlx.dylib"
RUN_PATH = "@loader_path/../mlx/lib"

# zig's linker finds no libiconv of macOS: what it exports stands here, as Apple's SDK has it
ICONV = """--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '/usr/lib/libiconv.2.dylib'
exports:
  - targets: [ arm64-macos ]
    symbols: [ _iconv, _iconv_close, _iconv_open ]
...
"""
# the cc crate names target and version in words that zig takes otherwise
COMPILER = """#!/usr/bin/env bash
arguments=()
for argument in "$@"; do
  case $argument in
    --target=*|-mmacosx-version-min=*|-liconv) ;;
    *) arguments+=("$argument") ;;
  esac
done
exec '{python}' -m ziglang {tool} -target aarch64-macos.14.0 "${{arguments[@]}}" {iconv}
"""


def main() -> None:
    """Build the wheel and check its library."""
    WORK.mkdir(parents=True, exist_ok=True)
    python = environment()
    mlx = mlx_wheel(python)
    wheel = build(python, mlx)
    command = [str(python), __file__, "--check", str(wheel), str(mlx / "lib" / "libmlx.dylib")]
    run(command)


def environment() -> Path:
    """Return the python of an environment with zig, maturin and the build requirements that are no part of MLX."""
    python = WORK / "venv" / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(WORK / "venv")])
    wanted = run([sys.executable, str(ROOT / "scripts" / "requirements.py")], capture=True).splitlines()
    wanted = [line for line in wanted if not line.startswith(("mlx", "numpy"))]
    run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "ziglang", "lief", *wanted])
    return python


def mlx_wheel(python: Path) -> Path:
    """Return the ``mlx`` directory of MLX's wheels for macOS, unpacked."""
    pins = run([sys.executable, str(ROOT / "scripts" / "requirements.py")], capture=True)
    version = re.findall(r"^mlx==([\d.]+)$", pins, re.MULTILINE)[0]
    target = WORK / f"mlx-{version}"
    if not target.exists():
        options = ["--platform", "macosx_14_0_arm64", "--python-version", python_version(), "--only-binary=:all:"]
        names = [f"mlx=={version}", f"mlx-metal=={version}"]
        run([str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(WORK), *options, *names])
        for wheel in WORK.glob(f"mlx*-{version}-*.whl"):
            zipfile.ZipFile(wheel).extractall(target)
    return target / "mlx"


def python_version() -> str:
    """Return which Python the wheel is for: that of this one."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def script(name: str, text: str) -> str:
    """Write a program and return its path."""
    path = WORK / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def build_environment(python: Path, mlx: Path) -> dict[str, str]:
    """Return the variables of a build for macOS."""
    (WORK / "libiconv.tbd").write_text(ICONV)
    (WORK / "sdk").mkdir(exist_ok=True)
    iconv = f"'{WORK / 'libiconv.tbd'}'"
    compilers = {
        name: script(name, COMPILER.format(python=python, tool=tool, iconv=libraries))
        for name, tool, libraries in (("zcc", "cc", ""), ("zcxx", "c++", ""), ("zld", "cc", iconv))
    }
    archiver = script("zar", f"#!/usr/bin/env bash\nexec '{python}' -m ziglang ar \"$@\"\n")
    packages = run([str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture=True)
    headers = Path(packages.strip()) / "ziglang" / "lib"
    clang = [headers / "include", headers / "libc" / "include" / "any-darwin-any"]
    return {
        "CARGO": CARGO,
        "RUSTC": RUSTC,
        "CARGO_TARGET_DIR": str(WORK / "build"),
        "CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER": compilers["zld"],
        "CC_aarch64_apple_darwin": compilers["zcc"],
        "CXX_aarch64_apple_darwin": compilers["zcxx"],
        "AR_aarch64_apple_darwin": archiver,
        "BINDGEN_EXTRA_CLANG_ARGS": " ".join(f"-isystem {path}" for path in clang),
        "FASTSTEP_MLX": str(mlx),
        "LIBCLANG_PATH": str(Path(packages.strip()) / "clang" / "native"),
        "MACOSX_DEPLOYMENT_TARGET": "14.0",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",  # nanobind's sources are found by python3
        "SDKROOT": str(WORK / "sdk"),
    }


def build(python: Path, mlx: Path) -> Path:
    """Build the wheel and return it."""
    variables = build_environment(python, mlx)
    sysroot = Path(run([RUSTC, "--print", "sysroot"], capture=True).strip()) / "lib" / "rustlib"
    command = [str(python.parent / "maturin"), "build", "--release", "--locked", "--target", TARGET]
    command += ["--interpreter", f"python{python_version()}", "--out", str(WORK / "wheels")]
    if not (sysroot / TARGET).is_dir():
        if not (sysroot / "src" / "rust" / "library").is_dir():
            sys.exit(f"{RUSTC}: expected the standard library of {TARGET}, or its source, below {sysroot}")
        variables["RUSTC_BOOTSTRAP"] = "1"  # -Z on a stable compiler
        command += ["-Z", "build-std=std,panic_abort"]
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYO3_PYTHON", "VIRTUAL_ENV")}
    run(command, env=inherited | variables)
    for empty in (ROOT / "rust").glob("*/a.o"):  # left behind by zig
        empty.unlink()
    (wheel,) = (WORK / "wheels").glob("*.whl")
    return wheel


def check(wheel: Path, libmlx: Path) -> None:
    """Refuse a library that macOS could not load: run path, libraries, and each name that it imports."""
    import lief

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        library = lief.MachO.parse(list(archive.read(name))).at(0)
    mlx = lief.MachO.parse(str(libmlx)).at(0)
    exported = {symbol.name for symbol in mlx.exported_symbols}
    own = {symbol.name for symbol in library.symbols if symbol.raw_type & 0x0E == 0x0E}  # N_SECT: defined here
    asked: dict[str, set[str]] = {}
    for binding in library.bindings:
        symbol = binding.symbol.name
        # C++ looks for its templates in all libraries, and falls back on those that came with it
        anybody = "itself" if symbol in own else "the python that loads it"
        asked.setdefault(binding.library.name if binding.has_library else anybody, set()).add(symbol)
    missing = sorted(asked.get(MLX, set()) - exported)
    stray = [symbol for symbol in asked.get("the python that loads it", ()) if not symbol.startswith(("_Py", "__Py"))]
    paths = [path.path for path in library.rpaths]
    loads = (command for command in library.libraries if command.command == lief.MachO.LoadCommand.TYPE.LOAD_DYLIB)
    libraries = [command.name for command in loads]
    print(f"{wheel.name}: {name}, {library.header.cpu_type}, run path {paths}, libraries {libraries}")
    for source, symbols in asked.items():
        print(f"  {len(symbols)} names of {source}")
    problems = [
        paths != [RUN_PATH] and f"run path: expected [{RUN_PATH!r}], got {paths}",
        set(libraries) - SYSTEM != {MLX} and f"libraries: expected {MLX} beside macOS's own, got {libraries}",
        missing and f"not exported by {libmlx.name}: {missing}",
        stray and f"found in no library, and no names of Python's: {stray}",
    ]
    if found := [problem for problem in problems if problem]:
        sys.exit("\n".join(found))


def run(command: list[str], env: dict[str, str] | None = None, *, capture: bool = False) -> str:
    """Run a command, end with its exit status when it fails, and return what it printed if that was asked for."""
    stdout = subprocess.PIPE if capture else None
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=stdout, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}")
    return done.stdout or ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
