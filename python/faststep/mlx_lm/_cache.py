"""Tokens of datasets that took long to encode, kept for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from faststep._files import cache_folder, replacing
from faststep.mlx_lm._samples import Samples

_FORM = 2  # of the files, and of what makes them: another one is another file
_DAYS = 30  # without use, after which a file is removed
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".npz")


def place_of(files: list[Path], tokenizer: Path, options: dict[str, Any]) -> Path:
    """Return where the samples of files are kept, by the contents of all that they follow from.

    Args:
        files: What they are made of.
        tokenizer: The folder of the tokenizer.
        options: How they are made: plain values.
    """
    digest = hashlib.sha256()
    versions = [importlib.metadata.version(each) for each in ("mlx-lm", "transformers", "tokenizers")]
    named = [str(each) for each in files]  # which the notes have
    digest.update(json.dumps([_FORM, versions, options, named], sort_keys=True, default=str).encode())
    beside = [each for each in sorted(tokenizer.iterdir()) if each.is_file() and each.suffix not in _WEIGHTS]
    for file in (*files, *beside):
        with contextlib.suppress(OSError), file.open("rb") as opened:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            while part := opened.read(1 << 20):
                digest.update(part)
    return cache_folder() / "datasets" / f"{digest.hexdigest()[:32]}.npz"


def read(place: Path, samples: Samples) -> bool:
    """Fill samples with those that are kept; return whether there are any."""
    try:
        with np.load(place, allow_pickle=False) as arrays:
            samples.load(arrays, json.loads(str(arrays["notes"])))
        os.utime(place)  # it is in use
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return False
    return True


def write(place: Path, samples: Samples) -> None:
    """Keep samples; remove those that nobody has asked for in a month."""
    with contextlib.suppress(OSError):  # a folder that cannot be written to, a full disk: the next start encodes again
        place.parent.mkdir(parents=True, exist_ok=True)
        for file in place.parent.glob("*.npz"):
            if time.time() - file.stat().st_mtime > _DAYS * 86400:
                file.unlink()
        with replacing(place) as opened:
            np.savez(opened, notes=np.array(json.dumps(samples.notes)), **samples.arrays())  # type: ignore[arg-type]
