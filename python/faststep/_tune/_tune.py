"""`tune`: environment variables that make the user's step faster, each setting tried in processes of its own."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from faststep._tune._report import LEAST_ROUNDS, Tuning
from faststep._tune._search import INSIDE, Search


def tune(
    target: str | Callable[[], Iterator[Any]],
    *,
    settings: Iterable[Mapping[str, object]] | None = None,
    seconds: float = 3.0,
    rounds: int = 5,
    timeout: float = 300.0,
    tolerance: float = 1e-5,
) -> Tuning:
    """Find the environment variables that make a training step faster on this machine, and by how much.

    MLX reads some settings once, when it starts: how many operations and megabytes make one command buffer or CUDA
    graph, how many threads share a large matrix product. Which of them help depends on the model and the machine, so
    each is tried on your own step, in child processes one at a time; the environment of this process stays as it is.

    The step is a training loop in a function without arguments that yields the loss of every step and goes on for
    ever. It may use `fast_step`, a `Step`, or plain MLX; seeds are set before it is called:

        def training():                      # in train.py
            model, optimizer = Model(), optim.AdamW(1e-3)
            while True:
                for x, y in batches:
                    yield fast_step(model, optimizer, loss_fn, x, y)

    Each child takes the first steps, whose losses are compared, warms up, and measures the median time of a step. In
    every round each setting runs once, in rotating order, next to the environment as it is, which runs twice: the ratio
    of those two is the noise. A setting counts as faster when the median of its ratios to the baseline is at most 0.98
    and their upper quartile lies below the lower quartile of that noise. The best value of each variable, all of them
    together, is then measured again in fresh children, against the best one alone, and only what passes once more is
    recommended. A setting that was faster in neither of its first two rounds is left out of the others. One that fails,
    takes too long or changes the losses is reported and never recommended. Each child writes a line to stderr; Ctrl-C
    ends them and returns what was measured so far.

    Args:
        target: "module:function" or "file.py:function"; or such a function itself, defined in a module or script. A
            script that calls `tune` does so below `if __name__ == "__main__":`, because the children import it.
        settings: What to try: dicts of variables that are set together. None: `default_settings` of the device that the
            step runs on.
        seconds: How long each child measures, after a warm-up of a quarter of it.
        rounds: How often each setting is measured, at least 3.
        timeout: The seconds that a child may take in all.
        tolerance: The relative difference up to which losses count as equal.

    Returns:
        The settings to use, the table of all that were tried, and how sure that is.

    Raises:
        ValueError: `target` has another form, or a number is out of its range.
        TypeError: `target` is a function that a child cannot import: a lambda, or one inside a function.
        RuntimeError: The step fails in the environment as it is (with the end of its traceback), or `tune` is called
            while a child imports the target.
        KeyboardInterrupt: Ctrl-C before anything was measured.

    Example:
        >>> print(faststep.tune("train.py:training"))  # doctest: +SKIP
    """
    if INSIDE in os.environ:
        raise RuntimeError('tune() is called while its target is imported: put it below `if __name__ == "__main__":`')
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"rounds: expected at least {LEAST_ROUNDS}, got {rounds}")
    for name, value in {"seconds": seconds, "timeout": timeout, "tolerance": tolerance}.items():
        if not value > 0:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    chosen = None if settings is None else _chosen(settings)
    search = Search(_address(target), seconds, timeout, tolerance)
    back_end = search.first().back_end
    try:
        search.run(default_settings(back_end) if chosen is None else chosen, rounds)
    except KeyboardInterrupt:
        return search.result(interrupted=True)
    return search.result(interrupted=False)


def default_settings(back_end: str) -> list[dict[str, str]]:
    """Return the settings that `tune` tries on a back end; those that the environment has already are left out.

    - "cuda": `MLX_MAX_OPS_PER_BUFFER` and `MLX_MAX_MB_PER_BUFFER`: how many kernels, and how many million elements that
      they read, make a graph before it is launched. By default 100 and 1000 on H100, B200 and consumer Blackwell, 20
      and 400 on A100, 20 and 25 on DGX Spark, 20 and 100 elsewhere. Raising one may do nothing while the other ends the
      graph, so they are tried together too. Longer graphs may take more memory. `MLX_USE_CUDA_GRAPHS` is 1 by default.
    - "metal": the same two, for command buffers: 20 to 50 and 40 to 50 by default, by the kind of chip.
    - "cpu": `OPENBLAS_NUM_THREADS`, how many threads share a large matrix product, by default one for each core and 16
      at most: one leaves the other cores to other programs. `GLIBC_TUNABLES` with huge pages for what malloc gives,
      from which MLX takes its arrays (glibc 2.35 and later; others ignore it). That may take more memory.

    None of them changes what is computed, but for the order of sums in products of few rows. `MLX_ENABLE_TF32`, and
    `MLX_CUDA_USE_CUDNN_SDPA`, do: they are tried when `tune(..., settings=...)` names them.

    Args:
        back_end: "cpu", "cuda" or "metal".

    Returns:
        Dicts of variables that are set together.
    """
    # Defaults: get_graph_limits() in mlx/backend/cuda/device.cpp, and mlx/backend/metal/device.cpp, MLX 0.32.
    ops, mb = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
    if back_end == "cpu":
        settings = [{"OPENBLAS_NUM_THREADS": str(count)} for count in _thread_counts()]
        settings += [{"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}] * ("GLIBC_TUNABLES" not in os.environ)
    elif back_end == "cuda":
        settings = [{ops: "20"}, {ops: "50"}, {ops: "200"}, {mb: "100"}, {mb: "4000"}]
        settings += [{ops: "100", mb: "1000"}, {ops: "400", mb: "4000"}, {"MLX_USE_CUDA_GRAPHS": "0"}]
    else:
        settings = [{ops: "10"}, {ops: "100"}, {ops: "400"}, {mb: "20"}, {mb: "100"}, {mb: "400"}]
        settings += [{ops: "100", mb: "100"}, {ops: "400", mb: "400"}]
    return [s for s in settings if any(os.environ.get(name) != value for name, value in s.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tune` from a command line, print its table to stdout, and return the exit status.

    Args:
        arguments: What stands on the line; None: what this process was started with.

    Returns:
        0; 1 for a step that fails; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="faststep tune", description="Find faster settings for a training step.")
    parser.add_argument("target", help='"module:function" or "file.py:function": a loop that yields every loss')
    parser.add_argument(
        "--set", action="append", metavar='"A=1 B=2"', help="variables to try together; may be given several times"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each child measures (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each setting is measured (default: 5)")
    args = parser.parse_args(arguments)
    try:
        settings = args.set and [dict(word.split("=", 1) for word in shlex.split(words)) for words in args.set]
        tuning = tune(args.target, settings=settings, seconds=args.seconds, rounds=args.rounds)
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(tuning)
    return 130 if tuning.interrupted else 0


def _chosen(settings: Iterable[Mapping[str, object]]) -> list[dict[str, str]]:
    chosen = [{name: str(value) for name, value in setting.items()} for setting in settings]
    if not chosen or not all(chosen):
        raise ValueError(f"settings: expected dicts of at least one variable each, got {chosen}")
    return chosen


def _thread_counts() -> list[int]:
    """Return the powers of two below the number of cores, and that number where the environment asks for fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fewer = "OPENBLAS_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in os.environ
    return [1 << power for power in range(cores.bit_length()) if 1 << power < cores] + [cores] * fewer


def _address(target: str | Callable[[], Iterator[Any]]) -> str:
    """Return "module:function" or "file.py:function"."""
    if isinstance(target, str):
        place, _, name = target.rpartition(":")
        if not place or not name:
            raise ValueError(f'target: expected "module:function" or "file.py:function", got "{target}"')
        if place.endswith(".py") and not Path(place).is_file():
            raise ValueError(f"target: there is no file {place}")
        return target
    name, source = getattr(target, "__qualname__", ""), sys.modules.get(getattr(target, "__module__", ""))
    file = getattr(source, "__file__", None)
    if source is None or not file or not name or "<" in name:  # <lambda>, <locals>
        raise TypeError(
            f"target: expected a function of a module or a script, which child processes can import, got {target!r}"
        )
    if source.__name__ == "__main__" and source.__spec__ is None:  # a script
        return f"{Path(file).resolve()}:{name}"
    return f"{source.__spec__.name if source.__spec__ else source.__name__}:{name}"
