"""A run from a YAML file: read strictly, with every mistake named by its line, and built."""

from faststep._extras import need

need("pydantic")
need("yaml")

from faststep.config._build import Built, build  # noqa: E402, behind the checks of what they need
from faststep.config._errors import ConfigError, Problem  # noqa: E402
from faststep.config._load import load, validate  # noqa: E402
from faststep.config._models import Component, Config  # noqa: E402

__all__ = ["Built", "Component", "Config", "ConfigError", "Problem", "build", "load", "validate"]
