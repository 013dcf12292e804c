"""A process that climbs one rung with what a config describes: `python -m faststep.doctor._child`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from faststep.doctor._recorder import Recorder
from faststep.doctor._rungs import JOB, climb
from faststep.doctor._subject import Subject


def main() -> None:
    """Build the config, and climb the rung."""
    job: dict[str, Any] = json.loads(Path(os.environ.pop(JOB)).read_text(encoding="utf-8"))
    try:
        subject = subject_of(job)
    except Exception as error:
        with Path(job["events"]).open("a", encoding="utf-8") as events:
            record = Recorder(events, job["steps"], job["seconds"])
            record.at("while the config is built")
            record.failed(error)
        os._exit(0)
    climb(subject, job)
    os._exit(0)  # whatever else runs at exit is no part of the rung


def subject_of(job: dict[str, Any]) -> Subject:
    """Build what a config describes."""
    from faststep.config import build, load

    overrides = list(job["overrides"])
    config = load(job["config"], overrides)
    if job["rung"] == "prefetch" and not config.data.workers:
        config = load(job["config"], [*overrides, "data.workers=2"])
    built = build(config)
    step = built.step
    subject = Subject(step.model, step.optimizer, step.loss_fn, built.loader, built.validation, step.options._asdict())
    subject.folder = Path(config.run)
    return subject


if __name__ == "__main__":
    main()
