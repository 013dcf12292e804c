"""Values that are left unevaluated: batches of another thread, sums of metrics, parameters and optimizer state."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from faststep.doctor._compiles import counting
from faststep.doctor._finding import Finding
from faststep.doctor._graph import kept_by, operations
from faststep.doctor._recorder import Recorder

REMEDY = "evaluate every array of a batch in the thread that makes it, before it is queued or yielded"
CODE = "mx.eval(batch)   # in the worker; faststep.data.Loader does so for every batch"
_MANY = 20  # operations that wait behind something that is kept: more than one step's look at it leaves


def across_threads(name: str) -> Finding:
    """Return the finding of an array that waits for another thread."""
    text = f"{name} of a batch is a lazy array that was made in another thread, and cannot be computed in this one"
    return Finding("lazy-batch", "failure", text, REMEDY, CODE)


@contextlib.contextmanager
def watched(function: Any, what: str, record: Recorder) -> Iterator[None]:
    """Look, behind the steps in the block, at what the function keeps unevaluated and at what it compiles each time."""
    before = record.taken
    with counting() as calls:
        yield
    steps = record.taken - before
    for place, count in calls.items():
        if steps >= 3 and count >= steps - 1:
            text = f"{what} calls mx.compile in every step ({count} times in {steps} steps), at {place}"
            remedy = "compile a function once, outside of the step, and call it there: each new function is traced anew"
            code = "compiled = mx.compile(function)   # once, above the loop"
            record.find(Finding("compiles-every-step", "warning", text, remedy, code))
    most: dict[str, tuple[int, str]] = {}  # of each name, what has the largest graph in it
    for name, array in kept_by(function):
        if (count := operations(array)) >= max(_MANY, steps):
            root = re.split(r"[\[.]", name, maxsplit=1)[0]
            most[root] = max(most.get(root, (0, "")), (count, name))
    for count, name in most.values():
        record.find(metric(name, count, steps, what))


def metric(name: str, count: int, steps: int, what: str) -> Finding:
    """Return the finding of something that is kept and never evaluated."""
    text = f"`{name}`, which {what} keeps, is never evaluated: {count} operations wait behind it after {steps} steps"
    remedy = "evaluate it in every step, together with the loss, or keep a number"
    return Finding("lazy-metric", "warning", text, remedy, f"mx.eval({name})   # or keep loss.item()")


def state_of(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, mx.array]]:
    """Return the arrays of model and optimizer by their paths."""
    trees = {"model": model.parameters(), "optimizer": optimizer.state}
    named: dict[str, Any] = dict(tree_flatten(trees))
    return [(path, each) for path, each in named.items() if isinstance(each, mx.array)]


def left_behind(model: nn.Module, optimizer: Optimizer, steps: int) -> Finding | None:
    """Return the finding of parameters or optimizer state that a step leaves unevaluated."""
    waiting = {path: count for path, each in state_of(model, optimizer) if (count := operations(each)) > 2}
    if not waiting:
        return None
    path, most = max(waiting.items(), key=lambda item: item[1])
    text = f"{len(waiting)} arrays are left unevaluated: {most} operations wait behind {path} after {steps} steps"
    remedy = "evaluate parameters and optimizer state together after every update: the graph grows until it hangs"
    code = "mx.eval(loss, model.state, optimizer.state)   # or: loss = fast_step(model, optimizer, loss_fn, *batch)"
    return Finding("update-unevaluated", "failure", text, remedy, code)
