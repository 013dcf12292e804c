"""Validation: the mean loss and metrics on data that is not trained on."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from faststep._random import mlx_seed
from faststep._records import number
from faststep._step import Ranks, Step, call_with
from faststep.metrics import Average, Predictions, of_loss, scalars
from faststep.training import _ids
from faststep.training._few_bits import unpacked
from faststep.training._window import rows_of

_AHEAD = 1  # batches whose results are not waited for


class Evaluation(NamedTuple):
    """Result of a validation.

    Attributes:
        loss: The mean loss, NaN where nothing had weight.
        batches: The number of batches.
        metrics: The means of the metrics, by name.
    """

    loss: float
    batches: int
    metrics: dict[str, float]


@contextlib.contextmanager
def evaluating(step: Step) -> Iterator[nn.Module]:
    """Show the model as validation sees it: in evaluation mode, with the average of the weights where there is one.

    Behind the block each module has its mode back, and `mx.random.state` is what it was.
    """
    model, key = step.model, mlx_seed()
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        average = step.average() if step.options.ema_decay is not None else contextlib.nullcontext()
        with average, unpacked(model):
            yield model
    finally:
        for module in training:
            module._set_training_mode(True)
        mx.random.seed(key)


def validate(step: Step, batches: Iterable[Any], most: int | None = None) -> Evaluation:
    """Compute the mean loss and metrics of some batches, with the average of the weights where the step keeps one.

    The model is in evaluation mode meanwhile, and `mx.random.state` is afterwards what it was, so that training goes on
    as if nothing had happened. A batch counts by its weight where the loss has one (`weighted=True`), otherwise by the
    length of its first array. The metrics are the scalars in the dicts that the loss function returns beside the loss.

    With a step that has a `group`, and a `Loader` that is shared by its ranks, these are of the batches of all ranks,
    all of which have to call this.

    Args:
        step: The step, whose model and loss function are taken.
        batches: The batches.
        most: Take at most so many; None: all.

    Returns:
        The means, and the number of batches.
    """
    with _ids.guarded(), evaluating(step):
        is_shared = getattr(batches, "world_size", 1) > 1 or step.ranks.same_batch
        return evaluate(step, batches, most, ranks=step.ranks if is_shared else None)


def evaluate(
    step: Step,
    batches: Iterable[Any],
    most: int | None,
    on_batch: Callable[[], None] = lambda: None,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Compute the means of some batches with the model as it is, and call `on_batch` after each; see `validate`.

    With `ranks`, over the batches that all of them have.
    """
    average, predictions, count = Average(), Predictions(step.loss_fn), 0
    unread: deque[tuple[dict[str, Any], Any, dict[str, Any]]] = deque()
    start = getattr(batches, "state", None)
    try:
        for batch in itertools.islice(batches, most):
            unread.append(_called(step, batch, bool(predictions.metrics)))
            count += 1
            on_batch()
            if len(unread) > _AHEAD:
                _read(average, predictions, *unread.popleft())
        while unread:
            _read(average, predictions, *unread.popleft())
    finally:
        if start is not None and hasattr(batches, "load_state"):
            batches.load_state(start)  # the same batches the next time
    if ranks is not None:
        parts = ranks.gather([average.sums, count], "validation")[: ranks.loaders]
        average, count = Average(), sum(each for _, each in parts)
        for sums, _ in parts:
            average.join(Average(sums))
    loss, metrics = average.read()
    metrics |= of_loss(step.loss_fn, loss) | (predictions.read() if ranks is None else _of_all(predictions, ranks))
    return Evaluation(float("nan") if loss is None else loss, count, metrics)


def _of_all(predictions: Predictions, ranks: Ranks) -> dict[str, float]:
    """Return the metrics of the predictions of all ranks, in the order of one process: by batch, then by rank."""
    if ranks.group is None or not predictions.metrics:
        return predictions.read()
    for name, parts in predictions.parts.items() if ranks.loaders > 1 else ():
        mine: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)] or [None, None]
        lengths = ranks.gather([len(labels) for labels, _ in parts], "validation")
        columns = [
            [np.split(rows, np.cumsum(each)[:-1]) for rows, each in zip(theirs, lengths, strict=True)]
            for theirs in (ranks.gather_rows(column, "validation") for column in mine)
        ]
        order = sorted((batch, rank) for rank, each in enumerate(lengths) for batch in range(len(each)))
        predictions.parts[name] = [(columns[0][rank][batch], columns[1][rank][batch]) for batch, rank in order]
    with ranks.told():
        found = predictions.read() if ranks.rank == 0 else {}
    values: dict[str, float] = ranks.gather(found, "validation")[0]
    return values


def _called(step: Step, batch: Any, gathers: bool) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return loss and metrics by name, the weight, and what metrics of all predictions gather; nothing waits for it."""
    loss_fn: Any = step.loss_fn
    found = call_with(batch, loss_fn.evaluated if gathers else loss_fn, step.model)
    value, gathered = found if gathers else (found, {})
    loss, *aux = value if isinstance(value, tuple) else (value,)
    weight = aux.pop(0) if step.options.weighted else rows_of(batch)
    values = {"loss": loss, **scalars(aux)}
    arrays = [*values.values(), weight, *itertools.chain(*gathered.values())]
    mx.async_eval([each for each in arrays if isinstance(each, mx.array)])
    return values, weight, gathered


def _read(
    average: Average, predictions: Predictions, values: dict[str, Any], weight: Any, gathered: dict[str, Any]
) -> None:
    predictions.add(gathered)
    average.add({name: number(value) for name, value in values.items()}, number(weight))
