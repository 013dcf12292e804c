"""The command that looks for a learning rate."""

from __future__ import annotations

from typing import Annotated

import typer

from faststep.cli._status import ConfigFile, Exit, Overrides

_LINES = 12  # of the table


def find_rate(
    config: ConfigFile,
    overrides: Overrides = None,
    low: Annotated[float, typer.Option(help="The first learning rate.")] = 1e-7,
    high: Annotated[float, typer.Option(help="The last learning rate.")] = 1.0,
    steps: Annotated[int, typer.Option(min=3, help="How many updates.")] = 100,
) -> None:
    """Train a few steps of a config with a rising learning rate, and suggest one; nothing is saved."""
    from faststep.config import build, load
    from faststep.training import find_rate

    chosen = list(overrides or [])
    if not isinstance(load(config, chosen).optimizer, list):
        chosen.append(f"optimizer.learning_rate={low}")  # in place of a schedule
    built = build(load(config, chosen))
    try:
        found = find_rate(built.step, built.loader, low=low, high=high, steps=steps)
    except ValueError as error:
        raise Exit(str(error)) from None
    finally:
        built.loader.close()
    typer.echo("learning rate      loss")
    for i in sorted({round(k * (len(found.rates) - 1) / (_LINES - 1)) for k in range(_LINES)} if found.rates else ()):
        typer.echo(f"{found.rates[i]:13.2e}{found.losses[i]:10.4f}")
    if found.diverged:
        typer.echo("at higher rates the loss is not finite, or several times the least")
    if found.suggestion is None:
        raise Exit("no rate at which the loss falls: try a lower --low, or `faststep doctor CONFIG`")
    typer.echo(f"suggested: {found.suggestion:.2e}, a tenth of the rate with the least loss, {found.best:.2e}")
