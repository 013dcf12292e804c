"""Rungs that another process asks for, one after another, over a pipe."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from faststep.doctor._kept import Kept
from faststep.doctor._recorder import Recorder
from faststep.doctor._rungs import climb
from faststep.doctor._subject import Subject

PIPE = "FASTSTEP_DIAGNOSIS"  # the variable of a process that climbs rungs: the pipe with its jobs, the call it is for


def asked() -> tuple[int, int] | None:
    """Return the pipe and the number of the call; None in a process that nobody has started for rungs."""
    if (value := os.environ.get(PIPE)) is None:
        return None
    pipe, call = value.split(":")
    return int(pipe), int(call)


def serve(pipe: int, subject_of: Callable[[dict[str, Any]], Subject]) -> None:
    """Climb rungs until the pipe is closed, each from the same state; then end the process.

    Args:
        pipe: Where the jobs come from, a line of JSON each.
        subject_of: Returns what is diagnosed for a job.
    """
    del os.environ[PIPE]  # processes that the user's code starts are no rungs
    with os.fdopen(pipe, encoding="utf-8") as jobs:
        for line in iter(jobs.readline, ""):
            job: dict[str, Any] = json.loads(line)
            try:
                subject = subject_of(job)
            except Exception as error:
                with Path(job["events"]).open("a", encoding="utf-8") as events:
                    record = Recorder(events, job["steps"], job["seconds"])
                    record.at("while the config is built")
                    record.failed(error)
                    record.say("end")
                continue
            kept = Kept(subject.model, subject.optimizer, subject.batches)
            climb(subject, job)
            kept.restore()
            del subject, kept
            gc.collect()
            mx.clear_cache()
    os._exit(0)  # whatever else runs at exit is no part of a rung
