"""One training of several processes: `mlx.launch` with the command that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from faststep.cli._mlx_launch import LOCAL, Launch
from faststep.cli._saved import config_of
from faststep.cli._status import Exit, Overrides

_BACKENDS = ("ring", "nccl", "jaccl", "jaccl-ring")  # `mpirun` starts those of MPI


def launch(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|RUN", help="The YAML file; or the folder of a run, to go on.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("-n", "--repeat-hosts", min=1, help="So many ranks on each host.")] = 1,
    hosts: Annotated[str, typer.Option(help="The hosts, with commas; reached by ssh.")] = LOCAL,
    hostfile: Annotated[Path | None, typer.Option(help="The JSON file of the hosts, in their place.")] = None,
    backend: Annotated[str | None, typer.Option(help="ring, nccl, jaccl or jaccl-ring; else as MLX chooses.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set it for all. Several times.")] = None,
    port: Annotated[int | None, typer.Option("--starting-port", "-p", help="The first port of the ring.")] = None,
    python: Annotated[str | None, typer.Option(help="The interpreter on the hosts.")] = None,
    cwd: Annotated[str | None, typer.Option(help="The working directory on the hosts.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Train nothing: compare the ranks, and measure their network.")
    ] = False,
    supervise: Annotated[
        bool, typer.Option(help="Start all ranks again from the newest checkpoint when one dies.")
    ] = False,
    fewer: Annotated[
        bool, typer.Option("--fewer", help="With --supervise: go on with a part of them when they die twice in a row.")
    ] = False,
) -> None:
    """Train in several processes, as one training: `mlx.launch` with `train`, or `resume` where a run is given.

    The options are those of `mlx.launch`. Ctrl-C and SIGTERM end all ranks behind one update, with a checkpoint.
    """
    from faststep.cli import _supervisor
    from faststep.config import load

    if check and supervise:
        raise Exit("--check: expected no --supervise with it")
    if backend not in (None, *_BACKENDS):
        raise Exit(f"--backend: expected one of {', '.join(_BACKENDS)}, got {backend!r}")
    if fewer and (hostfile is not None or not supervise):
        raise Exit("--fewer: expected --supervise with it, and hosts by --hosts or -n alone, not by --hostfile")
    given = {"--backend": backend, "--starting-port": port, "--python": python, "--cwd": cwd, "--hostfile": hostfile}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    options += [word for each in env or [] for word in ("--env", each)]
    ranks = Launch(() if hostfile else tuple(hosts.split(",")), number, tuple(options), python, fewer)
    is_run = what.is_dir()
    loaded = config_of(what, overrides) if is_run else load(what, overrides or [])
    changes = [*(overrides or []), f"run={loaded.run}"]
    command = ["check-ranks" if check else "resume" if is_run else "train", str(what)]
    if supervise:
        load_again = (lambda more: config_of(what, more)) if is_run else (lambda more: load(what, more))
        raise SystemExit(_supervisor.supervise(command, load_again, changes, ranks))
    raise SystemExit(_supervisor.run([*command, *_supervisor.set_(changes)], ranks))
