"""Metrics: scalars beside the loss, computed with it and averaged as it is.

A loss function returns them itself, `(loss, {"accuracy": ...})`, or functions compute them from what it returns beside
the loss, as `Trainer(metrics={"accuracy": accuracy()})` and the config's `metrics` take them:
`metric(outputs, *batch)`, where `outputs` is what the loss function returned beside loss and weight. They belong to the
trace of the step, so that nothing waits for them before a logger reads them. What is no mean over batches, such as F1
or the area under a curve, is an `OfAll`: a validation computes it of all predictions. Uses `_optional`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from faststep._optional import need

Metric = Callable[..., Any]
Array = np.ndarray[Any, Any]
_SMALLER = ("val/loss", "val/perplexity")  # is better


class OfLoss:
    """A metric of the mean loss, computed from the average rather than averaged, such as the perplexity.

    Args:
        function: The metric of a mean loss, both numbers.

    Example:
        >>> bits = OfLoss(lambda loss: loss / math.log(2))
        >>> bits(math.log(8))
        3.0
    """

    def __init__(self, function: Callable[[float], float]) -> None:
        self._function = function

    def __call__(self, loss: float) -> float:
        """Return the metric of a mean loss; infinity where that overflows."""
        try:
            return float(self._function(loss))
        except OverflowError:
            return math.inf


def perplexity() -> OfLoss:
    """Make the perplexity of a language model: e to the power of the mean loss in nats."""
    return OfLoss(math.exp)


def accuracy(*, ignore_index: int = -100) -> Metric:
    """Make the accuracy: the share of the labels that the model finds, 0 to 1.

    It takes the batch of `faststep.recipes.cross_entropy` or `next_token`, whose `outputs` are logits [..., classes],
    with labels `y`, integers [...], or the tokens after those that were predicted from; and a `mask` of the labels'
    shape, 0 where they do not count. Where outputs and labels have one shape, `[batch]` or `[batch, 1]`, the outputs
    are logits of the label 1, and positive ones predict it.

    Args:
        ignore_index: The label of what does not count.
    """

    def metric(
        outputs: mx.array,
        x: mx.array,
        y: mx.array | None = None,
        mask: mx.array | None = None,
        *_: Any,
        **__: Any,
    ) -> mx.array:
        labels, counts, binary = _labelled("accuracy", ignore_index, outputs, x, y, mask)
        right = (outputs > 0) == (labels > 0.5) if binary else outputs.argmax(axis=-1) == labels
        return (right * counts).sum() / mx.maximum(counts.sum(), 1e-9)

    return metric


class _Labelled(NamedTuple):
    """Labels, how much each counts (float32), both of one shape; and whether outputs are logits of the label 1."""

    labels: mx.array
    counts: mx.array
    binary: bool


def _labelled(
    name: str, ignore_index: int, outputs: mx.array, x: mx.array, y: mx.array | None, mask: mx.array | None
) -> _Labelled:
    """Return the labels of outputs out of a batch of `cross_entropy` or `next_token`.

    Raises:
        ValueError: They do not fit the outputs.
    """
    if y is None or (y.dtype == mx.bool_ and y.shape != outputs.shape[:-1] and y.shape == x.shape):
        y, mask = x, mask if y is None else y  # tokens, and their mask in the place of the labels
    if outputs.ndim == y.ndim + 1 and y.ndim == 2 and outputs.shape[1] == y.shape[1] - 1:
        y, mask = y[:, 1:], None if mask is None else mask[:, 1:]
    binary = outputs.shape == y.shape
    if not binary and outputs.shape[:-1] != y.shape:
        raise ValueError(
            f"{name}: expected outputs [..., classes] for labels {list(y.shape)}, got {list(outputs.shape)}"
        )
    return _Labelled(y, (y != ignore_index).astype(mx.float32) * (1 if mask is None else mask), binary)


class OfAll:
    """A metric of all predictions of a validation, which no mean over batches gives: F1, the area under a curve.

    It takes the batches that `accuracy` takes. There is none of training batches. All outputs of a validation are held
    until its end.

    Args:
        function: `function(labels, outputs)` returns a number, or numbers by name, of NumPy arrays: the labels that
            count, [samples], and the outputs, [samples, classes] or [samples].
        ignore_index: The label of what does not count.

    Example:
        >>> import numpy as np
        >>> largest = OfAll(lambda labels, outputs: outputs.max())
        >>> largest(np.array([0, 1]), np.array([[0.5, 0.1], [0.2, 0.7]]))
        0.7
    """

    def __init__(self, function: Callable[[Array, Array], Any], *, ignore_index: int = -100) -> None:
        self._function, self._ignored = function, ignore_index

    def __call__(self, labels: Array, outputs: Array) -> Any:
        """Compute the metric."""
        found = self._function(labels, outputs)
        return found if isinstance(found, Mapping) else float(found)

    def gather(
        self,
        outputs: mx.array,
        x: mx.array,
        y: mx.array | None = None,
        mask: mx.array | None = None,
        *_: Any,
        **__: Any,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return labels, outputs and what counts of a batch: [samples], [samples, classes] or [samples], [samples]."""
        labels, counts, binary = _labelled("metrics", self._ignored, outputs, x, y, mask)
        shape = (-1,) if binary else (-1, outputs.shape[-1])
        return labels.flatten(), outputs.astype(mx.float32).reshape(shape), counts.flatten() > 0


