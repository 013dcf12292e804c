"""Checks of a training: that it resumes exactly, and what a bad batch does."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from faststep.cli._mlx_launch import LOCAL, Launch, first_to_end
from faststep.cli._status import DIFFERS, FAILED, ConfigFile, Exit, Overrides

if TYPE_CHECKING:
    from faststep.checkpoints import Checkpoint
    from faststep.config import Config

_PLACE = "place in the data"
_CHECKPOINTS = 4  # between two kills, about, so that most have one of their own to go on from


def verify_resume(
    config: ConfigFile,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(help="How many times the second run is killed; 0: never.", min=0)] = 5,
    steps: Annotated[int, typer.Option(help="How many steps to train.", min=2)] = 40,
    seed: Annotated[int, typer.Option(help="Random seed for the moments of the kills.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Keep both runs in this folder.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="In so many processes, of which one is killed each time.")] = 1,
    port: Annotated[int | None, typer.Option("--starting-port", "-p", help="The first port of the ring.")] = None,
) -> None:
    """Prove that a training resumes exactly: run it twice, kill the second one (SIGKILL) at random, and compare.

    Weights, optimizer state, random states and the place in the data have to be the same to the bit. Exit code 3 if
    they are not. Kernels of a GPU may add in another order from run to run: `--kills 0` shows if yours do. With
    --ranks it is `mlx.launch` on this machine, one rank is killed, and the others have to end by themselves.
    """
    from faststep.config import load

    every = max(1, steps // (_CHECKPOINTS * (kills + 1)))
    change = [*(overrides or []), f"train.steps={steps}", f"checkpoints.every={every}", "train.log_every=1"]
    loaded = load(config, change)
    folder = Path(tempfile.mkdtemp(prefix="faststep-")) if keep is None else keep
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise Exit(f"{keep}: expected an empty folder, found files in it")
    try:
        whole, killed = _begin(loaded, folder / "whole"), _begin(loaded, folder / "killed")
        ports = () if port is None else ("--starting-port", str(port))
        launch = None if ranks == 1 else Launch((LOCAL,), ranks, ports)
        typer.echo(f"{steps} steps without a stop ...")
        _finish(whole, launch)
        seconds = _seconds(whole)
        typer.echo(f"  {seconds:.1f} s after the first one\nthe same, killed {kills} times ...")
        dead = _kill(killed, kills, _steps(whole), random.Random(seed), launch)
        _finish(killed, launch)
        _compare(whole, killed)
        if kills and not dead:
            raise Exit("nothing is proved: the training had ended before each kill; use more --steps", FAILED)
        typer.echo(
            f"proved: killed {dead} times and resumed, it ends as if nothing had happened" if kills else "the same"
        )
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _begin(config: Config, run: Path) -> Path:
    from faststep.cli._saved import save

    return save(config.model_copy(update={"run": str(run)}))


class _Training:
    """A process that goes on with a run, or several, of which all end with the first."""

    def __init__(self, run: Path, launch: Launch | None) -> None:
        command = ["resume", str(run)]
        self._launch, self._said = launch, tempfile.TemporaryFile("w+")
        line = [sys.executable, "-m", "faststep", *command] if launch is None else launch.line(command)
        stdin = None if launch is None else subprocess.PIPE
        self._process = subprocess.Popen(line, stdin=stdin, stdout=subprocess.DEVNULL, stderr=self._said)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> tuple[int, str]:
        """Return the exit code, and the text on stderr."""
        code = self._process.wait()
        with self._said:
            self._said.seek(0)
            said = self._said.read()
        return (code if self._launch is None else first_to_end(said.splitlines())[1]), said

    def kill(self, rng: random.Random) -> None:
        """Kill the process, or any of the ranks."""
        ranks = [self._process.pid] if self._launch is None else _children(self._process.pid)
        if ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(ranks), signal.SIGKILL)


def _children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return [pid for pid, above in pairs if above == parent]


def _finish(run: Path, launch: Launch | None) -> None:
    code, said = _Training(run, launch).wait()
    if code:
        raise Exit(f"the training failed with exit code {code}:\n{said[-3000:]}", FAILED)


def _kill(run: Path, kills: int, records: int, rng: random.Random, launch: Launch | None) -> int:
    """Kill the training behind random records of its log, of which there are so many without a stop.

    Every fourth time it is killed while it writes a checkpoint.

    Returns:
        The number of kills; the training may have ended before some.
    """
    dead = 0
    for number in range(1, kills + 1):
        before = _steps(run)
        training = _Training(run, launch)
        last = before + rng.uniform(0.0, 1.0) * max(records - 2, 0) / kills
        while not training.is_over and _steps(run) <= last:
            time.sleep(0.01)
        what = "killed"
        if number % 4 == 0:
            what = "killed while it wrote a checkpoint,"
            while not training.is_over and not any((run / "checkpoints").glob(".*.partial")):
                time.sleep(0.001)
        if not training.is_over:
            training.kill(rng)
        killed = training.wait()[0] == -signal.SIGKILL
        dead += killed
        ended = what if killed else "it had ended"
        typer.echo(f"  {number} of {kills}: {ended} at step {_step(run)}, {_newest(run)}")
    return dead


def _steps(run: Path) -> int:
    """Return how many records of steps there are."""
    log = run / "log.jsonl"
    return log.read_bytes().count(b'"kind": "step"') if log.exists() else 0


def _seconds(run: Path) -> float:
    """Return how long the steps behind the first one took."""
    from faststep.report import read_log

    times: Any = read_log(run).steps["time"]
    return float(times[-1] - times[0])


def _step(run: Path) -> int:
    from faststep.report import read_log

    steps: Any = read_log(run).steps["step"] if _steps(run) else []
    return int(max(steps, default=0))


def _newest(run: Path) -> str:
    from faststep.cli._supervisor import newest

    number = newest(run)
    return "no checkpoint yet" if number < 0 else f"newest checkpoint of step {number}"


def _compare(whole: Path, killed: Path) -> None:
    from faststep.checkpoints import Checkpoints

    ends = [_contents(Checkpoints(run / "checkpoints").list()[-1]) for run in (whole, killed)]
    same = True
    for name in ends[0]:
        equal = ends[0][name] == ends[1][name]
        if name == _PLACE and not equal:  # a stream's place can be written in more than one way
            equal = _next_batch(whole, ends[0][name]) == _next_batch(killed, ends[1][name])
        same &= equal
        typer.echo(f"{'same  ' if equal else 'DIFFER'} {name}: {_short(ends[0][name])} {_short(ends[1][name])}")
    if not same:
        raise Exit("the second training did not end as the first one; `--kills 0` tells whether two ever do", DIFFERS)


def _next_batch(run: Path, place: Any) -> str:
    """Return a hash of the batch that comes next at a place in the data."""
    from mlx.utils import tree_flatten

    from faststep.cli._saved import config_of
    from faststep.config import build

    loader = build(config_of(run)).loader
    loader.load_state(place)
    digest = hashlib.sha256()
    with loader:
        leaves: Any = tree_flatten(next(iter(loader), ()))
        for name, leaf in leaves:
            digest.update(f"{name} {leaf.tolist() if hasattr(leaf, 'tolist') else leaf}\n".encode())
    return digest.hexdigest()


def _contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what has to be the same: checksums of the files, and the numbers but for seconds."""
    digest = checkpoint.digest()
    numbers = {name: value for name, value in digest.pop("numbers").items() if name != "seconds"}
    named = {"random states": digest.pop("random"), _PLACE: digest.pop("loader")}
    return digest | named | {"numbers": numbers}


def _short(value: Any) -> str:
    return str(value)[:12] if isinstance(value, str) else ""


def reproduce(
    bundle: Annotated[Path, typer.Argument(help="A folder in RUN/bundles.", show_default=False)],
) -> None:
    """Run the batch of a bundle again, and show the loss and every gradient that is not finite.

    Exit code 3 if loss and gradients are finite this time.
    """
    from faststep.config import build
    from faststep.config import validate as validate_config
    from faststep.training import bundle_config, reproduce

    try:
        values = bundle_config(bundle)
        if values is None:
            raise Exit(f"{bundle}: it is of a training without a config: use faststep.training.reproduce in Python")
        found = reproduce(bundle, build(validate_config(values)).step)
    except ValueError as error:
        raise Exit(str(error)) from None
    typer.echo(f"loss {found.loss}")
    table = sorted(found.gradients.items(), key=lambda item: (-item[1][1], -item[1][0]))
    for name, (norm, bad, size) in table:
        typer.echo(f"{name}: norm {norm:.6g}" + (f", {bad:,} of {size:,} elements are not finite" if bad else ""))
    if found.finite:
        raise Exit("loss and gradients are finite: nothing is wrong with this batch here", DIFFERS)
