"""The command line that started this process, as far as the package knows it before it loads anything; exit codes.

Python's standard library only; it uses no other room.
"""

from __future__ import annotations

import sys
from pathlib import Path

HUNG = 5  # the exit code of a training that ends itself because it makes no progress


def asks_for_environment() -> bool:
    """Return whether this process is `faststep doctor` without a config, which must work where MLX cannot be loaded."""
    program, *words = getattr(sys, "argv", None) or [""]
    # `python -m faststep`: while the package is imported, the module's place among the arguments is "-m"
    ours = sys.orig_argv[-1 - len(words)] == "faststep" if program == "-m" else Path(program).stem == "faststep"
    inside = Path(program).parent.name == "faststep" and Path(program).name == "__main__.py"  # the same, later
    return (ours or inside) and words[:1] == ["doctor"] and set(words[1:]) <= {"--json"}
