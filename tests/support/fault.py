"""A fault that is planted into a training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault, planted into a training that is healthy without it.

    Attributes:
        code: What replaces a part of the training.
        finding: The name of the finding.
        says: What its text has to have in it.
        remedy: What its remedy or the code of it has to have in it.
        rungs: The rungs that are climbed: all take a while.
        status: The rung and its status, where it is not "ok".
    """

    code: str
    finding: str
    says: tuple[str, ...]
    remedy: str
    rungs: str
    status: tuple[str, str] | None = None
