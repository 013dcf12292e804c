"""The batches, model and optimizer of rust/faststep/examples/weighted_lm, in Python; and the program."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from faststep import recipes
from mlx.optimizers import AdamW, cosine_decay, join_schedules, linear_schedule

WARM_UP, SEQ, BATCH, SEED, RATE = 8, 32, 6, 5, 3e-3
SIZES = f"--layers 2 --width 32 --heads 2 --seq {SEQ}".split()
TRAINING = f"--batch {BATCH} --seed {SEED} --warm-up {WARM_UP} --learning-rate {RATE}".split()
Source = tuple[np.ndarray, Any, Any]  # bytes, authority, entropy


def environment() -> dict[str, str]:
    """Return the environment in which the program finds libmlx where this process does."""
    libraries = str(Path(mx.__file__).parent / "lib")
    paths = {"LD_LIBRARY_PATH": libraries, "DYLD_LIBRARY_PATH": libraries}
    return os.environ | paths | {"OPENBLAS_NUM_THREADS": "1"}  # small matrices, and other tests beside them


def run(program: Path, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    done = subprocess.run([program, *arguments], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the steps of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(folder: Path, texts: dict[str, str]) -> Path:
    """Write texts as files of a folder."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def sources(folder: Path) -> list[Source]:
    """Return each file of a folder in the order of the names, with the numbers of the recipe's own rule."""
    found = []
    for file in sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.parts):
        windows = recipes.Sources(folder, context=SEQ, split="all")
        text = np.frombuffer(file.read_bytes(), dtype=np.uint8)
        (item,) = [each for each in windows if np.array_equal(each["input_ids"], text[:SEQ])][:1]
        found.append((text.astype(np.int32), item["auth_weights"], item["prov_entropies"]))
    return found


def mix(bits: int) -> int:
    """Return the next word of SplitMix64."""
    bits = (bits + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def batch_of(texts: list[Source], number: int) -> dict[str, mx.array]:
    """Draw the batch of a number as the program does."""
    ends = np.cumsum([len(text) - SEQ + 1 for text, _, _ in texts])
    rows = []
    for row in range(BATCH):
        position = mix(mix(SEED) ^ (number << 32 | row)) % int(ends[-1])
        source = int(np.searchsorted(ends, position, side="right"))
        start = position - (int(ends[source - 1]) if source else 0)
        text, authority, entropy = texts[source]
        rows.append((text[start : start + SEQ], authority, entropy))
    names = ("input_ids", "auth_weights", "prov_entropies")
    return {name: mx.array(np.stack(column)) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def model_of(weights: dict[str, mx.array]) -> recipes.GPT:
    """Make the model of a checkpoint."""
    model = recipes.GPT(2, 32, 2, context=SEQ, activation="gelu")
    model.load_weights([(renamed(name), each) for name, each in weights.items()])
    return model


def renamed(name: str) -> str:
    """Return the recipe's name of a parameter."""
    return name.replace("bytes.", "embedding.").replace("attention.qkv", "qkv").replace("attention.out", "out")


def optimizer(steps: int) -> AdamW:
    """Make the optimizer of a run of so many steps."""
    decay = cosine_decay(RATE, steps - WARM_UP, RATE / 20)
    schedule = join_schedules([linear_schedule(0.0, RATE, WARM_UP), decay], [WARM_UP])
    return AdamW(schedule, betas=[0.9, 0.99], weight_decay=0.1, bias_correction=True)
