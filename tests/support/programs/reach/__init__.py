"""Programs in which a loss, an optimizer or a schedule reads, changes, keeps, draws or prints something in Python.

Each is a few lines, and registered by the place at which it does so. `support.beside` runs them beside plain MLX.
"""

from __future__ import annotations

import importlib
import pkgutil

from support.programs.reach.registry import PLACES, PROGRAMS, Around, Made, Place, Program

__all__ = ["PLACES", "PROGRAMS", "Around", "Made", "Place", "Program", "programs_of"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)


def programs_of(place: Place) -> list[Program]:
    """Return all programs of a place."""
    return [each for (where, _), each in PROGRAMS.items() if where == place]
