"""Damage to the files of checkpoints, and manifests that lie about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def seal(path: Path, **changes: Any) -> None:
    """Write the manifest anew, for the files as they are: what somebody could do who wants to be believed."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    for name, entry in manifest["files"].items():
        if (path / name).is_file():
            contents = (path / name).read_bytes()
            entry |= {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    manifest |= changes
    own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": own}))


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, sealed."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    change(manifest)
    own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": own}))


def change_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file, and the manifest with it."""
    contents = file.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + contents[8 + length :])
    seal(file.parent)


def change_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file, and the manifest with it."""
    contents = json.loads(file.read_text())
    change(contents)
    file.write_text(json.dumps(contents))
    seal(file.parent)


def flip(file: Path, at: int) -> None:
    """Flip a bit of the byte at this place, a share of the file in thousandths."""
    contents = bytearray(file.read_bytes())
    contents[at * (len(contents) - 1) // 1000] ^= 4
    file.write_bytes(contents)
