"""A run from a YAML file: read strictly, with every mistake named by its line, and built."""

from typing import TYPE_CHECKING, Any

from faststep._extras import need

need("pydantic")
need("yaml")

from faststep.config._errors import ConfigError, Problem  # noqa: E402, behind the checks of what they need
from faststep.config._load import load, validate  # noqa: E402
from faststep.config._models import Component, Config  # noqa: E402

if TYPE_CHECKING:
    from faststep.config._build import Built, build

__all__ = ["Built", "Component", "Config", "ConfigError", "Problem", "build", "load", "validate"]


def __getattr__(name: str) -> Any:
    """Import what builds when it is asked for: it needs much that reading does not."""
    if name not in ("Built", "build"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from faststep.config import _build

    return getattr(_build, name)
