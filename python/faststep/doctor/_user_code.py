"""Places in the user's code: of an error, of a call, of a stack that was dumped."""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
import traceback
from pathlib import Path

from faststep._step import is_installed

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = tuple(  # wherever they are: in a folder of PYTHONPATH, too
    f"{place}/"
    for name in ("mlx", "mlx_lm", "numpy")
    if (spec := importlib.util.find_spec(name)) is not None
    for place in spec.submodule_search_locations or ()
)
_FRAME = re.compile(r'File "(.+?)", line (\d+) in (\S+)')


def is_users(file: str) -> bool:
    """Return whether a file is neither of this package nor of the libraries."""
    if file.startswith("<ipython-input"):
        return True
    inside = file.startswith((_OURS, *_LIBRARIES, *_PACKAGES)) or file.startswith("<") or is_installed(file)
    return not inside or "/faststep/recipes/" in file


def place_of(error: BaseException) -> str | None:
    """Return the innermost place of the user's code in a traceback: `train.py:12 in loss_fn: x.item()`."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if is_users(each.filename)]
    if not frames:
        return None
    last = frames[-1]
    return f"{shown(last.filename)}:{last.lineno} in {last.name}" + (f": {last.line}" if last.line else "")


def caller() -> str | None:
    """Return the innermost place of the user's code that has led to this call."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{shown(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def place_in_dump(dump: str) -> str | None:
    """Return the innermost place of the user's code in what `faulthandler` has written; the main thread comes first."""
    threads = re.split(r"(?m)^(?=Thread |Current thread )", dump)
    threads.sort(key=lambda text: not text.startswith("Current"))
    for each in [*threads[::-1]] if not any(text.startswith("Current") for text in threads) else threads:
        for file, line, name in _FRAME.findall(each):
            if is_users(file):
                return f"{shown(file)}:{line} in {name}"
    return None


def users_stacks(dump: str) -> str:
    """Return the stacks that have the user's code in them, that of the user's main thread first, down to that code.

    Frames above that code (of a notebook's kernel, say) and threads without code of the user's are left out.
    """
    stacks = []
    for text in re.split(r"(?m)^(?=Thread |Current thread )", dump):
        lines = text.rstrip().splitlines()
        own = [place for place, line in enumerate(lines) if (match := _FRAME.search(line)) and is_users(match[1])]
        if own:
            stacks.append((not text.startswith("Current"), "\n".join(lines[: own[-1] + 1])))
    return "\n\n".join(text for _, text in sorted(stacks, key=lambda each: each[0])) or dump


def shown(file: str) -> str:
    """Return a path as short as it can be."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
