"""Compare 8-bit optimizer state with float32 state: held-out losses of three trainings, bytes, and time a step.

``python benches/state_bits.py`` takes about half an hour on two cores, and prints two tables.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from faststep import Step
from faststep.recipes import GPT, Bytes
from markdown import spread, table
from mlx.utils import tree_unflatten
from sklearn.datasets import load_digits
from timing import in_turns, run_block

Bits = Literal[8] | None
Batch = tuple[mx.array, mx.array]
SEEDS, ROUNDS, CONTEXT = range(4), 15, 64


class Case(NamedTuple):
    """One training: a new model and its optimizer, batches by seed, steps, and the batches of the held-out loss."""

    new: Callable[[], tuple[nn.Module, optim.Optimizer]]
    batches: Callable[[int], Iterator[Batch]]
    steps: int
    held_out: list[Batch]


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return the mean cross entropy, in nats."""
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


def windows(data: np.ndarray, batch: int, seed: int) -> Iterator[Batch]:
    """Yield random windows of bytes for ever: x and, one byte later, y, both int32 [batch, context]."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(data) - CONTEXT, size=(batch, 1))
        tokens = data[starts + np.arange(CONTEXT + 1)].astype(np.int32)
        yield mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:])


def gpt(steps: int) -> Case:
    """The GPT of examples/char_gpt.py on the source of Python's library."""

    def new() -> tuple[nn.Module, optim.Optimizer]:
        warm_up = optim.linear_schedule(0.0, 3e-3, 50)
        decay = optim.cosine_decay(3e-3, max(1, steps - 50), 1.5e-4)
        schedule = optim.join_schedules([warm_up, decay], [50])
        return GPT(4, 128, 4, CONTEXT), optim.AdamW(schedule, betas=[0.9, 0.99], weight_decay=0.1)

    training, held_out = Bytes(split="train").data, Bytes(split="held_out").data
    fixed = list(itertools.islice(windows(held_out, 32, 0), 8))
    return Case(new, functools.partial(windows, training, 8), steps, fixed)


class Digits(nn.Module):
    """Two convolutions and two linear layers for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.convs = [nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)]
        self.hidden, self.out = nn.Linear(4 * 4 * 64, 128), nn.Linear(128, 10)
        self.pool = nn.MaxPool2d(2, 2)

    def __call__(self, x: mx.array) -> mx.array:
        """Map images, [batch, 8, 8, 1], to logits, [batch, 10]."""
        x = nn.relu(self.convs[1](nn.relu(self.convs[0](x))))
        return self.out(nn.relu(self.hidden(self.pool(x).flatten(1))))


def digits(steps: int) -> Case:
    """A convolutional network on scikit-learn's handwritten digits, a fifth of them held out."""
    images, labels = load_digits(return_X_y=True)
    x, y = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32), labels.astype(np.int32)
    held = np.arange(len(x)) % 5 == 0

    def batches(seed: int) -> Iterator[Batch]:
        rng, rows = np.random.default_rng(seed), np.flatnonzero(~held)
        while True:
            chosen = rng.choice(rows, 64)
            yield mx.array(x[chosen]), mx.array(y[chosen])

    return Case(
        lambda: (Digits(), optim.Adam(5e-4, bias_correction=True)),
        batches,
        steps,
        [(mx.array(x[held]), mx.array(y[held]))],
    )


