"""The promises of a step, as a loop of plain MLX. Nothing of the package is imported here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from support.helpers import LossFn, Pair, Tree, clip, copy_tree, flat

Named = dict[str, mx.array]


def keys() -> list[mx.array]:
    """Return the list that holds this thread's random key; MLX shows it only to be read."""
    state: Tree = mx.random.state
    held: list[mx.array] = iter(state).__reduce__()[1][0]
    return held


@dataclass(frozen=True)
class Rules:
    """The options of a step that its numbers depend on."""

    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    weighted: bool = False
    nonfinite: str = "skip"
    max_loss: float | None = None
    ema_decay: float | None = None


@dataclass
class Taken:
    """Results of one call."""

    value: Tree
    skipped: bool = False
    updated: bool = False
    norm: mx.array | None = None


@dataclass
class Counts:
    """Counters of a step."""

    steps: int = 0
    updates: int = 0
    skipped: int = 0


@dataclass
class PlainLoop:
    """One model and one optimizer, as every step of the two has to leave them."""

    pair: Pair
    key: mx.array
    window: list[tuple[Named, float]] = field(default_factory=list)  # without what was skipped
    batches: int = 0  # in the window, skipped ones among them
    average: Named = field(default_factory=dict)

    @contextmanager
    def random(self) -> Iterator[None]:
        """Draw from the loop's own random state."""
        held, before = keys(), keys()[0]
        held[0] = self.key
        try:
            yield
        finally:
            self.key, held[0] = held[0], before

    def step(self, loss_fn: LossFn, batch: Tree, rules: Rules, accumulate: int) -> Taken:
        """Take one batch; on an error everything is as it was."""
        model, optimizer = self.pair
        before, key = flat(model.parameters()), self.key
        try:
            value, grads = self.differentiate(loss_fn, batch)
        except Exception:
            self.put_back(before, key)
            raise
        whole = accumulate == 1 and not self.batches
        norm = global_norm(grads)
        weight = float(value[1]) if rules.weighted else 1.0
        good = is_good(float(value[0]), norm, weight, rules, whole)
        if not good and rules.nonfinite == "raise" and is_bad(float(value[0]), norm, rules):
            self.put_back(before, key)
            raise FloatingPointError("the batch is no number")
        optimizer.init(model.trainable_parameters())
        self.begin_average(rules)
        if not good:
            model.update(tree_unflatten(list(before.items())))
        taken = Taken(value, skipped=not good)
        if whole:
            taken.norm = norm if rules.max_grad_norm is not None or guards(rules) else None
            taken.updated = good and self.update(grads, rules)
            return taken
        self.batches += 1
        if good:
            self.window.append((grads, weight))
        if self.batches >= accumulate:
            taken.norm, taken.updated = self.close(rules)
        return taken

    def gradients(self, loss_fn: LossFn, batch: Tree) -> tuple[Tree, Named]:
        """Compute loss and gradients; nothing changes."""
        before, key = flat(self.pair[0].parameters()), self.key
        try:
            return self.differentiate(loss_fn, batch)
        finally:
            self.put_back(before, key)

    def flush(self, rules: Rules) -> tuple[bool, bool]:
        """Update by the window as it is; return whether there was one, and whether there was anything in it."""
        if not self.batches:
            return False, False
        trainable = self.pair[0].trainable_parameters()
        if not flat(trainable):
            raise ValueError("nothing is trainable")
        self.pair[1].init(trainable)
        self.begin_average(rules)
        return True, self.close(rules)[1]

    def summed(self, name: str, like: mx.array) -> mx.array:
        """Return what the window has for a parameter; for what it was frozen, nothing."""
        parts = [weight * grads[name] for grads, weight in self.window if name in grads]
        return sum(parts, mx.zeros_like(like))

    def close(self, rules: Rules) -> tuple[mx.array | None, bool]:
        """Update by the average over the window; what was frozen for a batch of it adds nothing for that batch."""
        total = sum(weight for _, weight in self.window)
        grads = {}
        for name, parameter in flat(self.pair[0].trainable_parameters()).items():
            grads[name] = self.summed(name, parameter) / (total or 1)
        self.window, self.batches = [], 0
        norm = None
        if rules.max_grad_norm is not None or guards(rules):
            norm = global_norm(grads) if total else mx.array(np.nan)
        return norm, bool(total) and self.update(grads, rules)

    def update(self, grads: Named, rules: Rules) -> bool:
        """Clip, update and average."""
        model, optimizer = self.pair
        clipped, _ = clip(tree_unflatten(list(grads.items())), rules.max_grad_norm, rules.max_grad_value)
        optimizer.update(model, clipped)
        if rules.ema_decay is not None:
            for name, parameter in flat(model.trainable_parameters()).items():
                self.average[name] = rules.ema_decay * self.average[name] + (1 - rules.ema_decay) * parameter
        mx.eval(model.state, optimizer.state, self.average)
        return True

    def begin_average(self, rules: Rules) -> None:
        """Begin an average of what has none."""
        if rules.ema_decay is not None:
            for name, parameter in flat(self.pair[0].trainable_parameters()).items():
                self.average.setdefault(name, mx.array(parameter))  # which `+=` does not change

    def differentiate(self, loss_fn: LossFn, batch: Tree) -> tuple[Tree, Named]:
        """Return what the loss function returned, and the gradients by name."""
        model = self.pair[0]
        with self.random():
            value, grads = nn.value_and_grad(model, loss_fn)(model, *batch)
            mx.eval(value, grads, model.state, mx.random.state)
        return value, flat(grads)

    def put_back(self, arrays: Named, key: mx.array) -> None:
        """Give the model these arrays, and the random state this key."""
        self.pair[0].update(tree_unflatten(list(arrays.items())))
        self.key = key


def global_norm(grads: Named) -> mx.array:
    """Return the norm of all gradients together."""
    return mx.sqrt(sum((grad.square().sum() for grad in grads.values()), mx.array(0.0)))


def guards(rules: Rules) -> bool:
    """Return whether bad batches are left out."""
    return rules.nonfinite != "allow"


def is_bad(loss: float, norm: mx.array, rules: Rules) -> bool:
    """Return whether loss or gradients are no numbers, or the loss is too large."""
    limit = np.inf if rules.max_loss is None else rules.max_loss
    return not (np.isfinite(loss) and loss <= limit and np.isfinite(norm.item()))


def is_good(loss: float, norm: mx.array, weight: float, rules: Rules, whole: bool) -> bool:
    """Return whether a batch is taken; alone, one that weighs nothing is not."""
    if not guards(rules):
        return True
    weighs = 0 < weight < np.inf if whole else 0 <= weight < np.inf
    return weighs and not is_bad(loss, norm, rules)


def copy_loop(loop: PlainLoop) -> dict[str, Tree]:
    """Note all that a loop has learned, to be put back by `restore_loop`."""
    model, optimizer = loop.pair
    learned = {"model": model.parameters(), "optimizer": optimizer.state, "average": loop.average, "key": loop.key}
    return copy_tree(learned) | {"window": list(loop.window), "batches": loop.batches}


def restore_loop(loop: PlainLoop, saved: dict[str, Tree]) -> None:
    """Go back to where `copy_loop` noted it."""
    learned = copy_tree(saved)
    loop.pair[0].update(learned["model"])
    loop.pair[1].state = learned["optimizer"]
    loop.window, loop.batches = list(saved["window"]), saved["batches"]
    loop.average, loop.key = learned["average"], learned["key"]
