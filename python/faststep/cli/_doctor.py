"""Commands that look for what is wrong: with the environment, with a training, with the native step."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from faststep.cli._status import DIFFERS, ConfigFile, Exit, Overrides

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def doctor(as_json: AsJson = False) -> None:
    """Say what is wrong with the environment.

    Exit code 1 where something has failed.
    """
    from faststep.doctor import environment

    raise SystemExit(environment(as_json=as_json))


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="How many batches each side takes.", min=1)] = 10,
    seconds: Annotated[float, typer.Option(help="How long time and memory are measured; 0: not.", min=0)] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Compare the native step with plain MLX on a config's model and data: numbers, time and memory.

    Nothing is written. Exit code 3 where the numbers differ by more than rounding.
    """
    from faststep.config import build, load
    from faststep.doctor import check

    built = build(load(config, overrides or []))
    step = built.step
    options = {**step.options._asdict(), "accumulate": step.accumulate}
    found = check(step.model, step.optimizer, step.loss_fn, built.loader, steps=steps, seconds=seconds, **options)
    typer.echo(json.dumps(found.plain_values(), indent=1) if as_json else str(found))
    if not found.same:
        raise Exit("the native step and plain MLX differ by more than rounding", DIFFERS)
