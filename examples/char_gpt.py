"""Train a byte-level GPT on the source of Python's standard library.

Model (``faststep.recipes.GPT``), loss and optimizer are plain MLX; the training step is one call::

    loss = fast_step(model, optimizer, loss_fn, x, y, max_grad_norm=1.0)

First the same 20 steps run in plain MLX, in compiled MLX and with ``fast_step``: the numbers agree, and the table shows
what the step gains. Then the model trains, shows its loss on files it never sees, and writes some Python of its own::

    python examples/char_gpt.py --steps 800 --out runs/char_gpt

``char_gpt.yaml`` is the config of the same training.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

try:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    import numpy as np
    from faststep import fast_step
    from faststep.recipes import GPT, Bytes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from side_by_side import compare
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. What this example needs: pip install 'mlx-faststep[cpu,train]' (cuda13 for cpu on a GPU)")

Batch = tuple[mx.array, mx.array]
MAX_GRAD_NORM = 1.0


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return the mean cross entropy of the next byte, in nats."""
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


def new_run(args: argparse.Namespace) -> tuple[GPT, optim.AdamW]:
    """Build a model and its optimizer; equal seeds give equal weights."""
    mx.random.seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context)
    warm_up = optim.linear_schedule(0.0, args.learning_rate, args.warm_up)
    decay = optim.cosine_decay(args.learning_rate, max(1, args.steps - args.warm_up), args.learning_rate / 20)
    schedule = optim.join_schedules([warm_up, decay], [args.warm_up])
    return model, optim.AdamW(learning_rate=schedule, betas=[0.9, 0.99], weight_decay=0.1)


def read_library() -> tuple[np.ndarray, np.ndarray]:
    """Read the standard library's top-level modules as bytes: those to train on, and every 20th, held out."""
    return Bytes(split="train").data, Bytes(split="held_out").data


def batches(data: np.ndarray, args: argparse.Namespace) -> Iterator[Batch]:
    """Yield random windows for ever: x and, one byte later, y, both int32 [batch, context]."""
    rng = np.random.default_rng(args.seed)
    window = np.arange(args.context + 1)
    while True:
        starts = rng.integers(len(data) - args.context, size=(args.batch, 1))
        tokens = data[starts + window].astype(np.int32)
        yield mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:])


@dataclass
class Curve:
    """The losses of a run, in nats a byte: one for every step, and some on held-out files."""

    train: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)


def train(
    console: Console, args: argparse.Namespace, data: Iterator[Batch], held_out: list[Batch]
) -> tuple[GPT, Curve]:
    """Train a new model and return it with its loss curve."""
    model, optimizer = new_run(args)
    curve, losses, start = Curve(), [], time.perf_counter()
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=args.steps)
        for step, (x, y) in enumerate(itertools.islice(data, args.steps), start=1):
            losses.append(fast_step(model, optimizer, loss_fn, x, y, max_grad_norm=MAX_GRAD_NORM))
            evaluates = step % args.eval_every == 0 or step == args.steps
            if step % 10 and not evaluates:
                continue
            curve.train += map(float, losses)  # the only place that waits for the steps
            speed = len(losses) * x.size / (time.perf_counter() - start)
            text = f"loss {statistics.fmean(curve.train[-50:]):.3f}, {speed:,.0f} tokens/s"
            progress.update(bar, completed=step, description=text)
            if evaluates:
                curve.held_out[step] = evaluate(model, held_out)
                progress.print(f"step {step:>5}: {text}, held-out loss {curve.held_out[step]:.3f}")
            losses, start = [], time.perf_counter()
    return model, curve


def evaluate(model: GPT, held_out: list[Batch]) -> float:
    """Return the mean loss on the held-out batches, in nats a byte."""
    return statistics.fmean(float(loss_fn(model, x, y)) for x, y in held_out)


def generate(model: GPT, context: int, prompt: str, length: int, temperature: float = 0.7) -> str:
    """Let the model continue the prompt by so many bytes."""
    tokens = list(prompt.encode())
    for _ in range(length):
        logits = model(mx.array([tokens[-context:]]))[0, -1]
        tokens.append(int(mx.random.categorical(logits / temperature)))
    return bytes(tokens).decode(errors="replace")


def plot(curve: Curve, file: Path) -> None:
    """Draw the loss curve as PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats a byte", title="A byte-level GPT on Python's library")
    width = min(25, len(curve.train))
    smooth = np.convolve(curve.train, np.full(width, 1 / width), mode="valid")
    axes.plot(range(1, len(curve.train) + 1), curve.train, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(range(width, len(curve.train) + 1), smooth, color="tab:blue", label=f"training, mean of {width} steps")
    axes.plot(list(curve.held_out), list(curve.held_out.values()), "o-", color="tab:orange", label="held-out files")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the source of Python's standard library.")
    parser.add_argument("--steps", type=int, default=800, help="training steps (default: %(default)s)")
    parser.add_argument("--compare", type=int, default=20, help="steps taken three ways first; 0: none (%(default)s)")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between held-out losses (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/char_gpt"), help="folder for the results (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="windows in a batch (%(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes in a window (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the residual stream (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="of each attention (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="after warm-up (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=50, help="steps of it (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Compare, train, sample, and write the results."""
    args, console = parse_arguments(), Console(highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)
    training, held_out = read_library()
    console.print(f"{len(training) / 1e6:.1f} MB of Python to train on, {len(held_out) / 1e6:.1f} MB held out")
    if args.compare:
        steps = itertools.islice(batches(training, args), args.compare)
        compare(console, lambda: new_run(args), loss_fn, steps, MAX_GRAD_NORM)
    held_out_batches = list(itertools.islice(batches(held_out, args), 8))
    model, curve = train(console, args, batches(training, args), held_out_batches)
    sample = generate(model, args.context, prompt="def ", length=400)
    console.rule("what it writes")
    console.print(sample, markup=False)
    console.rule()
    plot(curve, args.out / "loss.png")
    (args.out / "sample.txt").write_text(sample, encoding="utf-8")
    model.save_weights(str(args.out / "model.safetensors"))
    console.print(f"loss.png, sample.txt and model.safetensors are in {args.out}")


if __name__ == "__main__":
    main()
