"""Metrics: scalars beside the loss, computed with it and averaged as it is.

A loss function returns them itself, `(loss, {"accuracy": ...})`, or functions compute them from what it returns beside
the loss, as `Trainer(metrics={"accuracy": accuracy()})` and the config's `metrics` take them:
`metric(outputs, *batch)`, where `outputs` is what the loss function returned beside loss and weight. They belong to the
trace of the step, so that nothing waits for them before a logger reads them. Uses no other room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import mlx.core as mx

Metric = Callable[..., Any]


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
        if y is None or (y.dtype == mx.bool_ and y.shape != outputs.shape[:-1] and y.shape == x.shape):
            y, mask = x, mask if y is None else y  # tokens, and their mask in the place of the labels
        shift = outputs.ndim == y.ndim + 1 and y.ndim == 2 and outputs.shape[1] == y.shape[1] - 1
        if shift:
            y, mask = y[:, 1:], None if mask is None else mask[:, 1:]
        binary = outputs.shape == y.shape
        if not binary and outputs.shape[:-1] != y.shape:
            raise ValueError(
                f"accuracy: expected outputs [..., classes] for labels {list(y.shape)}, got {list(outputs.shape)}"
            )
        right = (outputs > 0) == (y > 0.5) if binary else outputs.argmax(axis=-1) == y
        counts = (y != ignore_index).astype(mx.float32) * (1 if mask is None else mask)
        return (right * counts).sum() / mx.maximum(counts.sum(), 1e-9)

    return metric


METRICS: dict[str, Callable[..., Metric]] = {"accuracy": accuracy, "perplexity": perplexity}  # each makes a metric


class LossWithMetrics:
    """A loss function with the metrics of functions: it returns `(loss, {name: metric})`, with a weight between.

    Attributes:
        loss_fn: The loss function.
        of_loss: The metrics of the mean loss, by name.
    """

    def __init__(self, loss_fn: Callable[..., Any], metrics: Mapping[str, Metric], *, weighted: bool) -> None:
        """Check the metrics.

        Args:
            loss_fn: It returns `(loss, outputs)`, or `(loss, weight, outputs)` where it is weighted, `outputs` being
                what the metrics take first; a dict of scalars behind it holds metrics of its own. Without functions
                among the metrics it may return the loss alone.
            metrics: Functions `metric(outputs, *batch)` of which each returns a scalar, and `OfLoss`es, by name.
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
        self._functions = {name: metric for name, metric in metrics.items() if name not in self.of_loss}
        self._head = 2 if weighted else 1
        self.__name__ = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)

    def __call__(self, model: Any, *batch: Any, **named: Any) -> Any:
        """Compute loss and metrics.

        Raises:
            ValueError: The loss function returns no outputs, or a metric is no scalar.
        """
        value = self.loss_fn(model, *batch, **named)
        if not self._functions:
            return value
        parts = value if isinstance(value, tuple) else (value,)
        head, aux = parts[: self._head], parts[self._head :]
        if not aux or scalars([aux[0]]):
            names = ", ".join(self._functions)
            expected = "(loss, weight, outputs)" if self._head == 2 else "(loss, outputs)"
            raise ValueError(f"metrics: expected the loss function to return {expected} for {names}, got no outputs")
        found = {name: metric(aux[0], *batch, **named) for name, metric in self._functions.items()}
        for name, each in found.items():
            if not _is_scalar(each):
                raise ValueError(f"metrics: {name}: expected a scalar, got {_shape(each)}")
        return *head, scalars(aux[1:]) | found


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
        raise ValueError(f'monitor: expected "val/loss", or "val/" and the name of a metric, got {monitor!r}')
    if mode is None and monitor in ("val/loss", "val/perplexity"):
        return "min"
    if mode not in ("min", "max"):
        raise ValueError(f'mode: expected "min" or "max" for {monitor}, got {mode!r}')
    return "max" if mode == "max" else "min"
