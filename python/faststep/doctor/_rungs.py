"""The ladder: the rungs in their order, and how a process climbs one."""

from __future__ import annotations

import faulthandler
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from faststep.doctor import _numbers, _rungs_plain, _rungs_step
from faststep.doctor._modules import arrays_of
from faststep.doctor._recorder import Recorder
from faststep.doctor._subject import Subject, argument_names


@dataclass(frozen=True)
class Rung:
    """A rung: one part of a training by itself.

    Attributes:
        name: Its name.
        title: What it does.
        run: Does it.
        stops: Whether the rungs above cannot be climbed when this one fails.
        trains: Whether its losses are those of a training, to be compared with the others'.
    """

    name: str
    title: str
    run: Callable[[Subject, Recorder], None]
    stops: bool = False
    trains: bool = False


RUNGS = (
    Rung("data", "data alone", _rungs_plain.data, stops=True),
    Rung("evaluated", "batches evaluated?", _rungs_plain.evaluated, stops=True),
    Rung("forward", "forward", _rungs_plain.forward),
    Rung("numbers", "what the numbers say", _numbers.numbers, stops=True),
    Rung("repeated", "forward repeated", _rungs_plain.repeated, stops=True),
    Rung("gradient", "gradient without update", _rungs_plain.gradient, stops=True),
    Rung("unevaluated", "update without evaluation", _rungs_plain.unevaluated),
    Rung("joint", "joint evaluation", _rungs_plain.joint, trains=True),
    Rung("clearing", "with cache clearing", _rungs_plain.clearing, trains=True),
    Rung("compiled", "compiled", _rungs_step.compiled, trains=True),
    Rung("native", "native step", _rungs_step.native, trains=True),
    Rung("shapes", "new shapes", _rungs_step.shapes),
    Rung("prefetch", "prefetch", _rungs_step.prefetch),
    Rung("accumulation", "accumulation", _rungs_step.accumulation),
    Rung("validation", "validation", _rungs_step.validation),
    Rung("checkpoint", "checkpoint", _rungs_step.checkpoint),
    Rung("own", "your own step", _rungs_step.own),
)
BY_NAME = {rung.name: rung for rung in RUNGS}


def climb(subject: Subject, job: dict[str, Any]) -> None:
    """Climb the rung that a job names, and write down how it goes.

    Args:
        subject: What is diagnosed.
        job: `rung`, `steps`, `seconds`, `events` (the file for the record), `stacks` (that for the stacks of a hang).
    """
    rung = BY_NAME[job["rung"]]
    with Path(job["events"]).open("a", encoding="utf-8") as events, Path(job["stacks"]).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        record = Recorder(events, job["steps"], job["seconds"], argument_names(subject.loss_fn))
        try:
            record.say("begin", **_sums(subject, rung))
            for seed in (mx.random.seed, random.seed, np.random.seed):
                seed(0)  # the same masks on every rung
            rung.run(subject, record)
            record.say("done")
        except BaseException as error:
            record.failed(error)
            if not isinstance(error, Exception):
                raise
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            record.say("end")


def _sums(subject: Subject, rung: Rung) -> dict[str, Any]:
    """Return sums of the weights and of the first batch, by which losses of two processes can be compared."""
    if not rung.trains:
        return {}
    arrays: dict[str, mx.array] = dict(tree_flatten(subject.model.parameters()))
    computed = str(subject.options.get("compute_dtype")) if rung.name == "native" else "None"
    weights = [float(each.astype(mx.float32).sum()) for each in arrays.values()]
    batch = [float(each.astype(mx.float32).sum()) for each in arrays_of(subject.some())]
    return {"weights": weights, "batch": batch, "computed": computed}
