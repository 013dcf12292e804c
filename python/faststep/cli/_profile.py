"""The command that shows where the time of a training's steps goes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from faststep.cli._status import ConfigFile, Exit, Overrides


def profile(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="How many calls of the step to record, after the warm-up.")] = 30,
    warmup: Annotated[
        int, typer.Option(min=0, help="How many calls to make first, while traces are made and kernels compiled.")
    ] = 5,
    trace: Annotated[
        Path | None, typer.Option(help="Write the recording to this file, for Perfetto or Chrome.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with it, and with memory by use.")] = None,
) -> None:
    """Show where the time and the memory of a config's steps go: data, stages, operations; nothing is saved."""
    from rich.progress import track

    from faststep._profile import profile as recorded
    from faststep._step import call_with
    from faststep.config import build, load

    if trace is not None and trace.exists():
        raise Exit(f"{trace}: there is such a file already")
    built = build(load(config, overrides or []))
    batches = itertools.chain.from_iterable(itertools.repeat(built.loader))
    last: Any = None
    for _ in track(range(warmup), "warming up", transient=True):
        last = next(batches)
        call_with(last, built.step)
    built.step.synchronize()
    with recorded(built.step) as found:
        for last in itertools.islice(found.data(batches), steps):
            call_with(last, built.step)
        built.step.synchronize()
    call_with(last, found.measure)
    typer.echo(str(found))
    if (reason := built.step.stats.reason) is not None:
        typer.echo(f"\nmode {built.step.stats.mode}: {reason}")
    if trace is not None:
        found.save(trace)
        typer.echo(f"\n{trace}: open it at ui.perfetto.dev or in about:tracing")
    if html is not None:
        from faststep.cli._profile_page import write_profile

        try:
            typer.echo(write_profile(html, config.name, found))
        except FileExistsError as error:
            raise Exit(str(error)) from None
