"""Building: from a config to the step, its data, callbacks and loggers."""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as File
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_flatten

from faststep import recipes
from faststep._step import Step
from faststep.checkpoints import Checkpoint, CheckpointError, Checkpoints
from faststep.config import _kinds
from faststep.config._components import Part, Parts
from faststep.config._errors import ConfigError, Path
from faststep.config._find import find_all
from faststep.config._match import check_match
from faststep.config._optimizers import Choice, find_optimizers
from faststep.config._schema import Config
from faststep.config._usage import Usage
from faststep.data import TooLong
from faststep.metrics import LossWithMetrics
from faststep.mlx_lm import LanguageModel

if TYPE_CHECKING:
    from faststep.data import Loader

Made = TypeVar("Made")


@dataclass(frozen=True)
class Built:
    """The objects that a config describes.

    Attributes:
        step: The step, with `model`, `optimizer` and `loss_fn`.
        loader: The training data.
        validation: The validation data, or None.
        callbacks: The callbacks.
        loggers: The user's own loggers, each as a function that makes it.
        options: The arguments of `faststep.training.Trainer` beside these, `config` and the loggers.
        logs: What is to be written beside `log.jsonl`: `csv`, `tensorboard`, `wandb`, `mlflow`, `trackio`.
        config: The resolved config, plain values.
    """

    step: Step
    loader: Loader
    validation: Loader | None
    callbacks: list[Any]
    loggers: list[Callable[[], Any]]
    options: dict[str, Any]
    logs: dict[str, Any]
    config: dict[str, Any]


def build(config: Config) -> Built:
    """Build all that a config describes.

    Everything is seeded first (`mx.random`, `numpy.random`, `random`, the loader). Then the model is made and changed
    in this order, so that each finds what it needs: `weights` (full ones, of the model as it was made), `quantize`
    (of what was loaded; it freezes), `frozen` (which sees what few bits left), `lora` (over layers in few bits or
    not; it freezes the rest), gradient checkpointing (around adapters too), the optimizers' patterns (what trains).

    Args:
        config: What `load` gave.

    Raises:
        ConfigError: Something in it does not fit; as much as can be is listed at once. Where code of the user's own
            raised an exception, that is its cause.
    """
    usage = Usage(config)
    parts = Parts(config.source, config.folder)
    found = find_all(parts, usage)
    problems = [*usage.problems(config.source), *parts.problems]
    if problems:
        raise ConfigError(problems)
    group = _group()
    shares = {} if group is None else {"rank": group.rank(), "world_size": group.size()}
    _seed(usage.top["seed"])
    blame = Blame(config)
    model = _model(found["model"].make(), usage, blame)
    loader = _loader(found, "train", usage.loader | {"seed": usage.top["seed"]} | shares, blame, model)
    optimizer = _optimizer(_choices(parts, usage, loader), model, blame)
    loss_fn = found["loss"].make()
    if metrics := {name: part.make() for name, part in found["metrics"].items()}:
        loss_fn = LossWithMetrics(loss_fn, metrics, weighted=usage.step["weighted"])
    step = blame(("step",), lambda: Step(model, optimizer, loss_fn, **_step_options(usage), group=group))
    validation = _loader(found, "validation", usage.validation | shares, blame, model) if usage.validates else None
    if group is not None:
        mx.random.seed(usage.top["seed"] + group.rank())  # the models are equal; what a rank draws is its own
    callbacks = [each.make() for each in found["callbacks"]]
    loggers = [each.make for each in found["loggers"]]
    return Built(step, loader, validation, callbacks, loggers, usage.trainer, usage.logs, config.resolved())


def model_of(config: Config) -> nn.Module:
    """Make the model of a config as its component gives it, before anything else in the config changes it.

    Raises:
        ConfigError: Its arguments do not fit, or code of the user's own raised an exception, which is the cause.
    """
    parts = Parts(config.source, config.folder)
    part = parts.find(config.model, _kinds.MODEL, ("model",))
    if part is None:
        raise ConfigError(parts.problems)
    model: nn.Module = part.make()
    return model


