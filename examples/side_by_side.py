"""The same training steps in plain MLX, in compiled MLX and with ``fast_step``: equal losses, and the time of each."""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from faststep import fast_step
from rich.console import Console
from rich.table import Table

LossFn = Callable[..., mx.array]
StepFn = Callable[..., mx.array]


def plain(model: nn.Module, optimizer: optim.Optimizer, loss_fn: LossFn, max_grad_norm: float) -> StepFn:
    """Return the step as MLX's documentation writes it."""
    loss_and_grads = nn.value_and_grad(model, loss_fn)

    def step(*batch: mx.array) -> mx.array:
        loss, grads = loss_and_grads(model, *batch)
        grads, _ = optim.clip_grad_norm(grads, max_grad_norm)
        optimizer.update(model, grads)
        mx.eval(loss, model.state, optimizer.state)
        return loss

    return step


def compiled(model: nn.Module, optimizer: optim.Optimizer, loss_fn: LossFn, max_grad_norm: float) -> StepFn:
    """Return the plain step in ``mx.compile``, its state captured."""
    loss_and_grads = nn.value_and_grad(model, loss_fn)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, mx.random.state]

    @functools.partial(mx.compile, inputs=state, outputs=state)
    def traced(*batch: mx.array) -> mx.array:
        loss, grads = loss_and_grads(model, *batch)
        grads, _ = optim.clip_grad_norm(grads, max_grad_norm)
        optimizer.update(model, grads)
        return loss

    def step(*batch: mx.array) -> mx.array:
        loss = traced(*batch)
        mx.eval(loss, state)
        return loss

    return step


def fast(model: nn.Module, optimizer: optim.Optimizer, loss_fn: LossFn, max_grad_norm: float) -> StepFn:
    """Return the call that replaces both."""

    def step(*batch: mx.array) -> mx.array:
        loss: mx.array = fast_step(model, optimizer, loss_fn, *batch, max_grad_norm=max_grad_norm)
        return loss

    return step


WAYS = {"plain MLX": plain, "mx.compile'd": compiled, "fast_step": fast}
AS_INSTALLED = "mx.compile'd, MLX as pip installs it"
ALONE = "SIDE_BY_SIDE_ALONE"  # is set where only that is run
FEW = 5  # steps of that; the first, which compiles, is not timed


def compare(
    console: Console,
    new_run: Callable[[], tuple[nn.Module, optim.Optimizer]],
    loss_fn: LossFn,
    batches: Iterable[tuple[mx.array, ...]],
    max_grad_norm: float,
) -> None:
    """Take the steps three ways, in turns, from equal weights, and print losses, times and gains.

    Args:
        console: Where to print.
        new_run: Builds a model and its optimizer, equal each time.
        loss_fn: What ``nn.value_and_grad(model, loss_fn)`` takes.
        batches: The arguments of the loss behind the model, one tuple a step.
        max_grad_norm: The norm that gradients are clipped to.

    Raises:
        SystemExit: The losses differ by more than 1e-3.
    """
    if ALONE in os.environ:
        return tell(compiled(*new_run(), loss_fn, max_grad_norm), batches)
    steps: dict[str, StepFn] = {name: way(*new_run(), loss_fn, max_grad_norm) for name, way in WAYS.items()}
    losses: dict[str, list[float]] = {name: [] for name in WAYS}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with console.status("the same first steps three ways; the first of all compiles kernels ..."):
        for batch in batches:
            for name, step in steps.items():
                start = time.perf_counter()
                losses[name].append(float(step(*batch)))
                times[name].append(1e3 * (time.perf_counter() - start))
    if mx.default_device() == mx.cpu:
        with console.status(f"{FEW} steps with MLX's own BLAS and kernels, in a process of their own ..."):
            losses[AS_INSTALLED], times[AS_INSTALLED] = as_installed()
    console.print(table(losses, times))
    gap = max(largest_gap(losses[name], losses["plain MLX"]) for name in WAYS)
    if gap > 1e-3:
        sys.exit(f"the losses differ by {gap:.1e}: please report this")
    console.print(f"the losses agree: largest difference {gap:.1e}")


def as_installed() -> tuple[list[float], list[float]]:
    """Run this program once more, with the BLAS and the kernels of MLX's wheel; return its losses and milliseconds."""
    own = {"FASTSTEP_BLAS": "0", "FASTSTEP_KERNELS": "0", ALONE: "1"}
    done = subprocess.run([sys.executable, *sys.argv], env=os.environ | own, capture_output=True, text=True, check=True)
    losses, times = json.loads(done.stdout.splitlines()[-1])
    return losses, times


def tell(step: StepFn, batches: Iterable[tuple[mx.array, ...]]) -> NoReturn:
    """Take a few steps, print their losses and milliseconds, and end the program."""
    losses, times = [], []
    for batch in itertools.islice(batches, FEW):
        start = time.perf_counter()
        losses.append(float(step(*batch)))
        times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps([losses, times[1:] or times]))
    sys.exit()


def compare_rounds(new: Callable[[Callable[..., StepFn]], Any], batches: Iterable[Any], count: int) -> None:
    """Run the same rounds of a program in plain MLX and with ``fast_step``, and print how far their losses lie apart.

    ``mx.compile`` refuses steps whose losses reach other models, unless all of those are among its captured state.

    Args:
        new: Builds the program, equal each time, with what makes its steps; ``round(batch)`` returns losses.
        batches: What the rounds take.
        count: How many rounds.

    Raises:
        SystemExit: The losses differ by more than 1e-3.
    """
    given, losses = list(itertools.islice(batches, count)), {}
    for name in ("plain MLX", "fast_step"):
        program, start = new(WAYS[name]), time.perf_counter()
        losses[name] = [float(loss) for batch in given for loss in program.round(batch)]
        gap = largest_gap(losses[name], losses["plain MLX"])
        print(f"{name}: {count} rounds in {time.perf_counter() - start:.1f} s, difference {gap:.1e}")
        if gap > 1e-3:
            sys.exit(f"the losses differ by {gap:.1e}: please report this")
    print("the losses agree")


def table(losses: dict[str, list[float]], times: dict[str, list[float]]) -> Table:
    """Lay out the last loss, the largest difference from plain MLX and the median time of each way."""
    result = Table("way", "ms a step", "gain of fast_step", "loss", "after steps", "difference")
    for name in sorted(times, key=lambda name: name in WAYS):
        median, fastest = statistics.median(times[name]), statistics.median(times["fast_step"])
        gain = "" if name == "fast_step" else f"{median / fastest:.2f}x"
        count = len(losses[name])
        gap = largest_gap(losses[name], losses["plain MLX"][:count])
        result.add_row(name, f"{median:.1f}", gain, f"{losses[name][-1]:.5f}", str(count), f"{gap:.1e}")
    return result


def largest_gap(losses: list[float], reference: list[float]) -> float:
    """Return the largest absolute difference of two runs' losses, in nats."""
    return max(abs(loss - expected) for loss, expected in zip(losses, reference, strict=True))