class Adapted(nn.Module):
    """A quantized layer with an adapter of rank 32, which alone trains."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        outputs, inputs = layer.weight.shape
        self.linear = nn.QuantizedLinear.from_linear(layer, group_size=64, bits=4)
        self.down, self.up = 0.02 * mx.random.normal((inputs, 32)), mx.zeros((32, outputs))
        self.linear.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        """Map [..., inputs] to [..., outputs]."""
        y: mx.array = self.linear(x)
        return y + (x @ self.down) @ self.up


def adapters(steps: int) -> Case:
    """Adapters over the 4-bit weights of that GPT, once it has trained, for other text: Python's documentation."""
    base = gpt(steps)
    trained, _ = run(base, 0, None)
    weights = trained.parameters()
    text = np.frombuffer("".join(topics.values()).encode(), np.uint8)
    parts = np.array_split(text, 20)
    fixed = list(itertools.islice(windows(parts[-1], 32, 0), 8))

    def new() -> tuple[nn.Module, optim.Optimizer]:
        model = GPT(4, 128, 4, CONTEXT)
        model.update(weights)
        model.freeze()
        linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        chosen = [(name, Adapted(layer)) for name, layer in linear if min(layer.weight.shape) >= 128]
        model.update_modules(tree_unflatten(chosen))
        return model, optim.AdamW(2e-3, weight_decay=0.01)

    return Case(new, functools.partial(windows, np.concatenate(parts[:-1]), 8), steps, fixed)


def run(case: Case, seed: int, bits: Bits) -> tuple[nn.Module, dict[str, float]]:
    """Train, and return the model with its held-out loss and the bytes of the optimizer's state for each parameter."""
    mx.random.seed(seed)
    model, optimizer = case.new()
    step = Step(model, optimizer, loss_fn, max_grad_norm=1.0, state_bits=bits)
    for batch in itertools.islice(case.batches(seed), case.steps):
        out = step(*batch)
    mx.eval(out.loss)
    loss = statistics.fmean(float(step.gradients(*batch)[0]) for batch in case.held_out)
    trained = step.stats.bytes
    return model, {"loss": loss, "bytes": trained["optimizer"] / (trained["parameters"] / 4)}


def losses(cases: dict[str, Case]) -> None:
    """Print the table of held-out losses: mean and standard deviation over the seeds, and of the pairs' differences."""
    rows = []
    for name, case in cases.items():
        runs = {bits: [run(case, seed, bits)[1] for seed in SEEDS] for bits in (None, 8)}
        both = [[each["loss"] for each in runs[bits]] for bits in (None, 8)]
        differences = [b - a for a, b in zip(*both, strict=True)]
        numbers = [f"{statistics.fmean(of):.4f} ± {statistics.stdev(of):.4f}" for of in (*both, differences)]
        sizes = [f"{runs[bits][0]['bytes']:.2f}" for bits in (None, 8)]
        rows.append([name, str(case.steps), *numbers, *sizes])
        print(rows[-1], flush=True)
    head = ["training", "steps", "float32 state", "8-bit state", "8-bit - float32", "bytes a parameter", "with 8 bits"]
    print("\n".join(table(head, rows)))


def times() -> None:
    """Print the table of milliseconds a step, both ways in turns."""
    rows = []
    for width, batch in ((128, 16), (256, 16)):
        blocks = {}
        data = Bytes(split="train").data
        given: Any = list(itertools.islice(windows(data, batch, 0), 4))
        for bits in (None, 8):
            mx.random.seed(0)
            model = GPT(4, width, 4, CONTEXT)
            step = Step(model, optim.AdamW(1e-4), loss_fn, max_grad_norm=1.0, state_bits=bits)
            blocks[str(bits)] = functools.partial(run_block, lambda x, y, step=step: step(x, y).loss, given, 4)
            for _ in range(8):
                blocks[str(bits)]()
        found = in_turns(blocks, ROUNDS, lambda: None)
        ratios = [b / a for a, b in zip(found["None"], found["8"], strict=True)]
        rows.append([f"GPT 4 x {width}, {batch} x {CONTEXT} tokens", *(spread(of) for of in (*found.values(), ratios))])
        print(rows[-1], flush=True)
    print("\n".join(table(["model", "float32 state, ms", "8-bit state, ms", "ratio of pairs"], rows)))


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["times", "losses"])
    parser.add_argument("--steps", type=int, default=400, help="of each training (%(default)s)")
    args = parser.parse_args()
    if "times" in args.parts:
        times()
    if "losses" in args.parts:
        makers = {"digits CNN, Adam": digits, "char GPT, AdamW": gpt, "adapters over 4 bits, AdamW": adapters}
        losses({name: make(args.steps) for name, make in makers.items()})


if __name__ == "__main__":
    main()
