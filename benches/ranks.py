"""A step over ranks beside MLX's own way, a compiled loop with `nn.average_gradients`, on this machine.

    python benches/ranks.py [--ranks 1 2] [--backend ring] [--width 512] [--steps 60]

Each rank runs both in turns, and prints milliseconds a step: the median of rank 0. "alone" is the exchange of the
gradients by itself, `nn.average_gradients` of arrays that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import faststep
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

WARM = 5


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return nn.losses.mse_loss(model(x), y)


def new(width: int) -> tuple[nn.Module, optim.Optimizer]:
    mx.random.seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())])
    mx.eval(model.parameters())
    return model, optim.AdamW(1e-3)


def plain(width: int, group: mx.distributed.Group) -> Callable[[mx.array, mx.array], None]:
    """Compile loss and gradients, and the update, with the exchange between the two."""
    model, optimizer = new(width)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]
    both = nn.value_and_grad(model, loss_fn)
    gradients = mx.compile(lambda x, y: both(model, x, y), inputs=state, outputs=state)

    @partial(mx.compile, inputs=state, outputs=state)
    def update(grads: dict[str, object]) -> mx.array:
        clipped, norm = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, clipped)
        return norm

    def step(x: mx.array, y: mx.array) -> None:
        loss, grads = gradients(x, y)
        norm = update(nn.average_gradients(grads, group))
        mx.eval(loss, norm, state)

    return step


def ours(width: int, group: mx.distributed.Group) -> Callable[[mx.array, mx.array], None]:
    step = faststep.Step(*new(width), loss_fn, group=group, max_grad_norm=1.0)

    def run(x: mx.array, y: mx.array) -> None:
        mx.eval(step(x, y).loss)

    return run


def alone(width: int, group: mx.distributed.Group) -> Callable[[mx.array, mx.array], None]:
    parameters = new(width)[0].trainable_parameters()

    def run(x: mx.array, y: mx.array) -> None:
        mx.eval(nn.average_gradients(parameters, group))

    return run


def rank(width: int, rows: int, steps: int, backend: str) -> None:
    group = mx.distributed.init(backend=backend, strict="MLX_RANK" in os.environ)
    x, y = (mx.random.normal((rows, width)) for _ in range(2))
    ways = {"mlx": plain(width, group), "ours": ours(width, group), "alone": alone(width, group)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM + steps):
        for name, run in ways.items():
            began = time.perf_counter()
            run(x, y)
            if number >= WARM:
                times[name].append(1e3 * (time.perf_counter() - began))
    if group.rank() == 0:
        print(json.dumps({name: statistics.median(each) for name, each in times.items()}))


def start(ranks: int, arguments: list[str], folder: Path) -> dict[str, float]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks + 1)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    (folder / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:ranks]]))
    variables = {"MLX_HOSTFILE": str(folder / "hosts.json"), "MLX_WORLD_SIZE": str(ranks)}
    variables |= {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[-1])}
    command = [sys.executable, __file__, "--rank", *arguments]
    children = []
    for number in range(ranks):
        own = {"MLX_RANK": str(number), "CUDA_VISIBLE_DEVICES": str(number)} if ranks > 1 else {}
        environment = {**os.environ, **(variables if ranks > 1 else {}), **own}
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit("a rank has failed")
    found: dict[str, float] = json.loads(said[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--backend", default="ring")
    parser.add_argument("--width", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(given.width[0], given.rows, given.steps, given.backend)
        return
    print("| ranks | MLP 4 x | MLX's way, ms | ours, ms | the exchange alone, ms |\n|---:|---:|---:|---:|---:|")
    for ranks in given.ranks:
        for width in given.width:
            options = {"width": width, "rows": given.rows, "steps": given.steps, "backend": given.backend}
            arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            with tempfile.TemporaryDirectory() as folder:
                found = start(ranks, arguments, Path(folder))
            print(
                f"| {ranks} | {width} | " + " | ".join(f"{found[name]:.2f}" for name in ("mlx", "ours", "alone")) + " |"
            )


if __name__ == "__main__":
    main()
