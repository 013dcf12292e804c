"""Measure mlx-lm's own trainer beside `faststep.mlx_lm.train`: the same model, data, order of batches and arguments.

Each run has a process of its own, which takes MLX's kernels as faststep brings them, so that only the trainers differ.
The model is a small Llama with random weights, the data are the project's own pages::

    python benches/mlx_lm_trainer.py       # three minutes
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import faststep.mlx_lm
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from machine import ROOT
from mlx.utils import tree_flatten
from mlx_lm.tuner import trainer
from mlx_lm.tuner.datasets import CacheDataset, TextDataset
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load
from report_mlx_lm import OURS, THEIRS
from samples import Sample, alone, arguments, bars, use_device

TRAIN = {OURS: faststep.mlx_lm.train, THEIRS: trainer.train}
SIZES = {"vocabulary": 1024, "layers": 4, "width": 128, "heads": 4, "context": 128}
TITLE = "Llama, 4 layers x 128, vocabulary 1,024; batch 4, up to 128 tokens"
CASES = {
    "lora4": "LoRA of rank 8 on all linear layers, over 4 bits",
    "lora": "LoRA of rank 8 on all linear layers",
    "full": "all of the model",
}
ITERS, WARM = 30, 12  # the first ones trace and compile
ACCUMULATE, UNEVEN = 4, 10  # windows of so many batches, and as many iterations as leave one that is not full


class Times(trainer.TrainingCallback):
    """Keeps the losses, and the time of each report."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.at: list[float] = []

    def on_train_loss_report(self, train_info: dict[str, float]) -> None:
        """Keep them."""
        self.losses.append(train_info["train_loss"])
        self.at.append(time.perf_counter())


def paragraphs() -> list[str]:
    """Return the paragraphs of the project's pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n") if 80 < len(part) < 280]


def prepared(case: str, folder: Path) -> tuple[nn.Module, CacheDataset]:
    """Make the model and the data of a case, the same every time."""
    if not folder.exists():
        faststep.mlx_lm.new_llama(folder, paragraphs(), **SIZES)
    model, tokenizer = load(str(folder))
    if case == "lora4":
        nn.quantize(model, 64, 4)
    if case != "full":
        model.freeze()
        mx.random.seed(0)
        linear_to_lora_layers(model, SIZES["layers"], {"rank": 8, "scale": 10.0, "dropout": 0.0})
    mx.eval(model.parameters())
    np.random.seed(0)
    return model, CacheDataset(TextDataset([{"text": text} for text in paragraphs()], tokenizer))


def trained(way: str, case: str, folder: Path, optimizer: Any, **options: Any) -> tuple[nn.Module, Times]:
    """Train by one of the ways."""
    model, data = prepared(case, folder)
    times = Times()
    args = trainer.TrainingArgs(
        batch_size=4,
        max_seq_length=SIZES["context"],
        steps_per_report=1,
        adapter_file=str(folder / "out.safetensors"),
        **options,
    )
    mx.reset_peak_memory()
    with contextlib.redirect_stdout(io.StringIO()):
        TRAIN[way](model, optimizer, data, None, args=args, training_callback=times)
    return model, times


def run_alone(way: str, case: str) -> dict[str, Any]:
    """Train; return losses, milliseconds of the iterations behind the first ones, and the peak memory in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        _, times = trained(way, case, Path(folder) / "llama", optim.AdamW(1e-3), iters=ITERS)
    ms = [1e3 * (after - before) for before, after in zip(times.at[WARM:], times.at[WARM + 1 :], strict=False)]
    return {"losses": times.losses, "ms": ms, "peak": mx.get_peak_memory()}


def off_alone(way: str) -> dict[str, float]:
    """Return how far a training by windows ends from one by the average over all tokens of each, as a share of its way.

    One window that is full, and three of which the last one is not.
    """
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "llama"
        for iters in (ACCUMULATE, UNEVEN):
            model, _ = trained(way, "lora", folder, optim.SGD(0.1), iters=iters, grad_accumulation_steps=ACCUMULATE)
            found[str(iters)] = distance(model, by_hand(folder, iters), prepared("lora", folder)[0])
    return found


def by_hand(folder: Path, iters: int) -> nn.Module:
    """Train in plain MLX by the average over all tokens of each window."""
    model, data = prepared("lora", folder)
    optimizer = optim.SGD(0.1)
    batches = trainer.iterate_batches(data, 4, SIZES["context"], loop=True)
    with contextlib.redirect_stdout(io.StringIO()):
        taken = [batch for batch, _ in zip(batches, range(iters), strict=False)]

    def total(model: nn.Module, window: list[Any]) -> mx.array:
        pairs = [trainer.default_loss(model, *batch) for batch in window]
        return sum(mean * count for mean, count in pairs) / sum(count for _, count in pairs)

    for start in range(0, iters, ACCUMULATE):
        _, grads = nn.value_and_grad(model, total)(model, taken[start : start + ACCUMULATE])
        optimizer.update(model, grads)
        mx.eval(model.parameters())
    return model


def distance(model: nn.Module, wanted: nn.Module, start: nn.Module) -> float:
    """Return how far two models are apart, as a share of how far the second has come."""
    there, begun = (dict(tree_flatten(each.trainable_parameters())) for each in (wanted, start))
    found = dict(tree_flatten(model.trainable_parameters()))
    apart = sum((found[name] - there[name]).square().sum().item() for name in there)
    return math.sqrt(apart / sum((there[name] - begun[name]).square().sum().item() for name in there))


def measure(case: str, rounds: int) -> dict[str, Any]:
    """Let both take turns; return what they took, and how far their losses are apart."""
    runs: dict[str, list[Any]] = {way: [] for way in TRAIN}
    for _ in range(rounds):
        for way, found in runs.items():
            found += alone(way, case)
    first = {way: found[0]["losses"] for way, found in runs.items()}
    gap = max(abs(mine / other - 1) for mine, other in zip(first[OURS], first[THEIRS], strict=True))
    return {
        "title": f"{TITLE}: {CASES[case]}",
        "losses": first,
        "largest relative loss difference": gap,
        "ms": {way: [each for run in found for each in run["ms"]] for way, found in runs.items()},
        "peak bytes": {way: min(run["peak"] for run in found) for way, found in runs.items()},
    }


def main() -> None:
    """Measure all cases, and how far windows are off."""
    parser = arguments("Measure mlx-lm's trainer and ours.", [*CASES, "windows"])
    parser.add_argument("--rounds", type=int, default=2, help="processes of each trainer (default: %(default)s)")
    args = parser.parse_args()
    use_device(args.device)
    if args.alone:
        way, *rest = args.alone
        print(json.dumps(run_alone(way, *rest) if rest else off_alone(way)))
        return
    sample = Sample("mlx_lm_trainer", args)
    with bars() as progress:
        for case in progress.track(args.cases or [*CASES, "windows"]):
            if case == "windows":
                sample.add(case, {way: next(iter(alone(way))) for way in TRAIN})
            else:
                sample.add(case, measure(case, args.rounds))
    print(f"wrote {sample.file.name}")


if __name__ == "__main__":
    main()
