"""The command that looks for the largest batch that fits into memory."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

from faststep.cli._status import ConfigFile, Exit, Overrides

if TYPE_CHECKING:
    from faststep._step import MemoryPlan

_LOOKED = 8  # batches, of which the largest is taken


def find_batch(
    config: ConfigFile,
    overrides: Overrides = None,
    memory: Annotated[
        float | None, typer.Option(help="Memory in gigabytes; the default is the device's.", min=0)
    ] = None,
    most: Annotated[int, typer.Option(help="The largest batch size to try.", min=1)] = 1024,
) -> None:
    """Find the largest batch size, a power of two, that fits into memory by its plan; nothing is computed or saved."""
    from faststep._records import size as told

    found: int | None = None
    for size in itertools.takewhile(lambda size: size <= most, (2**n for n in itertools.count())):
        plan, rows = _planned(config, [*(overrides or []), f"data.batch_size={size}"])
        limit = plan.limit if memory is None else int(memory * 1e9)
        if limit is None:
            raise Exit("--memory: the device does not say how much it has: expected gigabytes")
        typer.echo(f"batch size {size:5}: a peak of {told(plan.peak)} of {told(limit)}")
        if plan.peak > limit:
            break
        found = min(size, rows)
        if rows < size:
            typer.echo(f"there are {rows} samples")
            break
    if found is None:
        raise Exit("a batch of one sample does not fit: take gradient checkpoints, shorter samples or fewer bits")
    typer.echo(f"suggested: data.batch_size: {found}; step.accumulate makes larger windows of it")


def _planned(config: Any, overrides: list[str]) -> tuple[MemoryPlan, int]:
    """Return the plan of the largest of some batches, and how many samples it has."""
    from mlx.utils import tree_flatten

    from faststep._step import call_with
    from faststep.config import build, load

    built = build(load(config, overrides))
    with built.loader as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that it does not fit, which is told here
        batches: list[Any] = list(itertools.islice(loader, _LOOKED))
        flat: Any = [tree_flatten(each) for each in batches]
        leaves = [[array for _, array in each] for each in flat]
        largest = max(range(len(batches)), key=lambda i: sum(each.nbytes for each in leaves[i]))
        return call_with(batches[largest], built.step.memory_plan), leaves[largest][0].shape[0]
