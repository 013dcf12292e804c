"""A step over ranks beside MLX's own way, a compiled loop with `nn.average_gradients`, on this machine.

    python benches/ranks.py [--ranks 1 2] [--cases mlp512] [--rounds 10]
    python benches/ranks.py --backend nccl --cases gpt6 gpt2 gpt2-bf16 --torch python3

The ranks of one case take all ways in turns, a block of steps each. "alone" is the exchange of the gradients by itself,
`nn.average_gradients` of arrays that are there. `--torch` names a Python that has PyTorch: the same model in its
DistributedDataParallel runs behind the others (`torch_ranks.py`).
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
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import faststep
import frameworks
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from cases import CASES, MLP, Case, Run
from markdown import table
from timing import in_turns, run_block
from ways import IN_FLIGHT, StepFn

BLOCK = 8  # steps of a way before the next one's turn
WARM = 10  # steps, in which all is traced, compiled and captured
MLPS = {
    f"mlp{width}": Case(f"MLP, 4 layers x {width}, batch 64", MLP, {"layers": 4, "width": width}, batch=64)
    for width in (128, 512, 4096)
}
ALL = {**CASES, **MLPS}
Group = mx.distributed.Group


def mlx_way(run: Run, group: Group, waits: bool) -> StepFn:
    """Compile loss and gradients, and the update, with the exchange between the two."""
    model, optimizer = run.model, run.optimizer
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]
    both = nn.value_and_grad(model, run.loss_fn)
    gradients = mx.compile(lambda x, y: both(model, x, y), inputs=state, outputs=state)
    under_way: deque[mx.array] = deque()

    @partial(mx.compile, inputs=state, outputs=state)
    def update(grads: dict[str, object]) -> mx.array:
        clipped, norm = optim.clip_grad_norm(grads, run.max_grad_norm)
        optimizer.update(model, clipped)
        return norm

    def step(x: mx.array, y: mx.array) -> mx.array:
        loss, grads = gradients(x, y)
        norm = update(nn.average_gradients(grads, group))
        if waits:
            mx.eval(loss, norm, state)
            return loss
        mx.async_eval(loss, norm, state)
        under_way.append(loss)
        if len(under_way) > IN_FLIGHT:
            mx.eval(under_way.popleft())
        return loss

    return step


def ours(run: Run, group: Group, **options: Any) -> StepFn:
    step = faststep.Step(run.model, run.optimizer, run.loss_fn, group=group, max_grad_norm=run.max_grad_norm, **options)
    return lambda *batch: step(*batch).loss


def alone(run: Run, group: Group) -> StepFn:
    parameters = run.model.trainable_parameters()

    def exchange(*_: mx.array) -> mx.array:
        mx.eval(averaged := nn.average_gradients(parameters, group))
        return next(value for _, value in nn.utils.tree_flatten(averaged))

    return exchange


WAYS = {
    "mlx": partial(mlx_way, waits=True),
    "mlx, async": partial(mlx_way, waits=False),
    "fast_step": ours,
    "fast_step, replay=False": partial(ours, replay=False),
    "fast_step, shard_optimizer": partial(ours, shard_optimizer=True),
    "alone": alone,
}


def rank(case: Case, ways: list[str], rounds: int, backend: str) -> None:
    """Measure, as one rank; rank 0 prints a line of JSON: milliseconds and bytes by way."""
    group = mx.distributed.init(backend=backend, strict="MLX_RANK" in os.environ)
    batches: Any = case.batches()
    steps, peaks = {}, {}
    for way in ways:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        steps[way] = WAYS[way](case.new_run(), group)
        run_block(steps[way], batches, WARM)
        peaks[way] = mx.get_peak_memory() - before
    blocks = {way: partial(run_block, step, batches, BLOCK) for way, step in steps.items()}
    times = in_turns(blocks, rounds, lambda: None)
    if group.rank() == 0:
        print(json.dumps({way: {"ms": times[way], "peak": peaks[way]} for way in ways}))


def start(ranks: int, command: list[str], folder: Path) -> dict[str, Any]:
    """Run a command as so many ranks, of which the first one prints a line of JSON last."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks + 1)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    (folder / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:ranks]]))
    variables = {"MLX_HOSTFILE": str(folder / "hosts.json"), "MLX_WORLD_SIZE": str(ranks)}
    variables |= {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[-1])}
    children = []
    for number in range(ranks):
        own = {"MLX_RANK": str(number), "CUDA_VISIBLE_DEVICES": str(number), **variables} if ranks > 1 else {}
        base = os.environ if command[0] == sys.executable else frameworks.environment()
        environment = {**base, **own}
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit("a rank has failed")
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def measure(ranks: int, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways with so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        options = ["--cases", name, "--rounds", str(given.rounds), "--backend", given.backend, "--ways", *given.ways]
        found = start(ranks, [sys.executable, __file__, "--rank", *options], place)
        if given.torch:
            np.savez(place / "arrays.npz", allow_pickle=False, **frameworks.arrays(ALL[name]))
            about = {**frameworks.description(ALL[name]), "rounds": given.rounds, "block": BLOCK, "warm": WARM}
            (place / "case.json").write_text(json.dumps(about))
            peer = Path(__file__).with_name("torch_ranks.py")
            found |= start(ranks, [given.torch, str(peer), folder], place)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--backend", default="ring", help="ring or nccl")
    parser.add_argument("--cases", nargs="+", default=["mlp128", "mlp512"], choices=list(ALL))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write all that was measured")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(ALL[given.cases[0]], given.ways, given.rounds, given.backend)
        return
    results: dict[str, dict[str, Any]] = {}
    for name in given.cases:
        found = {ranks: measure(ranks, name, given) for ranks in given.ranks}
        results[ALL[name].title] = found
        print(f"\n{ALL[name].title}\n")
        print("\n".join(table(["way", "ranks", "ms a step", "10 % to 90 %", "of one rank's speed", "MB"], rows(found))))
        sys.stdout.flush()
        if given.json:
            given.json.write_text(json.dumps(results))


def rows(found: dict[int, dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a table: the share of perfect scaling is that of a way's time with fewest ranks."""
    lines = []
    first = found[min(found)]
    for ranks, ways in found.items():
        for way, measured in ways.items():
            ms = statistics.median(measured["ms"])
            least, most = np.quantile(measured["ms"], [0.1, 0.9])
            share = "" if way == "alone" else f"{statistics.median(first[way]['ms']) / ms:.0%}"
            lines.append(
                [way, str(ranks), f"{ms:.2f}", f"{least:.2f} to {most:.2f}", share, f"{measured['peak'] / 1e6:.0f}"]
            )
    return lines


if __name__ == "__main__":
    main()