class Blame:
    """Run a part of the building, and name its keys in the error when it is refused."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, path: Path, make: Callable[[], Made]) -> Made:
        """Run it.

        Raises:
            ConfigError: It raised a ValueError or a TypeError; one that begins with the name of a key is about that.
        """
        try:
            return make()
        except (TypeError, ValueError) as error:
            name, colon, message = str(error).partition(": ")
            if colon and name in getattr(type(self._at(path)), "model_fields", ()):
                raise ConfigError([self.config.source.problem((*path, name), message)]) from error
            raise ConfigError([self.config.source.problem(path, str(error))]) from error

    def _at(self, path: Path) -> Any:
        value: Any = self.config
        for key in path:
            value = value[key] if isinstance(key, int) else getattr(value, key)
        return value


def _group() -> mx.distributed.Group | None:
    """Return the processes that were started together, as `mlx.launch` does; None where this one is alone."""
    alone = "MLX_HOSTFILE" in os.environ and not File(os.environ["MLX_HOSTFILE"]).read_text().strip()  # `-n 1`
    return mx.distributed.init(strict=True) if "MLX_RANK" in os.environ and not alone else None


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    mx.random.seed(seed)


def _model(model: nn.Module, usage: Usage, blame: Blame) -> nn.Module:
    top, folder = usage.top, File(usage.top["folder"])
    if isinstance(model, LanguageModel) and (usage.quantize or usage.lora):
        key = "quantize" if usage.quantize else "lora"
        raise ConfigError(
            [blame.config.source.problem((key,), f"a model of mlx-lm takes it as an argument: model.{key}")]
        )
    if top["weights"] is not None:
        blame(("weights",), lambda: _load_weights(model, folder / top["weights"]))
    if usage.quantize:
        blame(("quantize",), lambda: recipes.quantize(model, **usage.quantize))
    if top.get("frozen"):
        blame(("frozen",), lambda: recipes.freeze(model, top["frozen"]))
    if usage.lora:
        blame(("lora",), lambda: recipes.add_lora(model, **usage.lora))
    if usage.checkpointed:
        blame(("step", "gradient_checkpointing"), lambda: recipes.checkpoint_gradients(model, usage.checkpointed))
    if not tree_flatten(model.trainable_parameters()):
        key = "frozen" if top.get("frozen") else "quantize" if usage.quantize else "model"
        raise ConfigError([blame.config.source.problem((key,), "nothing in the model is left to train")])
    mx.eval(model.parameters())
    return model


def _load_weights(model: nn.Module, path: File) -> None:
    """Load a file of weights, those of a checkpoint, or those of a run's newest valid one."""
    if not path.is_dir():
        return recipes.load_weights(model, path)
    inside = path / "checkpoints"
    try:
        of_run = Checkpoints(inside if inside.is_dir() else path).list()
        found = of_run if of_run or not path.name.startswith("step-") else [Checkpoint.at(path)]
        valid = [each for each in found if each.problem is None]
        if not valid:
            raise ValueError(f"expected a run or a checkpoint, found none that is valid in {path}")
        recipes.load_weights(model, valid[-1].path, valid[-1].weights())
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def _choices(parts: Parts, usage: Usage, loader: Loader) -> list[Choice]:
    """Find the optimizers again, now that the length of an epoch is known."""
    batches = _epoch_of(loader)
    epoch = None if batches is None else math.ceil(batches / usage.step["accumulate"])
    choices = find_optimizers(parts, usage.top["optimizer"], usage.steps(epoch), epoch)
    if parts.problems:
        raise ConfigError(parts.problems)
    return choices


def _optimizer(choices: list[Choice], model: nn.Module, blame: Blame) -> Optimizer:
    """Make the optimizer; several share the trainable parameters out, the first that matches takes one."""
    if len(choices) == 1:
        only: Optimizer = _part(choices[0]).make()
        return only
    left = list(dict(tree_flatten(model.trainable_parameters())))
    filters: list[Callable[[str, mx.array], bool]] = []
    for i, patterns in enumerate(choice.patterns for choice in choices[:-1]):
        where = ("optimizer", i, "parameters")
        blame(where, functools.partial(recipes.check_matched, patterns, left, "parameter that is left to train"))
        left = [path for path in left if not recipes.matches(path, patterns)]
        filters.append(lambda path, _, patterns=patterns: recipes.matches(path, patterns))  # type: ignore[misc]
    if not left:
        place = ("optimizer", len(choices) - 1)
        raise ConfigError([blame.config.source.problem(place, "no parameter is left for the last optimizer")])
    return MultiOptimizer([_part(choice).make() for choice in choices], filters)


def _part(choice: Choice) -> Part:
    assert choice.part is not None, "its problems have been raised"
    return choice.part


def _step_options(usage: Usage) -> dict[str, Any]:
    dtype = usage.step["compute_dtype"]
    return usage.step | {"compute_dtype": dtype and getattr(mx, dtype)}


def _loader(found: dict[str, Any], name: str, options: dict[str, Any], blame: Blame, model: nn.Module) -> Loader:
    from faststep.data import Loader

    source, collate = found[name].make(), found["collate"].make()
    blame(("data", name), lambda: check_match(model, source))
    if options.get("shuffle", False) is None:
        options = options | {"shuffle": hasattr(source, "__len__")}
    loader = blame(("data",), lambda: Loader(source, collate=collate, **options))
    try:
        _epoch_of(loader)
    except TooLong as error:
        text = " ".join([str(error), *(f"({each})" for each in getattr(error, "__notes__", ()))])
        raise ConfigError([blame.config.source.problem(("data", "collate"), f"{name}: {text}")]) from error
    return loader


def _epoch_of(loader: Loader) -> int | None:
    """Return the batches of an epoch, which plans the first one; None for an iterable: it has as many as it gives."""
    try:
        return len(loader)
    except TypeError:
        return None
