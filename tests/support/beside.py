"""A program beside its plain loop: at each call all that Python sees of the two is equal, and so are the arrays."""

from __future__ import annotations

import collections
import contextlib
import io
import math
import os
import pickle
import random
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep import Step, fast_step
from mlx.utils import tree_flatten, tree_map_with_path

from support import process
from support.helpers import flat, random_key
from support.plain_loop import keys
from support.programs.reach import Around, Made, Place, Program, programs_of
from support.programs.reach.registry import squares

__all__ = ["VARIANTS", "Variant", "beside", "cases", "squares"]
BAD = frozenset({1, 4, 9})


@dataclass(frozen=True)
class Variant:
    """How the two are run: by which call, in windows of how many batches, and which batches are no numbers."""

    way: str = "Step"
    window: int = 1
    bad: frozenset[int] = frozenset()
    compiled: bool = True
    raises: bool = False


VARIANTS = {
    "Step": Variant(),
    "fast_step": Variant("fast_step"),
    "uncompiled": Variant(compiled=False),
    "windows": Variant(window=3),
    "bad batches": Variant(bad=BAD),
    "bad batches in windows": Variant(window=3, bad=BAD),
    "bad batches that raise": Variant(bad=BAD, raises=True),
}


def cases(place: Place) -> list[Any]:
    """Return the programs of a place with their variants: the first one, one of the others, one of bad batches.

    `FASTSTEP_REACH=all` gives each program all variants.
    """
    good, bad = [name for name in VARIANTS if "bad" not in name], [name for name in VARIANTS if "bad" in name]
    found = []
    for each in programs_of(place):
        chance = zlib.crc32(each.name.encode())
        chosen = [good[0], good[1 + chance % (len(good) - 1)], bad[chance // 7 % len(bad)]]
        names = VARIANTS if os.environ.get("FASTSTEP_REACH") == "all" else chosen
        found += [
            pytest.param(each, VARIANTS[name], id=f"{each.name}: {name}") for name in names if name not in each.without
        ]
    return found


def beside(program: Program, variant: Variant) -> None:
    """Run a program both ways; each has objects of its own."""
    theirs, ours = run(program, variant, Plain), run(program, variant, Ours)
    for number, (got, wanted) in enumerate(zip(ours.calls, theirs.calls, strict=True)):
        for what in wanted:
            assert same(got[what], wanted[what], program.near), (
                f"{what} of call {number}: {got[what]}, and by the plain loop {wanted[what]}"
            )
    for what, wanted in theirs.left.items():
        assert same(ours.left[what], wanted, program.near), (
            f"{what} in the end: {ours.left[what]}, and by the plain loop {wanted}"
        )


@dataclass
class Run:
    """What is seen of a program at each call, and what it leaves."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, Any] = field(default_factory=dict)


class Plain:
    """The plain loop, which leaves out a batch whose loss or gradients are no numbers: arrays are put back."""

    def __init__(self, part: Made, loss_fn: Callable[..., Any], variant: Variant) -> None:
        self.model, self.optimizer, self.window = part.model, part.optimizer, variant.window
        self.taken, self.gradients, self.raises = 0, list[Any](), variant.raises

    def __call__(self, loss_fn: Callable[..., Any], *batch: Any) -> Any:
        """Take a batch."""
        if self.window > 1 and hasattr(self.optimizer, "init"):
            with contextlib.suppress(IndexError):  # of a list of the model that has become shorter
                self.optimizer.init(self.model.trainable_parameters())  # what has a state may be frozen for a window
        before, key = arrays_of(self.model), random_key()
        try:
            value, gradients = nn.value_and_grad(self.model, loss_fn)(self.model, *batch)
            mx.eval(value, gradients, list(flat(self.model.state).values()))
        except BaseException:
            self.as_before(before, key)
            raise
        if is_finite(value[0] if isinstance(value, tuple) else value, gradients):
            self.gradients.append(gradients)
        else:
            if self.raises:
                self.as_before(before, key)
                raise FloatingPointError
            put_back(self.model, before)
        self.taken += 1
        if self.taken == self.window:
            if self.gradients:
                self.optimizer.update(self.model, average(self.gradients, self.model))
            self.taken, self.gradients = 0, []
        mx.eval(list(flat(self.model.state).values()), list(flat(self.optimizer.state).values()))
        return value

    def as_before(self, arrays: Arrays, key: mx.array) -> None:
        """Leave nothing of a call that raises, in arrays."""
        put_back(self.model, arrays)
        keys()[0] = key


class Ours:
    """The step of the package."""

    def __init__(self, part: Made, loss_fn: Callable[..., Any], variant: Variant) -> None:
        self.part, self.by_step = part, variant.way == "Step"
        self.options: dict[str, Any] = {"accumulate": variant.window, "compile": variant.compiled, "replay": True}
        self.options |= {"nonfinite": "raise"} if variant.raises else {}
        self.step = Step(part.model, part.optimizer, loss_fn, **self.options) if self.by_step else None

    def __call__(self, loss_fn: Callable[..., Any], *batch: Any) -> Any:
        """Take a batch."""
        if self.step is None:
            return fast_step(self.part.model, self.part.optimizer, loss_fn, *batch, **self.options)
        if self.step.loss_fn is not loss_fn:
            self.step.loss_fn = loss_fn
        out = self.step(*batch)
        return (out.loss, *out.aux) if out.aux else out.loss


def run(program: Program, variant: Variant, way: type[Plain | Ours]) -> Run:
    """Run a program."""
    found, held = Run(), list[Any]()
    with process.put_back() as told, Around.begun() as around, contextlib.redirect_stdout(io.StringIO()) as said:
        seed()
        made = program.new(around)
        seed()
        parts = [made, *made.others]
        for part in parts:
            mx.eval(part.model.parameters())
        steps = list[Any]()
        for part in parts:
            pairs = [(other.model, other.optimizer) for other in parts[: len(steps)]]
            same = [number for number, pair in enumerate(pairs) if pair[0] is part.model and pair[1] is part.optimizer]
            if way is Plain and same:
                steps.append(steps[same[0]])  # one pair has one window
            else:
                steps.append(way(part, part.loss_fn if part.loss is None else part.loss(0), variant))
        for number in range(made.calls):
            made.between(number)
            part = made.part(number)
            loss_fn = part.loss_fn if part.loss is None else part.loss(number)
            batch = part.arguments(number)
            try:
                returned = steps[number % len(parts)](loss_fn, *(spoilt(batch) if number in variant.bad else batch))
            except ArithmeticError as error:
                returned = type(error).__name__
            held.append(made.seen())
            found.calls.append(
                {
                    "what is returned": as_data(returned),
                    "what is seen": as_data(held[-1]),
                    "what is drawn": pickle.dumps((random.getstate(), np.random.get_state())),
                    "what is printed": said.getvalue(),
                    "what is warned of": [str(each.message) for each in told if each.category is UserWarning],
                }
            )
            said.seek(0)
            said.truncate()
            told.clear()
        found.left = {
            "what is held": as_data(held),
            "the parameters": [named(part.model.state) for part in parts],
            "the states of optimizers": [named(part.optimizer.state) for part in parts],
            "the random key": as_data(random_key()),
        }
    return found


def seed() -> None:
    """Begin all generators of the process."""
    random.seed(0)
    np.random.seed(0)
    mx.random.seed(1)


def spoilt(batch: Any) -> Any:
    """Return a batch with no numbers in the place of its own; modules and other objects stay."""
    if isinstance(batch, mx.array) and mx.issubdtype(batch.dtype, mx.floating):
        return batch * float("nan")
    if isinstance(batch, np.ndarray) and batch.dtype.kind == "f":
        return batch * float("nan")
    if type(batch) is dict:
        return {key: spoilt(each) for key, each in batch.items()}
    return type(batch)(map(spoilt, batch)) if type(batch) in (list, tuple) else batch


def is_finite(loss: mx.array, gradients: Any) -> bool:
    """Return whether a loss and the norm of its gradients are numbers."""
    squares = (each.astype(mx.float32).square().sum() for each in flat(gradients).values())
    return bool(np.isfinite(loss.item()) and np.isfinite(mx.sqrt(sum(squares, mx.array(0.0))).item()))


def average(window: list[Any], model: nn.Module) -> Any:
    """Average over a window; what was not trained at a batch of it adds nothing for that batch."""
    if len(window) == 1:
        return window[0]
    named = [flat(each) for each in window]

    def of(path: str, parameter: mx.array) -> mx.array:
        parts = [each[path] for each in named if path in each]
        return mean(parts, len(window)) if parts else mx.zeros_like(parameter)

    return tree_map_with_path(of, model.trainable_parameters())


def mean(parts: list[mx.array], count: int) -> mx.array:
    """Return the sum of gradients by a count."""
    first, *others = (each.astype(mx.float32) for each in parts)
    return (sum(others, first) / count).astype(parts[0].dtype)


Arrays = dict[tuple[Any, ...], tuple[mx.array, mx.array]]


def arrays_of(tree: Any, path: tuple[Any, ...] = ()) -> Arrays:
    """Note the arrays of a model by their places: the objects, and their values."""
    if isinstance(tree, mx.array):
        return {path: (tree, mx.array(tree))}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {name: found for key, item in items for name, found in arrays_of(item, (*path, key)).items()}


def put_back(model: nn.Module, before: Arrays) -> None:
    """Put arrays back in their places, where there are still arrays of their shapes."""
    for path, (array, value) in before.items():
        *way, last = path
        try:
            place: Any = model
            for key in way:
                place = place[key]
            now = place[last]
        except (LookupError, TypeError):
            continue
        if isinstance(now, mx.array) and now.shape == value.shape and not isinstance(place, tuple):
            place[last] = array
            if not mx.array_equal(array, value, equal_nan=True):
                array[...] = value


def named(tree: Any) -> Any:
    """Return the arrays of a tree by their paths, in whatever order they are."""
    arrays = {path: mx.array(leaf) for path, leaf in tree_flatten(tree) if isinstance(leaf, (mx.array, np.ndarray))}
    return as_data(dict(sorted(arrays.items())))


def as_data(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Return what is in an object: classes, keys in their order, numbers with their classes, and values of arrays."""
    kind = type(value).__name__
    if isinstance(value, mx.array):
        return ["array", str(value.dtype), value.shape, value.tolist()]
    if isinstance(value, np.ndarray):
        return ["ndarray", str(value.dtype), as_data(value.tolist(), within)]
    if id(value) in within:
        return "again"
    within = (*within, id(value))
    if isinstance(value, nn.Module):
        return [kind, as_data(dict(value), within), as_data(vars(value), within)]
    if isinstance(value, dict):
        return [kind, [[as_data(key, within), as_data(item, within)] for key, item in value.items()]]
    if isinstance(value, (list, tuple, collections.deque)):
        return [kind, [as_data(item, within) for item in value]]
    if isinstance(value, (set, frozenset)):
        return [kind, sorted(map(repr, value))]
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, bytearray, np.generic)):
        return [kind, value]
    if callable(value) or isinstance(value, types.ModuleType):
        return kind
    slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
    kept = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return [kind, as_data(kept, within)]


def same(ours: Any, theirs: Any, near: float) -> bool:
    """Return whether two such are equal, apart from rounding."""
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(same(*pair, near) for pair in zip(ours, theirs, strict=True))
    if isinstance(ours, (float, np.floating)) and isinstance(theirs, (float, np.floating)):
        tolerance = near if mx.default_device() == mx.cpu else max(near, 1e-3)
        near_enough = math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=min(tolerance, 1e-5))
        return near_enough or (math.isnan(ours) and math.isnan(theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)
