"""Write THIRD_PARTY_NOTICES: the licences of all that is compiled into the extension module.

Usage: notices.py [--check]   (--check: compare only, and end with an error where the file is out of date)

Rust crates come from `cargo metadata`, without what serves a build or a test only; C++ sources from mlx-c's crate and
the environment that this runs in (MLX's headers, nanobind). Where a crate leaves a choice, MIT is taken. Equal texts
stand once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "THIRD_PARTY_NOTICES"
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
# Preferred first. A plain LICENSE is the only licence of its crate.
LICENCE_FILES = (
    "LICENSE-MIT",
    "LICENSE",
    "LICENSE.txt",
    "COPYING",
    "LICENSE-APACHE",
    "LICENSE-APACHE-2.0",
    "LICENSE-BSD",
)
HEAD = """Third-party notices

The extension module of mlx-faststep contains code of the packages below, each under the licence that follows its name.
"""
# Of its sources, after which native/cpu/hyperbolic.hpp computes.
FDLIBM = """Copyright (C) 1993 by Sun Microsystems, Inc. All rights reserved.

Developed at SunPro, a Sun Microsystems, Inc. business.
Permission to use, copy, modify, and distribute this software is freely granted, provided that this notice is preserved.
"""
RULE = "-" * 100
Notices = dict[str, list[str]]  # text of a licence -> packages under it


def main(arguments: list[str]) -> None:
    """Write the file, or compare it."""
    text = notices()
    if arguments != ["--check"]:
        FILE.write_text(text, encoding="utf-8")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != text:
        sys.exit(f"{FILE.name} is out of date: run `{Path(sys.executable).name} scripts/notices.py`")


def notices() -> str:
    """Return the text of the file."""
    found: Notices = {}
    for name, licence in [*crates(), *sources()]:
        found.setdefault(tidy(licence), []).append(name)
    sections = [f"{RULE}\n{', '.join(names)}\n{RULE}\n\n{licence}" for licence, names in found.items()]
    return "\n".join([HEAD, *sections])


def tidy(text: str) -> str:
    """Return a licence without blanks at the ends of lines, so that copies of one text are equal."""
    lines = [line.rstrip() for line in text.replace("\ufeff", "").strip("\n\f").splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def metadata(manifest: Path, *options: str) -> dict[str, Any]:
    """Return what cargo knows about a crate and its dependencies."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--manifest-path", str(manifest), *options]
    content: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout)
    return content


def crates() -> list[tuple[str, str]]:
    """Return name and licence of each crate that is linked into the module, on any system."""
    linked: dict[tuple[str, str], dict[str, Any]] = {}
    for platform in PLATFORMS:
        content = metadata(ROOT / "rust" / "python" / "Cargo.toml", "--filter-platform", platform)
        linked |= {(package["name"], package["version"]): package for package in reached(content)}
    return [(f"{name} {version}", crate_licence(package)) for (name, version), package in sorted(linked.items())]


def reached(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the published packages that the module is linked with: no build or test dependencies, no macros."""
    packages = {package["id"]: package for package in content["packages"]}
    nodes = {node["id"]: node for node in content["resolve"]["nodes"]}
    waiting = [content["resolve"]["root"]]
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen or any("proc-macro" in target["kind"] for target in packages[name]["targets"]):
            continue
        seen.add(name)
        dependencies = nodes[name]["deps"]
        waiting += [item["pkg"] for item in dependencies if any(kind["kind"] is None for kind in item["dep_kinds"])]
    return [packages[name] for name in seen if packages[name]["source"] is not None]


def crate_licence(package: dict[str, Any]) -> str:
    """Return the licence of a crate: its file, or MIT's text where the crate names MIT and has no file."""
    place = Path(package["manifest_path"]).parent
    offered = package["license"] or ""
    for name in LICENCE_FILES:
        text = (place / name).read_text(encoding="utf-8") if (place / name).is_file() else ""
        if text and not (text.lstrip().startswith("GNU GENERAL PUBLIC LICENSE") and " OR " in offered):
            return text
    if "MIT" not in re.split(r"[ /()]+", offered):
        sys.exit(f"{package['name']} {package['version']}: no licence file in {place}, and {offered!r} is not MIT")
    return mit(f"Copyright (c) {', '.join(re.sub(' *<.*?>', '', author) for author in package['authors'])}")


def mit(copyright_line: str) -> str:
    """Return MIT's text with a copyright line: that of LICENSE-MIT."""
    own = (ROOT / "LICENSE-MIT").read_text(encoding="utf-8")
    return re.sub(r"^Copyright .*$", copyright_line, own, count=1, flags=re.MULTILINE)


def sources() -> list[tuple[str, str]]:
    """Return name and licence of the C++ sources and headers, and of Rust's standard library."""
    published = metadata(ROOT / "rust" / "mlx-sys" / "upstream" / "Cargo.toml")["packages"]
    (upstream,) = (package for package in published if package["name"] == "mlx-sys")
    place = Path(upstream["manifest_path"]).parent
    spec = importlib.util.find_spec("nanobind")
    if spec is None or spec.origin is None:
        sys.exit("nanobind is not installed: run this with the python of .venv")
    robin_map = Path(spec.origin).parent / "ext" / "robin_map" / "include" / "tsl" / "robin_map.h"
    header = robin_map.read_text(encoding="utf-8").partition("*/")[0]
    return [
        (f"mlx-c, of mlx-sys {upstream['version']}", (place / "src" / "mlx-c" / "LICENSE").read_text(encoding="utf-8")),
        (f"MLX {importlib.metadata.version('mlx')} (headers)", wheel_licence("mlx")),
        (f"nanobind {importlib.metadata.version('nanobind')}", wheel_licence("nanobind")),
        ("robin_map, of nanobind", re.sub(r"^ ?/?\*+ ?", "", header, flags=re.MULTILINE)),
        ("fdlibm (tanhf, coshf, expm1f)", FDLIBM),
        ("optimized-routines of Arm (expf)", mit("Copyright (c) 2017-2018, Arm Limited")),
        ("Rust standard library", mit("Copyright (c) The Rust Project Contributors")),
    ]


def wheel_licence(name: str) -> str:
    """Return the licence file that an installed Python package brings."""
    files = [file for file in importlib.metadata.files(name) or () if file.match("*.dist-info/licenses/LICENSE*")]
    if not files:
        sys.exit(f"{name}: its wheel has no licence file")
    return "\n".join(Path(str(file.locate())).read_text(encoding="utf-8") for file in files)


if __name__ == "__main__":
    main(sys.argv[1:])
