"""Commands that look for what is wrong: with the environment, with a training, with the native step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from faststep.cli._status import DIFFERS, DONE, FAILED, ConfigFile, Exit, Overrides

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def doctor(
    config: Annotated[Path | None, typer.Argument(help="The YAML file of a training.", show_default=False)] = None,
    overrides: Overrides = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a step after which a rung counts as hanging.", min=1)
    ] = 120.0,
    steps: Annotated[int, typer.Option(help="The largest number of steps of a rung.", min=1)] = 40,
    seconds: Annotated[float, typer.Option(help="How many seconds a rung may take.", min=0)] = 4.0,
    rung: Annotated[list[str] | None, typer.Option(help="Run only this rung; may be repeated.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with all measurements.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong with this machine, or with the training of a config.

    Without a config: versions, back end, BLAS, compiler, memory, disk, and one step beside plain MLX. With a config:
    its parts one by one, in another process, from the data alone to the native step and the checkpoints. It names what
    hangs, leaks, fails or is slow, and what to do. Nothing is written.

    Exit code 1 if something has failed.
    """
    if config is None:
        from faststep.doctor import environment

        raise SystemExit(environment(as_json=as_json))
    from faststep.doctor import diagnose_config

    options: dict[str, Any] = {"timeout": timeout, "steps": steps, "seconds": seconds, "rungs": rung or None}
    try:
        found = diagnose_config(config, overrides or [], **options, tell=_tell)
        page = None if html is None else found.html(html)
    except (FileExistsError, ImportError) as error:
        raise Exit(str(error)) from None
    except ValueError as error:
        if not str(error).startswith("rungs:"):
            raise
        raise Exit(str(error)) from None
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=1))
    else:
        _show(str(found))
    if page is not None:
        typer.echo(page, err=as_json)
    failed = any(each.level == "failure" for each in found.findings)
    raise SystemExit(FAILED if failed else DONE)


def _show(text: str) -> None:
    """Print a diagnosis, in colours where that is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in text.splitlines():
        shown = Text(line)
        for pattern, style in _STYLES.items():
            shown.highlight_regex(pattern, style)
        console.print(shown)


_STYLES = {
    r"^\d+\. failure: [\w-]+|  (hangs|error)  ": "bold red",
    r"^\d+\. warning: [\w-]+|  (grows|numbers|slow)  ": "yellow",
    r"^\d+\. note: [\w-]+|  skipped  ": "dim",
    r"^   -> .*|^healthy.*|  ok  ": "green",
    r"^      .*": "cyan",
    r"#+": "blue",
}


def _tell(rung: Any, done: bool) -> None:
    """Show how far a rung is, in one line that is written over; a line for each rung where it is no terminal."""
    counted = f"{rung.title:<26} {rung.status if done else '...':<8} {len(rung.steps):>4} steps"
    if not done and not sys.stderr.isatty():
        return
    begin, stop = ("\r\033[K", "\n" if done else "") if sys.stderr.isatty() else ("", "\n")
    found = ", ".join(dict.fromkeys(each.name for each in rung.findings if each.level != "note"))
    sys.stderr.write(f"{begin}{counted}  {found}".rstrip() + stop)
    sys.stderr.flush()


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="How many batches each side takes.", min=1)] = 10,
    seconds: Annotated[
        float, typer.Option(help="How many seconds time and memory are measured; 0: not at all.", min=0)
    ] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Show a config's model with its shapes, and compare the native step with plain MLX: numbers, time and memory.

    Nothing is written. Exit code 3 if the numbers differ by more than rounding.
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
