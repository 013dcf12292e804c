"""The command that `faststep launch --check` runs on all ranks: what they have alike, and what their network does."""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from faststep.cli._saved import config_of
from faststep.cli._status import DIFFERS, Overrides

if TYPE_CHECKING:
    import mlx.core as mx

    from faststep._step import Ranks

_SMALL, _LARGE = 1, 1 << 24  # float32 numbers: 4 bytes, and 64 MiB
_TIMES = 7  # of each, behind one that is not counted
_SECONDS = 60.0  # for an update, in which all ranks take part


def check_ranks(
    what: Annotated[Path, typer.Argument(help="The YAML file, or the folder of a run.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Compare versions, devices and the config of all ranks, make one update, and measure their network.

    To be run on all ranks, as `faststep launch --check` does. Exit code 3 where something differs.
    """
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim

    from faststep._step import Step

    group = mx.distributed.init(strict=True)
    model = nn.Linear(2, 2)
    options: dict[str, Any] = {"group": group, "sync": "broadcast", "hang_timeout": _SECONDS}
    step = Step(model, optim.SGD(0.1), lambda model, x: mx.square(model(x)).mean(), **options)
    differs = _compared(step.ranks.gather(_facts(what, overrides), "comparison"), show=group.rank() == 0)
    step(mx.ones((1, 2)))
    step.check_ranks()
    small, large = (_seconds(mx.zeros(size), step.ranks) for size in (_SMALL, _LARGE))
    if group.rank() > 0:
        return
    typer.echo("update: one made together, with the same parameters on all ranks behind it")
    size = group.size()
    rate = 2 * (size - 1) / size * 4 * _LARGE / large
    typer.echo(f"all-reduce: {1e3 * small:.2f} ms for 4 bytes, {1e3 * large:.1f} ms for 64 MiB ({rate / 1e9:.2f} GB/s)")
    raise SystemExit(DIFFERS if differs else 0)


def _compared(facts: list[dict[str, str]], show: bool) -> bool:
    """Show the facts of all ranks; return whether one differs."""
    hosts = Counter(each.pop("host") for each in facts)
    lines = [f"ranks: {len(facts)} on {', '.join(f'{host} ({count})' for host, count in hosts.items())}"]
    differs = False
    for name, value in facts[0].items():
        others = [f"rank {rank}: {each[name]}" for rank, each in enumerate(facts) if each[name] != value]
        differs |= bool(others)
        lines.append(f"{name}: {value}" + (f"; DIFFERENT {', '.join(others)}" if others else ", the same on all"))
    if show:
        typer.echo("\n".join(lines))
    return differs


def _facts(what: Path, overrides: list[str] | None) -> dict[str, str]:
    import mlx.core as mx

    facts = {"host": platform.node(), "python": platform.python_version()}
    facts |= {name: version(name) for name in ("mlx", "mlx-faststep")}
    device: Any = mx.device_info(mx.default_device())
    return facts | {"device": str(device.get("device_name")), "config": _config(what, overrides)}


def _config(what: Path, overrides: list[str] | None) -> str:
    """Return a digest of the config with all its defaults, or why there is none."""
    from faststep.config import load

    try:
        loaded = config_of(what, overrides) if what.is_dir() else load(what, overrides or [])
    except Exception as error:  # it is told to all ranks
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return hashlib.sha256(loaded.text().encode()).hexdigest()[:16]


def _seconds(array: mx.array, ranks: Ranks) -> float:
    """Return the time of an all-reduce: the median of a few."""

    def exchange() -> float:
        began = time.perf_counter()
        ranks.sum(array)
        return time.perf_counter() - began

    return statistics.median([ranks.together("comparison", exchange) for _ in range(_TIMES + 1)][1:])
