"""Modules that are installed with an extra only."""

from __future__ import annotations

import importlib
from types import ModuleType


def need(module: str, extra: str | None = "train") -> ModuleType:
    """Import a module that comes with an extra, or (None) with none of them.

    Raises:
        ImportError: It is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module if extra is None else f"'mlx-faststep[{extra}]'"
        raise ImportError(f"{module} is not installed ({error}): pip install {package}", name=module) from error
