"""Look for all that a target of the Makefile needs of this machine, install what is missing, and make .venv.

Usage: prepare.py build|test|run   (make calls it, with the Python that .venv is made of; YES=1 answers its question)

build: Python with venv and headers, a C++ compiler, Rust, disk space.
test:  the same, clippy and rustfmt.
run:   as build. Where Rust is missing or nothing has been built yet, a wheel in dist that fits is installed instead.

Missing programs come from the system's package manager, where this is root or may ask for sudo; Rust from rustup too,
which is a package of Debian 13 and Ubuntu 24.04 and later ones.
Otherwise this ends at once, and says which commands to type. It needs Python's standard library, not even venv.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMPS = VENV / "stamps"
BASE = getattr(sys, "_base_executable", sys.executable)  # where this runs in the .venv that it may have to make anew
OLDEST_PYTHON = (3, 10)
OLDEST_GCC, OLDEST_CLANG = (12,), (15,)
OLDEST_GLIBC = (2, 35)  # of MLX's wheels
GIGABYTES = {"build": 3, "run": 3, "test": 6}
DEBIAN_PYTHON = "python3" if BASE.startswith("/usr/bin/") else f"python3.{sys.version_info[1]}"
# Package managers, in the order in which they are looked for: how they install, and the names of packages.
INSTALL = {
    "brew": "brew install",
    "apt-get": "env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends",
    "dnf": "dnf install -y",
    "pacman": "pacman -S --noconfirm",
}
PACKAGES = {
    "venv": {"apt-get": f"{DEBIAN_PYTHON}-venv", "dnf": "python3", "pacman": "python", "brew": "python"},
    "headers": {"apt-get": f"{DEBIAN_PYTHON}-dev", "dnf": "python3-devel", "pacman": "python", "brew": "python"},
    "compiler": {"apt-get": "g++", "dnf": "gcc-c++", "pacman": "gcc"},
    "newer compiler": {"apt-get": "g++-12", "dnf": "gcc-c++", "pacman": "gcc"},
    "rust": {"dnf": "rust cargo", "pacman": "rust", "brew": "rust"},
    "rust tools": {"dnf": "clippy rustfmt", "pacman": "rust", "brew": "rust"},
    "curl": {"apt-get": "curl ca-certificates", "dnf": "curl", "pacman": "curl", "brew": "curl"},
}
MANAGER = next((name for name in INSTALL if shutil.which(name)), "")
# Names of Debian's packages of Rust: compiler, cargo, clippy, rustfmt. The second ones are newer, for its browsers.
DEBIAN_RUST = (
    ("rustc", "cargo", "rust-clippy", "rustfmt"),
    ("rustc-web", "cargo-web", "rust-web-clippy", "rustfmt-web"),
)
RUSTUP = "curl --proto =https --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal --default-toolchain "


class Missing:
    """Something that this machine lacks: the packages that bring it, and commands to run after these."""

    def __init__(self, what: str, packages: str = "", commands: tuple[str, ...] = (), *, mendable: bool = True) -> None:
        """Take packages separated by blanks; not `mendable`: no command helps."""
        self.what, self.packages, self.commands, self.mendable = what, packages.split(), commands, mendable


def main(target: str) -> None:
    """Look, install, and make .venv."""
    os.environ["PATH"] = f"{Path.home() / '.cargo' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    wheel = fitting_wheel() if target == "run" and not (STAMPS / "built").exists() else None
    found = look(target, wheel)
    if found:
        report(found)
        if not may_install(found):
            sys.exit(1)
        found = install(target, found, wheel)
    if found:
        print("Still:", file=sys.stderr)
        report(found)
        sys.exit(1)
    make_venv()
    if wheel:
        install_wheel(wheel)


def look(target: str, wheel: Path | None) -> list[Missing]:
    """Return what is missing. A wheel needs no compiler."""
    built = [] if wheel else [headers(), compiler(), rust(target), space(GIGABYTES[target])]
    return [item for item in (python(), venv(), glibc(), *built) if item]


def package(part: str) -> str:
    """Return the packages of a part, by their names in this system's package manager."""
    return PACKAGES[part].get(MANAGER, "")


