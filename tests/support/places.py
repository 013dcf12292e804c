"""Folders of the checkout, the environment of programs in it, and the types of the fixtures in `conftest`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
Child = Callable[..., "subprocess.CompletedProcess[str]"]
RustExample = Callable[[str], Path]


def without_traces() -> dict[str, str]:
    """Return this environment, in which Python writes no bytecode beside its sources: in its own place, or none."""
    own_place = bool(os.environ.get("PYTHONPYCACHEPREFIX"))
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "" if own_place else "1"}
