"""Diagnose a config, or a step of an example, in this process: `diagnosed.py CONFIG [KEY=VALUE ...]`, `... gan 0`."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import faststep
import mlx.core as mx

EXAMPLES = Path(__file__).parents[3] / "examples"
QUICK: dict[str, Any] = {"isolate": False, "seconds": 0.3, "progress": False}


def of_config(config: str, *overrides: str) -> Any:
    """Diagnose what a config describes."""
    from faststep.config import build, load

    built = build(load(config, overrides))
    step = built.step
    options = {**step.options._asdict(), "accumulate": step.accumulate, "validation": built.validation}
    return faststep.diagnose(step.model, step.optimizer, step.loss_fn, built.loader, **options, **QUICK)


def of_example(name: str, number: str) -> Any:
    """Diagnose the step of that number that an example makes."""
    sys.path.insert(0, str(EXAMPLES))
    made: list[Any] = []

    def make(*parts: Any) -> Any:
        made.append(parts)
        return lambda *batch: mx.array(0.0)

    if name == "gan":
        import gan

        gan.Gan(make)
        batches = [[(real,) for real in itertools.islice(gan.batches(), 12)], [()] * 12]
    else:
        import dqn

        dqn.Agent(make, 100)
        batches = [list(itertools.islice(dqn.random_batches(), 12))]
    model, optimizer, loss_fn, norm = made[int(number)]
    return faststep.diagnose(model, optimizer, loss_fn, batches[int(number)], max_grad_norm=norm, **QUICK)


if __name__ == "__main__":
    first = sys.argv[1]
    print(json.dumps((of_example if first in ("gan", "dqn") else of_config)(*sys.argv[1:]).plain()))