def version(text: str) -> tuple[int, ...]:
    """Return the first version in a text: "g++ (Debian) 12.2.0" is (12, 2, 0)."""
    found = re.search(r"\d+(\.\d+)+|\b\d+\b", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def setting(file: str, name: str) -> str:
    """Return the first value of a name in a TOML file: this Python may have no parser."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return str(re.findall(rf'^{name} = "(.*)"', text, re.MULTILINE)[0])


def said(*command: str) -> str:
    """Return what a command prints; nothing where it is missing or fails."""
    try:
        # rustup would install the toolchain before it answers
        variables = {**os.environ, "RUSTUP_AUTO_INSTALL": "0", "LC_ALL": "C"}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def python() -> Missing | None:
    """Look at the version of this Python."""
    if sys.version_info >= OLDEST_PYTHON:
        return None
    newer = [name for name in (f"python3.{minor}" for minor in range(14, 9, -1)) if shutil.which(name)]
    commands = (f"export PYTHON={newer[0]}",) if newer else ()
    return Missing(f"Python 3.10 or newer (found: {platform.python_version()})", "", commands, mendable=bool(newer))


def venv() -> Missing | None:
    """Look whether this Python can make an environment with pip."""
    if (find_spec("venv") and find_spec("ensurepip")) or has_pip():
        return None
    return Missing(f"venv and pip for Python {platform.python_version()}", package("venv"))


def headers() -> Missing | None:
    """Look for Python.h."""
    if Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return None
    return Missing(f"the headers of Python {platform.python_version()}", package("headers"))


def compiler() -> Missing | None:
    """Look for the C++ compiler that cargo will call."""
    if sys.platform == "darwin" and not said("xcode-select", "-p"):
        command = "xcode-select --install # a window asks; go on when it has finished"
        return Missing("Apple's command-line tools", "", (command,))
    name = os.environ.get("CXX", "c++")
    text = said(name, "--version")
    if not text:
        return Missing("a C++ compiler (g++ 12, clang 15, or newer)", package("compiler"))
    clang = "clang" in text
    if version(said(name, "-dumpversion")) >= (OLDEST_CLANG if clang else OLDEST_GCC):
        return None
    newer = [f"g++-{major}" for major in range(15, 11, -1) if shutil.which(f"g++-{major}")]
    commands = (f"export CXX={newer[0] if newer else 'g++-12'}",) if newer or MANAGER == "apt-get" else ()
    packages = "" if newer else package("newer compiler")
    return Missing(f"g++ 12, clang 15, or newer (found: {text.splitlines()[0]})", packages, commands)


def rust(target: str) -> Missing | None:
    """Look for cargo and rustc of a version that compiles this, for tests with clippy and rustfmt."""
    oldest = setting("Cargo.toml", "rust-version")
    found = said("rustc", "--version") if said("cargo", "--version") else ""
    if version(found) < version(oldest):
        return missing_rust(f"Rust {oldest} or newer (found: {found.strip() or 'none'})", target, version(oldest))
    if target != "test" or (said("cargo", "clippy", "--version") and said("cargo", "fmt", "--version")):
        return None
    if shutil.which("rustup"):
        return Missing("clippy and rustfmt", "", ("rustup component add clippy rustfmt",))
    names = DEBIAN_RUST[said("dpkg-query", "--show", "rustc-web") != ""]
    return Missing("clippy and rustfmt", " ".join(names[2:]) if MANAGER == "apt-get" else package("rust tools"))


def missing_rust(what: str, target: str, oldest: tuple[int, ...]) -> Missing:
    """Return how Rust is installed: by a package that is new enough, or by rustup."""
    tools = target == "test"
    channel = setting("rust-toolchain.toml", "channel")
    components = " --component clippy --component rustfmt" if tools else ""
    # a distribution's rustup fails to update itself
    toolchain = f"rustup toolchain install {channel} --profile minimal --no-self-update{components}"
    if shutil.which("rustup"):
        return Missing(what, "", (toolchain,))
    for names in DEBIAN_RUST if MANAGER == "apt-get" else ():
        if apt_version(names[0]) >= oldest:
            return Missing(what, " ".join(names if tools else names[:2]))
    if MANAGER == "apt-get" and apt_version("rustup"):
        return Missing(what, "rustup", (toolchain,))
    if package("rust"):
        return Missing(what, f"{package('rust')} {package('rust tools')}" if tools else package("rust"))
    return Missing(what, "" if shutil.which("curl") else package("curl"), (f"{RUSTUP}{channel}{components}",))


def apt_version(name: str) -> tuple[int, ...]:
    """Return the version of a package that apt would install; before its first update, what is known of Debian."""
    if (
        not said("apt-cache", "show", "--no-all-versions", "g++")
        and name == "rustc-web"
        and "ID=debian" in os_release()
    ):
        return (sys.maxsize,)
    return version("".join(re.findall(r"Candidate: (?:\d+:)?(\d\S*)", said("apt-cache", "policy", name))))


def os_release() -> list[str]:
    """Return the lines that name this distribution."""
    file = Path("/etc/os-release")
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def space(gigabytes: int) -> Missing | None:
    """Look for room on the disk, where nothing has been built yet."""
    free = shutil.disk_usage(ROOT).free // 10**9
    if free >= gigabytes or (STAMPS / "built").exists():
        return None
    return Missing(f"{gigabytes} GB of free disk space below {ROOT} (found: {free})", mendable=False)


def glibc() -> Missing | None:
    """Look at the C library of a Linux."""
    found = version(platform.libc_ver()[1])
    if platform.libc_ver()[0] != "glibc" or found >= OLDEST_GLIBC:
        return None
    return Missing(f"glibc 2.35 or newer, as MLX's wheels need (found: {platform.libc_ver()[1]})", mendable=False)


def commands_of(found: list[Missing]) -> list[str]:
    """Return the commands that install what is missing."""
    sudo = "" if os.geteuid() == 0 or MANAGER == "brew" else "sudo "
    packages = list(dict.fromkeys(name for item in found for name in item.packages))
    lines = [f"{sudo}apt-get update"] if packages and MANAGER == "apt-get" else []
    lines += [f"{sudo}{INSTALL[MANAGER]} {' '.join(packages)}"] if packages else []
    return lines + [command for item in found for command in item.commands]


def report(found: list[Missing]) -> None:
    """Say what is missing, and how it is installed."""
    lines = ["This machine lacks", *(f"  {item.what}" for item in found)]
    commands = commands_of(found)
    if commands and all(item.mendable for item in found):
        lines += ["These commands install it:", *(f"  {command}" for command in commands)]
    unknown = [item.what for item in found if item.mendable and not (item.packages or item.commands)]
    if unknown:
        lines += [f"Install by this system's package manager: {', '.join(unknown)}"]
    print("\n".join(lines), file=sys.stderr, flush=True)


def may_install(found: list[Missing]) -> bool:
    """Return whether the commands can be run, and this is root or somebody says yes."""
    if not all(item.mendable and (item.packages or item.commands) for item in found):
        return False
    root = os.geteuid() == 0
    if not root and MANAGER != "brew" and not shutil.which("sudo") and any(item.packages for item in found):
        return False
    if root or os.environ.get("YES") == "1":
        return True
    return sys.stdin.isatty() and sys.stderr.isatty() and input("Run them now? [y/N] ").lower().startswith("y")


def install(target: str, found: list[Missing], wheel: Path | None) -> list[Missing]:
    """Run the commands, and return what is missing still."""
    commands = commands_of(found)
    if commands[0].endswith("apt-get update"):
        execute(commands[0])
        commands = commands_of(look(target, wheel))[1:]  # it is known only now which packages there are
    for command in commands:
        execute(command)
    return look(target, wheel)


def execute(command: str) -> None:
    """Run one command and end with its exit status when it fails."""
    print(f"+ {command}", file=sys.stderr, flush=True)
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"{command}: exit status {done.returncode}")


def has_pip() -> bool:
    """Return whether there is an environment, and a whole one."""
    return said(str(VENV / "bin" / "python"), "-m", "pip", "--version") != ""


def make_venv() -> None:
    """Make .venv as a whole or not at all; one without pip is made anew."""
    if not has_pip():
        if VENV.exists():
            print(f"{VENV} is not whole: it is made anew", file=sys.stderr)
        shutil.rmtree(VENV, ignore_errors=True)
        done = subprocess.run([BASE, "-m", "venv", str(VENV)], check=False)
        if done.returncode:
            shutil.rmtree(VENV, ignore_errors=True)
            sys.exit(f"{BASE} -m venv {VENV}: exit status {done.returncode}")
    STAMPS.mkdir(exist_ok=True)


def fitting_wheel() -> Path | None:
    """Return a wheel in dist of this version, Python and system, newer than all sources or where there is no Rust."""
    current = setting("Cargo.toml", "version")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    system = {"linux": "manylinux", "darwin": "macosx"}.get(sys.platform, "none")
    pattern = f"mlx_faststep-{current}-{tag}-{tag}-{system}_*_{platform.machine()}.whl"
    found = platform.mac_ver()[0] if sys.platform == "darwin" else platform.libc_ver()[1]
    fits = [path for path in (ROOT / "dist").glob(pattern) if oldest_system(path) <= version(found)]
    wheels = sorted(fits, key=lambda path: path.stat().st_mtime)
    sources = [path for folder in ("rust", "python") for path in (ROOT / folder).rglob("*.*") if path.suffix != ".so"]
    if not wheels or (rust("run") is None and any(newer(path, wheels[-1]) for path in sources)):
        return None
    return wheels[-1]


def oldest_system(wheel: Path) -> tuple[int, ...]:
    """Return the oldest version of glibc or macOS that a wheel works with."""
    return tuple(int(part) for part in re.findall(r"-(?:manylinux|macosx)_(\d+)_(\d+)_", wheel.name)[0])


def newer(path: Path, other: Path) -> bool:
    """Return whether a file was changed after another one; a missing one was not."""
    return path.is_file() and (not other.exists() or path.stat().st_mtime > other.stat().st_mtime)


def install_wheel(wheel: Path) -> None:
    """Install a wheel into .venv with what the example needs, unless that was done before."""
    stamp = STAMPS / "wheel"
    if not newer(wheel, stamp):
        return
    print(f"Installing {wheel.relative_to(ROOT)}: nothing is compiled", flush=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for options in (["--force-reinstall", "--no-deps", str(wheel)], [f"{wheel}[cpu,train]"]):
        done = subprocess.run([*pip, *options], check=False)
        if done.returncode:
            sys.exit(f"{' '.join([*pip, *options])}: exit status {done.returncode}")
    stamp.touch()


if __name__ == "__main__":
    if sys.argv[1:] not in (["build"], ["test"], ["run"]):
        sys.exit(__doc__)
    main(sys.argv[1])
