"""Modules that a loss uses and the optimizer never sees: those that are no part of the model's tree of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from faststep._step import call_with
from faststep.doctor._finding import Finding
from faststep.doctor._graph import names_of
from faststep.doctor._modules import arrays_of
from faststep.doctor._rungs_plain import first
from faststep.doctor._subject import Subject

_DEPTH = 4


def findings(subject: Subject) -> Iterator[Finding]:
    """Yield modules with trainable parameters that have a gradient, and are not in `model.parameters()`."""
    inside = set(_inside(subject.model))
    hidden = {id(module): (path, module) for path, module in _hidden(subject.model, inside)}
    for path, module in hidden.values():
        if count := _reached(subject, module):
            text = (
                f"model.{path} ({type(module).__name__}) has {count:,} parameters with a gradient that are not among "
                "model.parameters(): the optimizer never changes them"
            )
            remedy = (
                "let an attribute of the model hold it, a list or a dict of modules: a tuple, an object of another "
                "kind and a name that begins with _ are not looked into; freeze() it if it is not to be trained"
            )
            code = "self.layers = [...]   # not a tuple, not self._layers"
            yield Finding("outside-model", "warning", text, remedy, code)
    for name, module in _beside(subject.loss_fn, inside | hidden.keys()):
        if count := _reached(subject, module):
            text = f"the loss uses {name} ({type(module).__name__}), whose {count:,} parameters are not of the model"
            remedy = (
                "nothing is wrong if something else trains it; otherwise make it a part of the model, or freeze() it"
            )
            yield Finding("outside-model", "note", text, remedy, f"model.{name.replace('.', '_')} = {name}")


def _inside(model: nn.Module) -> Iterator[int]:
    """Yield the ids of the modules whose arrays are among the model's parameters, and of those without any."""
    known = {id(each) for each in arrays_of(model.parameters())}
    for module in model.modules():
        arrays = arrays_of(module.parameters())
        if not arrays or any(id(each) in known for each in arrays):
            yield id(module)


def _hidden(model: nn.Module, inside: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that attributes of the model's modules hold, and its tree of parameters does not."""
    for path, module in model.named_modules():
        own: dict[str, Any] = {**module, **vars(module)}
        for name, value in own.items():
            for place, each in _modules(f"{path}.{name}" if path else name, value, 0):
                if id(each) not in inside:
                    yield place, each


def _modules(path: str, value: Any, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
        return
    if depth > _DEPTH or isinstance(value, mx.array | type):
        return
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [(f"{path}[{place}]", each) for place, each in enumerate(value)]
    elif hasattr(value, "__dict__") and not inspect.isroutine(value) and not inspect.ismodule(value):
        parts = [(f"{path}.{key}", each) for key, each in vars(value).items()]
    else:
        return
    for place, each in parts:
        yield from _modules(place, each, depth + 1)


def _beside(function: Any, inside: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that a function names, and the model does not have."""
    for name, value in names_of(function):
        if isinstance(value, nn.Module) and id(value) not in inside:
            yield name, value


def _reached(subject: Subject, module: nn.Module) -> int:
    """Return how many trainable parameters of a module have a gradient of the loss that is not zero."""
    model, before, own = subject.model, subject.model.parameters(), module.parameters()
    batch = subject.some()[0]

    def loss(parameters: Any) -> Any:
        module.update(parameters)
        return first(call_with(batch, subject.loss_fn, model))

    try:
        gradients = mx.grad(loss)(module.trainable_parameters())
        flags = tree_map(lambda each: (each != 0).any(), gradients)
        mx.eval(flags)
    except (ValueError, RuntimeError):  # it reads values, or has another thread's arrays: other checks tell
        return 0
    finally:
        module.update(own)
        model.update(before)
    named: dict[str, mx.array] = dict(tree_flatten(gradients))
    flat: dict[str, mx.array] = dict(tree_flatten(flags))
    return sum(named[name].size for name, each in flat.items() if bool(each))
