"""Measure the recipes' systems: a step of plain MLX, of `mx.compile`, of `fast_step`, and the peak of MLX's memory.

Each way has a process of its own, one after the other in each round, so that only one of them holds the model. All of
them take the same batches from the same weights: AdamW, gradients clipped to norm 1.0::

    python benches/recipes.py                                     # the small ones
    python benches/recipes.py --cases series-full --rounds 1 --steps 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from cases import Run
from faststep import recipes
from mlx.utils import tree_flatten
from ways import COMPILED, EVALUATED, FAST, PLAIN, WAYS

CHUNKED = f"{FAST}, logits in chunks"
Batch = tuple[mx.array, ...]
WARM_UP = 2  # steps that trace, and settle the memory


@dataclass(frozen=True)
class System:
    """A model with its loss and batches.

    Attributes:
        title: What the table calls it.
        model: Makes the model, equal each time.
        loss: Makes the loss.
        batch: Draws a batch from a key.
        chunks: Whether the loss can do without the logits.
    """

    title: str
    model: Callable[[], nn.Module]
    loss: Callable[..., Any]
    batch: Callable[[mx.array], Batch]
    chunks: bool = True


def masked_batch(key: mx.array) -> Batch:
    """Draw tokens, targets and a mask of 16 texts of 64 tokens."""
    tokens = mx.random.randint(5, 2048, (16, 64), key=key)
    hidden = mx.random.uniform(shape=tokens.shape, key=key) < 0.3
    return mx.where(hidden, 3, tokens), mx.where(hidden, tokens, -100), mx.ones(tokens.shape, mx.bool_)


def series_batch(items: int, length: int, channels: int, tokens: int, vocabulary: int) -> Callable[[mx.array], Batch]:
    """Return what draws series, tokens of the text about each, and its mask."""

    def draw(key: mx.array) -> Batch:
        text = mx.random.randint(0, vocabulary, (items, tokens), key=key)
        return mx.random.normal((items, length, channels), key=key), text, mx.ones(text.shape, mx.bool_)

    return draw


def weighted_batch(key: mx.array) -> Batch:
    """Draw 16 texts of 64 bytes with their authority and entropy."""
    ids = mx.random.randint(0, 256, (16, 64), key=key)
    return ids, mx.random.uniform(0.25, 1.0, (16,), key=key), mx.random.uniform(4.0, 5.0, (16,), key=key)


def tiny_encoder() -> nn.Module:
    """Make the model of examples/encoder."""
    sizes = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4}
    return recipes.modernbert(config=sizes | {"num_attention_heads": 4, "local_attention": 32})


def small_series() -> nn.Module:
    """Make the model of examples/configs/mlx/quick_test.yaml."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    decoder = sizes | {"num_attention_heads": 4, "num_key_value_heads": 2}
    return recipes.series_model(6, width=64, kernel=25, stride=4, hidden=128, decoder=decoder)


def full_series() -> nn.Module:
    """Make the model of full size: a Llama-3.2-1B in 4 bits, a head over 128,256 tokens."""
    model = recipes.series_model(128)
    recipes.quantize(model, bits=4, group_size=64, modules=["decoder"])
    for layer in model.decoder.layers:  # one by one: what is drawn in float32 is gone before the next
        mx.eval(layer.parameters())
    return model


SYSTEMS = {
    "encoder": System(
        "ModernBERT, 4 layers x 128, 16 texts of 64 tokens, vocabulary 2,048",
        tiny_encoder,
        recipes.masked_lm,
        masked_batch,
    ),
    "series": System(
        "series of 100 x 6 in front of 2 frozen layers x 128, batch 8",
        small_series,
        recipes.series_to_text,
        series_batch(8, 100, 6, 10, 256),
    ),
    "series-full": System(
        "a series of 64 x 128 in front of a frozen Llama-3.2-1B in 4 bits, a text of 16 tokens, vocabulary 128,256",
        full_series,
        recipes.series_to_text,
        series_batch(1, 64, 128, 16, 128_256),
    ),
    "weighted": System(
        "GPT, 4 layers x 128, 16 weighted texts of 64 bytes",
        lambda: recipes.GPT(4, 128, 4, activation="gelu"),
        recipes.weighted_lm,
        weighted_batch,
        chunks=False,
    ),
}


def measure(system: System, way: str, steps: int) -> dict[str, Any]:
    """Take some steps one way; return milliseconds of each, the losses, and the peak of MLX's memory in MB."""
    mx.random.seed(0)
    model = system.model()
    mx.eval(model.parameters())
    measured = system.loss(in_chunks=True) if way == CHUNKED else system.loss()

    def loss_fn(model: nn.Module, *batch: mx.array) -> mx.array:
        found = measured(model, *batch)
        return found[0] if isinstance(found, tuple) else found

    run = Run(model, optim.AdamW(1e-4), loss_fn)
    step = WAYS[FAST if way == CHUNKED else way](run)
    batches = [system.batch(mx.random.key(i)) for i in range(4)]
    mx.eval(batches)
    times, losses = [], []
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            mx.synchronize()
            mx.reset_peak_memory()
        start = time.perf_counter()
        losses.append(step(*batches[number % 4]).item())
        mx.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    counted = {kind: sum(each.size for _, each in tree_flatten(tree)) for kind, tree in kinds(model).items()}
    return {"ms": times[WARM_UP:], "losses": losses, "peak": mx.get_peak_memory() / 1e6, "counts": counted}


def kinds(model: nn.Module) -> dict[str, Any]:
    """Return the trainable parameters of a model, and all."""
    return {"trainable": model.trainable_parameters(), "all": model.parameters()}


def child(name: str, way: str, steps: int) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--cases", name, "--steps", str(steps), "--way", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}, {way}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, rounds: int, steps: int) -> list[str]:
    """Measure a system all ways; return the lines of its table."""
    system = SYSTEMS[name]
    ways = [PLAIN, COMPILED, FAST, *([CHUNKED] if system.chunks else []), EVALUATED]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(rounds):
        at = number % len(ways)
        for way in ways[at:] + ways[:at]:
            found[way].append(child(name, way, steps))
    medians = {way: [statistics.median(each["ms"]) for each in found[way]] for way in ways}
    counted = found[FAST][0]["counts"]
    lines = [
        f"{system.title}: {counted['trainable']:,} numbers train, {counted['all'] - counted['trainable']:,} do not"
    ]
    lines += [
        "",
        "| way | ms a step | time over fast_step's | peak memory, MB | loss of the last step |",
        "|---|---:|---:|---:|---:|",
    ]
    for way in ways:
        ratio = statistics.median(a / b for a, b in zip(medians[way], medians[FAST], strict=True))
        peak = max(each["peak"] for each in found[way])
        loss = found[way][0]["losses"][-1]
        lines.append(f"| {way} | {statistics.median(medians[way]):,.1f} | {ratio:.2f} | {peak:,.0f} | {loss:.5f} |")
    return [*lines, ""]


def main() -> None:
    """Measure and print a table for each system."""
    parser = argparse.ArgumentParser(description="Measure the recipes' systems beside plain and compiled MLX.")
    parser.add_argument("--cases", nargs="+", choices=SYSTEMS, default=["encoder", "series", "weighted"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps of a way in a round (default: %(default)s)")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(SYSTEMS[args.cases[0]], args.way, args.steps)))
        return
    for name in args.cases:
        print(*compare(name, args.rounds, args.steps), sep="\n", flush=True)


if __name__ == "__main__":
    main()
