"""A process that climbs rungs with what a config describes: `python -m faststep.doctor._child`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faststep.doctor._jobs import asked, serve
from faststep.doctor._subject import Subject


def main() -> None:
    """Build the config, and climb rungs."""
    pipe = asked()
    assert pipe is not None, "the parent says where the jobs come from"
    built: dict[bool, Subject] = {}  # by whether the loader has workers that the config does not ask for

    def subject_of(job: dict[str, Any]) -> Subject:
        ahead = job["rung"] == "prefetch"
        if ahead not in built:
            built.clear()
            built[ahead] = build_subject(job, ahead)
        return built[ahead]

    serve(pipe[0], subject_of)


def build_subject(job: dict[str, Any], ahead: bool) -> Subject:
    """Build what a config describes; `ahead`: with workers that make the batches."""
    from faststep.config import build, load

    overrides = list(job["overrides"])
    config = load(job["config"], overrides)
    if ahead and not config.data.workers:
        config = load(job["config"], [*overrides, "data.workers=2"])
    built = build(config)
    step = built.step
    subject = Subject(step.model, step.optimizer, step.loss_fn, built.loader, built.validation, step.options._asdict())
    subject.folder = Path(config.run)
    return subject


if __name__ == "__main__":
    main()
