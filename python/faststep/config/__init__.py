"""A run from a YAML file: read strictly, with every mistake named by its line, and built.

    config = load("char_gpt.yaml", overrides=["train.steps=100"])
    built = build(config)                # built.step, .loader, .validation, .callbacks, .options, ...

**Components** are mappings with `use`: a built-in name (see `faststep.recipes`, the classes of `mlx.optimizers`, the
functions of `mlx.optimizers.schedulers`), `module:attribute`, or `file.py:attribute`. Their other keys are arguments,
which are held against the signature; components among them are made first. A loss, a metric, a schedule or a collate
may be named itself: a function that still needs positional arguments when it has the given ones is used as it is (with
these bound to it); one that needs none is called, and what it returns is used.

**Paths**: files of code, `weights`, and arguments whose annotation is `pathlib.Path` are relative to the config's
folder (`folder`); `run` is relative to the working directory. `~`, `$NAME` and `${NAME}` in them stand for the home
folder and for variables of the environment.

**Schedules** take `warmup` (steps) and `warmup_init` beside their own arguments; `decay_steps` of `cosine_decay` and
`steps` of `linear_schedule` are, where they are left out, what is left of `train.steps` or `train.epochs`. Their
lengths may be in epochs: `warmup: 1 epoch`.

Files: `_yaml` and `_load` read, `_schema` has the sections, `_usage` who reads which key, `_kinds`, `_components` and
`_find` find what is named (`_user_code`: the user's own), `_build` makes it; `_reference` describes it all. Uses
`_files`, `_step`, `metrics`, `recipes`, `mlx_lm`, `data`, `checkpoints`, `training` and `_optional`.
"""

from typing import TYPE_CHECKING, Any

from faststep._optional import need

need("pydantic")
need("yaml")

from faststep.config._errors import CodeError, ConfigError, Problem  # noqa: E402, behind the checks of what they need
from faststep.config._load import load, validate  # noqa: E402
from faststep.config._reference import reference, schema  # noqa: E402
from faststep.config._schema import Component, Config  # noqa: E402
from faststep.config._yaml import read, write  # noqa: E402

if TYPE_CHECKING:
    from faststep.config._build import Built, build, model_of

__all__ = [
    "Built",
    "CodeError",
    "Component",
    "Config",
    "ConfigError",
    "Problem",
    "build",
    "load",
    "model_of",
    "read",
    "reference",
    "schema",
    "validate",
    "write",
]


def __getattr__(name: str) -> Any:
    """Import the names that build when they are first used: they need much that reading does not."""
    if name not in ("Built", "build", "model_of"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from faststep.config import _build

    return getattr(_build, name)
