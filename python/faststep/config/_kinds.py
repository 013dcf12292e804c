"""Kinds of components, and the built-in names of each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of component.

    Attributes:
        name: What messages call it.
        gives: What it has to give, in words.
        names: Gives the built-in callables that make it, by name.
        fits: Whether something is what it has to give.
        function: Whether it is a function: the user's own may be named itself, and need not be made.
    """

    name: str
    gives: str
    names: Callable[[], Mapping[str, Callable[..., Any]]]
    fits: Callable[[Any], bool]
    function: bool = False


def _models() -> Mapping[str, Callable[..., Any]]:
    from faststep import mlx_lm, recipes

    return recipes.MODELS | mlx_lm.MODELS


def _losses() -> Mapping[str, Callable[..., Any]]:
    from faststep import recipes

    return recipes.LOSSES


def _metrics() -> Mapping[str, Callable[..., Any]]:
    from faststep import metrics

    return metrics.METRICS


def _datasets() -> Mapping[str, Callable[..., Any]]:
    from faststep import mlx_lm, recipes

    return recipes.DATASETS | mlx_lm.DATASETS


def _callbacks() -> Mapping[str, Callable[..., Any]]:
    from faststep import mlx_lm, training

    own = {"samples": training.Samples, "gradient_norms": training.GradientNorms}
    own |= {"reduce_on_plateau": training.ReduceOnPlateau}
    return own | mlx_lm.CALLBACKS


def _collates() -> Mapping[str, Callable[..., Any]]:
    from faststep import data

    return {"stack": lambda: data.stack, "pad": data.Pad, "pack": data.Pack}


@functools.cache
def _optimizers() -> Mapping[str, Callable[..., Any]]:
    from mlx import optimizers

    base, several = optimizers.Optimizer, optimizers.MultiOptimizer
    classes = inspect.getmembers(optimizers, inspect.isclass)
    return {name: each for name, each in classes if issubclass(each, base) and each not in (base, several)}


@functools.cache
def _schedules() -> Mapping[str, Callable[..., Any]]:
    from mlx.optimizers import schedulers

    from faststep.recipes import constant, one_cycle

    functions = inspect.getmembers(schedulers, inspect.isfunction)
    own: dict[str, Callable[..., Any]] = {"constant": constant, "one_cycle": one_cycle}
    return own | {name: each for name, each in functions if not name.startswith("_")}


def _is_model(value: Any) -> bool:
    import mlx.nn as nn

    return isinstance(value, nn.Module)


def _is_optimizer(value: Any) -> bool:
    from mlx.optimizers import Optimizer

    return isinstance(value, Optimizer)


def _is_logger(value: Any) -> bool:
    return callable(getattr(value, "log", None)) and callable(getattr(value, "close", None))


def _is_dataset(value: Any) -> bool:
    return hasattr(value, "__getitem__") or hasattr(value, "__iter__")


MODEL = Kind("model", "an mlx.nn.Module", _models, _is_model)
LOSS = Kind("loss", "a function loss_fn(model, *batch)", _losses, callable, function=True)
METRIC = Kind("metric", "a function metric(outputs, *batch)", _metrics, callable, function=True)
DATASET = Kind("dataset", "a sequence or an iterable", _datasets, _is_dataset)
COLLATE = Kind("collate", "a function of a list of samples", _collates, callable, function=True)
OPTIMIZER = Kind("optimizer", "an mlx.optimizers.Optimizer", _optimizers, _is_optimizer)
SCHEDULE = Kind("schedule", "a function of the step", _schedules, callable, function=True)
CALLBACK = Kind("callback", "a callback", _callbacks, lambda _: True)
LOGGER = Kind("logger", "a logger with log(record) and close()", dict, _is_logger)