class Predictions:
    """Predictions of a validation for its `OfAll` metrics.

    Attributes:
        metrics: The metrics, by name.
        parts: The labels that count and their outputs, batch by batch, for each metric.
    """

    def __init__(self, loss_fn: Any) -> None:
        self.metrics: Mapping[str, OfAll] = getattr(loss_fn, "of_all", {})
        self.parts: dict[str, list[tuple[Array, Array]]] = {name: [] for name in self.metrics}

    def add(self, gathered: Mapping[str, tuple[mx.array, mx.array, mx.array]]) -> None:
        """Keep what the metrics have gathered of a batch."""
        for name, found in gathered.items():
            labels, outputs, counts = map(np.array, found)
            self.parts[name].append((labels[counts], outputs[counts]))

    def read(self) -> dict[str, float]:
        """Return the metrics by name; those of one that returns several have its name before theirs."""
        values: dict[str, float] = {}
        for name, parts in self.parts.items():
            found = self.metrics[name](*map(np.concatenate, zip(*parts, strict=True))) if parts else {}
            if isinstance(found, Mapping):
                values |= {f"{name}/{key}": float(each) for key, each in found.items()}
            else:
                values[name] = found
        return values


def scikit_learn(scorer: str, *, ignore_index: int = -100) -> OfAll:
    """Make a metric of scikit-learn's: a scorer of a classification, over all predictions of a validation.

    Args:
        scorer: Its name: "f1", "f1_macro", "precision", "recall", "roc_auc", "roc_auc_ovr", "average_precision",
            "balanced_accuracy", "matthews_corrcoef" and more: `sklearn.metrics.get_scorer_names()`.
        ignore_index: The label of what does not count.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: There is no such scorer.
    """
    base: Any = need("sklearn.base", None)
    library: Any = need("sklearn.metrics", None)
    if scorer not in library.get_scorer_names():
        raise ValueError(f"scorer: expected one of {', '.join(library.get_scorer_names())}, got {scorer!r}")
    score = library.get_scorer(scorer)

    class Given(base.ClassifierMixin, base.BaseEstimator):  # type: ignore[misc]
        """A classifier whose inputs are what a model has given for them."""

        def __init__(self, classes_: Array) -> None:
            self.classes_ = classes_

        def predict(self, outputs: Array) -> Array:
            return (outputs > 0).astype(int) if outputs.ndim == 1 else outputs.argmax(axis=1)

        def predict_proba(self, outputs: Array) -> Array:
            logits = np.stack([np.zeros_like(outputs), outputs], axis=1) if outputs.ndim == 1 else outputs
            powers = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float64))
            return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def function(labels: Array, outputs: Array) -> float:
        binary = outputs.ndim == 1
        given = Given(np.arange(2 if binary else outputs.shape[1]))
        return float(score(given, outputs, (labels > 0.5).astype(int) if binary else labels))

    return OfAll(function, ignore_index=ignore_index)


METRICS: dict[str, Callable[..., Metric]] = {  # each makes a metric
    "accuracy": accuracy,
    "perplexity": perplexity,
    "scikit_learn": scikit_learn,
}


