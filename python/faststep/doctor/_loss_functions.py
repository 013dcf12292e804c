"""Loss functions watched while a loss is computed once: their labels, and whether they get logits or probabilities."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from faststep.doctor._finding import Finding
from faststep.doctor._user_code import is_users

_LEAST = 16  # values between 0 and 1 that are no accident


class LossCalls:
    """Arguments of MLX's loss functions in one call of the loss.

    Attributes:
        findings: What is wrong, each kind once.
        labels: The labels of each cross entropy, as they were given.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.labels: list[np.ndarray[Any, Any]] = []

    def picked(self, classes: int, indices: mx.array, *, negative: bool) -> None:
        """Look at indices that pick one of so many classes; `negative`: none of them counts from the end."""
        if not mx.issubdtype(indices.dtype, mx.integer):
            self._find(_float_labels(indices))
            return
        if indices.size:
            low, high = int(indices.min()), int(indices.max())
            if high >= classes or low < (0 if negative else -classes):
                self._find(_out_of_range(classes, low, high))
            if negative:
                self.labels.append(np.array(indices).ravel())

    def scores(self, function: str, logits: mx.array, axis: int) -> None:
        """Look at what should be logits over the classes on this axis."""
        if logits.ndim == 0 or logits.shape[axis] < 2 or not mx.issubdtype(logits.dtype, mx.floating):
            return
        x = logits.astype(mx.float32)
        sums = x.sum(axis=axis)
        if bool((x >= -1e-6).all()) and bool((mx.abs(sums - 1) < 2e-3).all()) and sums.size >= 2:
            self._find(_probabilities(function, "a softmax"))

    def score(self, function: str, logits: mx.array) -> None:
        """Look at what should be logits of one class each."""
        inside = (logits >= 0) & (logits <= 1)
        if logits.size >= _LEAST and bool(inside.all()) and not bool((logits == mx.round(logits)).all()):
            self._find(_probabilities(function, "a sigmoid"))

    def softmax(self, x: mx.array, axis: Any) -> None:
        """Look at the axes of a softmax: MLX takes all of them where none is given, that of the samples too."""
        if axis is None and x.ndim > 1 and x.shape[0] > 1:
            self._find(_over_all_axes(x))

    @property
    def unusable(self) -> bool:
        """True if the labels cannot be used: to compute on would read, and later write, where nothing belongs."""
        return any(each.name in ("float-labels", "labels-out-of-range") for each in self.findings)

    def _find(self, finding: Finding) -> None:
        if finding.name not in (each.name for each in self.findings):
            self.findings.append(finding)


@contextlib.contextmanager
def watching_losses(calls: LossCalls) -> Iterator[None]:
    """Look at every call of MLX's cross entropies in the block, and of what they are made of."""

    def before(look: Callable[..., None], function: Any) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            with contextlib.suppress(ValueError, TypeError, IndexError):  # a tracer, or what the function will refuse
                look(*arguments, **named)
            return function(*arguments, **named)

        return called

    def take(array: mx.array, indices: mx.array, axis: int | None = None, **_: Any) -> None:
        if axis is not None and array.ndim == indices.ndim:
            calls.picked(array.shape[axis], indices, negative=indices.shape[axis] == 1)

    def fast(logits: mx.array, targets: mx.array, **_: Any) -> None:
        calls.picked(logits.shape[-1], targets, negative=True)

    def cross_entropy(logits: mx.array, targets: mx.array, *_: Any, axis: int = -1, **__: Any) -> None:
        calls.scores("nn.losses.cross_entropy", logits, axis)

    def log_softmax(x: mx.array, axis: int = -1) -> None:
        calls.scores("nn.log_softmax", x, axis)

    def logsumexp(x: mx.array, axis: Any = None, **_: Any) -> None:
        if isinstance(axis, int):
            calls.scores("mx.logsumexp", x, axis)

    def binary(inputs: mx.array, targets: mx.array, weights: Any = None, with_logits: bool = True, **_: Any) -> None:
        if with_logits:
            calls.score("nn.losses.binary_cross_entropy", inputs)

    def softmax(x: mx.array, axis: Any = None, **_: Any) -> None:
        calls.softmax(x, axis)

    looks: list[tuple[Any, str, Callable[..., None]]] = [
        (mx, "softmax", softmax),
        (mx, "take_along_axis", take),
        (mx, "logsumexp", logsumexp),
        (mx.fast, "cross_entropy", fast),
        (nn, "log_softmax", log_softmax),
        (nn.losses, "cross_entropy", cross_entropy),
        (nn.losses, "binary_cross_entropy", binary),
    ]
    with replaced([(home, name, before(look, getattr(home, name))) for home, name, look in looks]):
        yield


@contextlib.contextmanager
def replaced(functions: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put others in the place of functions of a module in the block, also under the names of the user's modules."""
    others = {id(function := getattr(home, name)): (function, other) for home, name, other in functions}
    homes = [(vars(home), name) for home, name, _ in functions]
    changed = [*homes, *(each for each in _names_of_users(others) if each not in homes)]
    try:
        for home, name in changed:
            home[name] = others[id(home[name])][1]
        yield
    finally:
        originals = {id(other): function for function, other in others.values()}
        for home, name in changed:
            home[name] = originals.get(id(home[name]), home[name])


def _names_of_users(functions: dict[int, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the names that the user's modules have for these functions: namespace and name."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if getattr(module, "__name__", "") == "__main__" or (isinstance(file, str) and is_users(file)):
            space = vars(module)
            yield from ((space, key) for key, value in list(space.items()) if id(value) in functions)


def _out_of_range(classes: int, low: int, high: int) -> Finding:
    text = (
        f"labels go from {low} to {high}, and the logits have {classes} classes: MLX does not check labels, and reads "
        "other memory"
    )
    remedy = "leave out what is not to be learned by a mask or a weight (an ignored -100 too), and count classes from 0"
    code = "mask = y >= 0\nlosses = nn.losses.cross_entropy(logits, mx.where(mask, y, 0)) * mask"
    return Finding("labels-out-of-range", "failure", text, remedy, code)


def _float_labels(labels: mx.array) -> Finding:
    kind = str(labels.dtype).removeprefix("mlx.core.")
    text = f"the {labels.size} labels of a cross entropy are {kind}: class numbers have to be integers"
    return Finding("float-labels", "failure", text, "cast them where the batch is made", "y = y.astype(mx.int32)")


def _over_all_axes(x: mx.array) -> Finding:
    text = (
        f"mx.softmax without axis= is taken over all axes of shape {list(x.shape)}: the whole batch has the sum 1, not "
        "each row"
    )
    remedy = "name the axis of the classes"
    return Finding("softmax-axis", "warning", text, remedy, "mx.softmax(logits, axis=-1)")


def _probabilities(function: str, what: str) -> Finding:
    text = f"{function} gets probabilities, the result of {what}, where it expects logits: it applies {what} again"
    remedy = "give it what the last linear layer returns; gradients are small otherwise, and the loss stays high"
    return Finding("probabilities", "failure", text, remedy, "return self.head(x)   # not mx.softmax(self.head(x))")
