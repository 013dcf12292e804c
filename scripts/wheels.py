"""Build one wheel for each Python from 3.10 on that is found on PATH, into dist, and list those that are missing.

Usage: wheels.py [PYTHON...]   (without names: python3.10 to python3.14)

The wheels hold no libmlx and no path of this machine, and their libraries no symbols: those lie in
target/wheels/symbols (docs/building.md). For the interpreter of .venv nothing is compiled that `make build` has
compiled; each other one gets its own environment below target/wheels with the build requirements of pyproject.toml.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "target" / "wheels"
DIST = ROOT / "dist"
VENV = ROOT / ".venv"
SYMBOLS = WORK / "symbols"
NAMES = [f"python3.{minor}" for minor in range(10, 15)]
GLIBC = 35  # 2.35, as the wheels of MLX: what is built where glibc is newer may need a newer one, and its tag says so
LARGEST = 6_000_000  # bytes of a stripped library; one with its symbols has 25 million


def main(names: list[str]) -> None:
    """Build what can be built and print one line for each interpreter."""
    missing = []
    built = []
    for name in names:
        if reason := why_missing(name):
            missing.append(f"{name}: {reason}")
        else:
            built.append(build(name))
    for wheel in built:
        check(wheel)
        newer = "manylinux" in wheel.name and f"manylinux_2_{GLIBC}" not in wheel.name
        print(f"built    {wheel.relative_to(ROOT)}{', for no release: build that where glibc is older' * newer}")
    for line in missing:
        print(f"missing  {line}")
    if not built:
        sys.exit("no wheel was built")


def why_missing(name: str) -> str | None:
    """Return why that interpreter cannot build a wheel: version managers leave commands with nothing behind them."""
    if shutil.which(name) is None:
        return "not on PATH"
    code = "import ensurepip, os, sysconfig; print(os.path.exists(sysconfig.get_paths()['include'] + '/Python.h'))"
    found = subprocess.run([name, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        return "on PATH, but it does not start or has no ensurepip"
    return None if found.stdout.strip() == "True" else "its headers are not installed"


def build(name: str) -> Path:
    """Build the wheel of one interpreter and return it."""
    WORK.mkdir(parents=True, exist_ok=True)
    environment = VENV if Path(shutil.which(name) or "").parent == VENV / "bin" else new_environment(name)
    python = environment / "bin" / "python"
    with tempfile.TemporaryDirectory(dir=WORK) as out:
        command = [str(environment / "bin" / "maturin"), "build", "--release", "--locked", "--out", out]
        linux = sys.platform.startswith("linux")
        command += ["--compatibility", f"manylinux_2_{GLIBC}"] if linux else ["--strip"]
        run([*command, "--interpreter", str(python)], env=os.environ | build_environment(python))
        (wheel,) = Path(out).glob("*.whl")
        if linux:
            wheel = part(wheel)
        DIST.mkdir(exist_ok=True)
        return Path(shutil.move(wheel, DIST / wheel.name))


def new_environment(name: str) -> Path:
    """Return an environment of an interpreter, with what a build needs."""
    environment = WORK / name
    python = environment / "bin" / "python"
    requirements = WORK / "requirements.txt"
    run([name, "-m", "venv", str(environment)])
    requirements.write_text(run([str(python), str(ROOT / "scripts" / "requirements.py")], stdout=subprocess.PIPE))
    run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)])
    return environment


def part(wheel: Path) -> Path:
    """Strip the library of a wheel and keep its symbols in a file of their own, which the library names.

    Returns:
        The wheel, under another name where its library needs a newer glibc than its tag says.
    """
    with zipfile.ZipFile(wheel) as archive:
        contents = {entry: archive.read(entry) for entry in archive.infolist()}
    (entry,) = (entry for entry in contents if entry.filename.endswith(".so"))
    written = {each.filename: record_line(each.filename, content) for each, content in contents.items()}
    SYMBOLS.mkdir(exist_ok=True)
    symbols = SYMBOLS / f"{Path(entry.filename).name}.debug"
    library = symbols.with_suffix("")
    library.write_bytes(contents[entry])
    run(["objcopy", "--only-keep-debug", str(library), str(symbols)])
    run(["objcopy", "--strip-all", f"--add-gnu-debuglink={symbols}", str(library)])
    contents[entry] = library.read_bytes()
    library.unlink()
    tag, needed = f"manylinux_2_{GLIBC}", f"manylinux_2_{max(GLIBC, glibc(contents[entry]))}"
    (tags,) = (each for each in contents if each.filename.endswith(".dist-info/WHEEL"))
    contents[tags] = contents[tags].replace(tag.encode(), needed.encode())
    (record,) = (each for each in contents if each.filename.endswith(".dist-info/RECORD"))
    for each in (entry, tags):
        now = record_line(each.filename, contents[each])
        contents[record] = contents[record].replace(written[each.filename], now)
    wheel.unlink()
    wheel = wheel.with_name(wheel.name.replace(tag, needed))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for item, content in contents.items():
            archive.writestr(item, content)
    return wheel


def glibc(library: bytes) -> int:
    """Return the newest minor version of glibc that a library needs, 0 where it needs none."""
    return max((int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)), default=0)


def record_line(name: str, content: bytes) -> bytes:
    """Return a file's line in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}".encode()


