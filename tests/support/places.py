"""Folders of the checkout, and the types of the fixtures in `conftest`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
Child = Callable[..., "subprocess.CompletedProcess[str]"]
RustExample = Callable[[str], Path]