class LossWithMetrics:
    """A loss function with the metrics of functions: it returns `(loss, {name: metric})`, with a weight between.

    Attributes:
        loss_fn: The loss function.
        of_loss: The metrics of the mean loss, by name.
        of_all: The metrics of all predictions of a validation, by name.
    """

    def __init__(self, loss_fn: Callable[..., Any], metrics: Mapping[str, Metric], *, weighted: bool) -> None:
        """Check the metrics.

        Args:
            loss_fn: It returns `(loss, outputs)`, or `(loss, weight, outputs)` where it is weighted, `outputs` being
                what the metrics take first; a dict of scalars behind it holds metrics of its own. Without functions
                among the metrics it may return the loss alone.
            metrics: Functions `metric(outputs, *batch)` of which each returns a scalar, `OfLoss`es and `OfAll`s, by
                name.
            weighted: Whether the loss function returns a weight.

        Raises:
            TypeError: A metric is no function, or a name is no text.
            ValueError: A name is empty or "loss".
        """
        for name, metric in metrics.items():
            if not isinstance(name, str) or not callable(metric):
                raise TypeError(f"metrics: expected functions by name, got {metric!r} for {name!r}")
            if name in ("", "loss"):
                raise ValueError(f"metrics: expected another name than {name!r}")
        self.loss_fn: Callable[..., Any] = loss_fn.loss_fn if isinstance(loss_fn, LossWithMetrics) else loss_fn
        self.of_loss = {name: metric for name, metric in metrics.items() if isinstance(metric, OfLoss)}
        self.of_all = {name: metric for name, metric in metrics.items() if isinstance(metric, OfAll)}
        others = self.of_loss | self.of_all
        self._functions = {name: metric for name, metric in metrics.items() if name not in others}
        self._head = 2 if weighted else 1
        self.__name__ = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)

    def __call__(self, model: Any, *batch: Any, **named: Any) -> Any:
        """Compute loss and metrics.

        Raises:
            ValueError: The loss function returns no outputs, or a metric is no scalar.
        """
        return self._reduced(self.loss_fn(model, *batch, **named), batch, named)[0]

    def evaluated(self, model: Any, *batch: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
        """Compute loss and metrics, and what the metrics of all predictions gather of a batch, by name.

        Raises:
            ValueError: As a call does, or outputs and labels do not fit.
        """
        value, outputs = self._reduced(self.loss_fn(model, *batch, **named), batch, named)
        return value, {name: each.gather(outputs, *batch, **named) for name, each in self.of_all.items()}

    def _reduced(self, value: Any, batch: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return what the loss function has returned with metrics in place of the outputs, and the outputs."""
        if not self._functions and not self.of_all:
            return value, None
        parts = value if isinstance(value, tuple) else (value,)
        head, aux = parts[: self._head], parts[self._head :]
        if not aux or scalars([aux[0]]):
            names = ", ".join(self._functions | self.of_all)
            expected = "(loss, weight, outputs)" if self._head == 2 else "(loss, outputs)"
            raise ValueError(f"metrics: expected the loss function to return {expected} for {names}, got no outputs")
        found = {name: metric(aux[0], *batch, **named) for name, metric in self._functions.items()}
        for name, each in found.items():
            if not _is_scalar(each):
                raise ValueError(f"metrics: {name}: expected a scalar, got {_shape(each)}")
        return (*head, scalars(aux[1:]) | found), aux[0]


def of_loss(loss_fn: Any, loss: float | None) -> dict[str, float]:
    """Return a loss function's metrics of a mean loss; none where there is no loss."""
    functions: Mapping[str, OfLoss] = getattr(loss_fn, "of_loss", {})
    return {} if loss is None else {name: function(loss) for name, function in functions.items()}


def scalars(aux: Iterable[Any]) -> dict[str, Any]:
    """Return the metrics among what a loss function returns beside the loss: the scalars in dicts, by name.

    What is called "loss" there is the loss itself, and is left out.
    """
    items = (item for each in aux if isinstance(each, dict) for item in each.items())
    return {name: value for name, value in items if isinstance(name, str) and name != "loss" and _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return value.size == 1 if isinstance(value, mx.array) else isinstance(value, bool | int | float)


def _shape(value: Any) -> str:
    return f"an array {list(value.shape)}" if isinstance(value, mx.array) else type(value).__name__


class Average:
    """Weighted means of losses and metrics, by name; in the order in which they were added, to the bit.

    Args:
        sums: What `sums` gave, to go on with.
    """

    def __init__(self, sums: Mapping[str, Iterable[float]] | None = None) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        for name, (total, weight) in (sums or {}).items():
            self._sums[name] = (float(total), float(weight))

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Add values of a weight; nothing where that is zero."""
        if not weight:
            return
        for name, value in values.items():
            total, whole = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + value * weight, whole + weight

    def join(self, other: Average) -> None:
        """Add what is in another one."""
        for name, (total, weight) in other._sums.items():
            mine = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = mine[0] + total, mine[1] + weight

    @property
    def sums(self) -> dict[str, list[float]]:
        """The sum and the weight of each name: plain JSON values, NaN aside."""
        return {name: list(pair) for name, pair in self._sums.items()}

    def read(self) -> tuple[float | None, dict[str, float]]:
        """Return the mean loss, None where there was none, and the means of the rest."""
        means = {name: total / weight for name, (total, weight) in self._sums.items()}
        return means.pop("loss", None), means


def direction(monitor: str, mode: str | None) -> Literal["min", "max"]:
    """Return whether a monitored value is better when it is smaller, or larger.

    Args:
        monitor: "val/loss", or "val/" and the name of a metric.
        mode: "min", "max" or None: "min" for the loss and the perplexity; of others it is not known.

    Raises:
        ValueError: `monitor` names no value of a validation, or `mode` is something else or missing.
    """
    if not monitor.startswith("val/") or monitor == "val/":
        hint = "" if "/" in monitor or not monitor else f": did you mean 'val/{monitor}'?"
        raise ValueError(f'monitor: expected "val/loss", or "val/" and the name of a metric, got {monitor!r}{hint}')
    if mode is None and monitor in _SMALLER:
        return "min"
    if mode not in ("min", "max"):
        alike = difflib.get_close_matches(monitor, _SMALLER, 1, 0.85) if mode is None else []
        hint = f": did you mean monitor={alike[0]!r}?" if alike else ""
        raise ValueError(f'mode: expected "min" or "max" for {monitor}, got {mode!r}{hint}')
    return "max" if mode == "max" else "min"
