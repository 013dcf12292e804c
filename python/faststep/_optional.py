"""Modules that are installed with an extra only."""

from __future__ import annotations

import importlib
from types import ModuleType


def need(module: str, extra: str = "train") -> ModuleType:
    """Import a module that comes with an extra.

    Raises:
        ImportError: It is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{module} is not installed ({error}): pip install 'mlx-faststep[{extra}]'", name=module
        ) from error