def machine_paths() -> dict[str, str]:
    """Return the directories of this machine, outermost first, and what stands for each in a wheel."""
    home = os.environ["HOME"]
    return {home: "home", os.environ.get("CARGO_HOME") or f"{home}/.cargo": "cargo", str(ROOT): "faststep"}


def path_flags() -> dict[str, str]:
    """Return the variables that keep the machine's paths out of a library, which the Makefile sets for all builds.

    The user's own flags come after these.
    """
    options = {"RUSTFLAGS": "--remap-path-prefix", "CFLAGS": "-ffile-prefix-map", "CXXFLAGS": "-ffile-prefix-map"}
    flags = {}
    for variable, option in options.items():
        paths = [f"{option}={path}={name}" for path, name in machine_paths().items()]
        yours = [flag for flag in os.environ.get(variable, "").split() if flag not in paths]
        flags[variable] = " ".join(paths + yours)
    return flags


def build_environment(python: Path) -> dict[str, str]:
    """Return the variables of the build with that interpreter."""
    return path_flags() | {
        "PYO3_PYTHON": str(python),
        "VIRTUAL_ENV": str(python.parents[1]),
        "FASTSTEP_SYMBOLS": "1",  # `part` takes them out
        "CARGO_TARGET_DIR": os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target")),
    }


def check(wheel: Path) -> None:
    """Refuse a wheel with a copy of a library, a path of this machine, symbols, or what is newer than its tag says."""
    paths = [path.encode() + b"/" for path in (*machine_paths(), tempfile.gettempdir())]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            if re.search(r"lib(mlx|blas|lapack|gfortran|quadmath)", name):
                sys.exit(f"{wheel.name}: {name} must not be in the wheel")
            if found := [path.decode() for path in paths if path in content]:
                sys.exit(f"{wheel.name}: {name} holds paths of this machine: {found}")
            if name.endswith(".so") and len(content) > LARGEST:
                sys.exit(f"{wheel.name}: {name} has {len(content)} bytes: its symbols were not stripped")
            said = re.search(r"manylinux_2_(\d+)", wheel.name)
            if glibc(content) > (int(said[1]) if said else GLIBC):
                sys.exit(f"{wheel.name}: {name} needs glibc 2.{glibc(content)}")


def run(command: list[str], env: dict[str, str] | None = None, stdout: int | None = None) -> str:
    """Run a command, end with its exit status when it fails, and return what it printed if that was asked for."""
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=stdout, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}")
    return done.stdout or ""


if __name__ == "__main__":
    main(sys.argv[1:] or NAMES)
