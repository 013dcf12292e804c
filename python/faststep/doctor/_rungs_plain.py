"""The lower rungs: the data alone, the loss, its gradient, and the update, in plain MLX without compilation."""

from __future__ import annotations

import itertools
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from faststep._random import mlx_key
from faststep._step import call_with
from faststep.doctor import _lazy
from faststep.doctor._finding import Finding
from faststep.doctor._graph import operations
from faststep.doctor._loss_functions import LossCalls, watching_losses
from faststep.doctor._modules import Indices, watching
from faststep.doctor._recorder import Recorder
from faststep.doctor._subject import TAKEN, Subject, arguments

_END = object()
_FEW = 100  # operations that may wait behind a batch in the thread that trains


def data(subject: Subject, record: Recorder) -> None:
    """Take batches, and nothing else."""
    record.at("the first batch")
    batches, end = iter(subject.batches), time.perf_counter() + record.seconds
    for number in range(record.steps):
        start = time.perf_counter()
        batch = next(batches, _END)
        if batch is _END:
            break
        record.step(time.perf_counter() - start)
        record.at(f"batch {number + 2}")
        if len(subject.taken) < TAKEN:
            subject.taken.append(batch)
        elif time.perf_counter() > end:
            break
    if not subject.taken:
        remedy = "give an iterable with batches; a generator that has been read is empty: make it anew"
        record.find(Finding("no-data", "failure", "the data gave no batch", remedy, "batches = list(batches)"))
    if hasattr(batches, "close") and batches is not subject.batches:
        record.at("the end of the data")
        batches.close()


def evaluated(subject: Subject, record: Recorder) -> None:
    """Look whether the batches are evaluated, and whether they can be in this thread."""
    counts: dict[str, list[int]] = {}
    for batch in subject.some():
        for name, leaf in arguments(batch):
            if isinstance(leaf, mx.array):
                counts.setdefault(name, []).append(operations(leaf))
    waiting = {name: found for name, found in counts.items() if any(found)}
    for batch in subject.some():
        for name, leaf in arguments(batch):
            if isinstance(leaf, mx.array):
                record.at(f"evaluating {name} of a batch")
                try:
                    mx.eval(leaf)
                except RuntimeError as error:
                    if "There is no Stream" not in str(error):
                        raise
                    record.find(_lazy.across_threads(name))
                    return
    grow = {name: found for name, found in waiting.items() if len(found) > 3 and found[-1] > found[0] + 2}
    if grow:
        name = next(iter(grow))
        text = f"{name}: each batch has a longer unevaluated graph than the one before ({grow[name]} operations)"
        record.find(Finding("lazy-batch", "warning", text, _lazy.REMEDY, _lazy.CODE))
    elif waiting:
        name, found = max(waiting.items(), key=lambda item: max(item[1]))
        level: Any = "warning" if max(found) > _FEW else "note"
        text = f"{name} is not evaluated when the loader yields the batch: {max(found)} operations wait behind it"
        remedy = (
            "in one thread that is harmless; a loader that prefetches has to evaluate each batch in the thread that "
            "makes it"
        )
        record.find(Finding("lazy-batch", level, text, remedy if level == "note" else _lazy.REMEDY, _lazy.CODE))


def forward(subject: Subject, record: Recorder) -> None:
    """Compute the loss of one batch."""
    start = time.perf_counter()
    indices, calls = Indices(), LossCalls()
    with watching(subject.model, indices), watching_losses(calls):
        loss = first(call_with(subject.some()[0], subject.loss_fn, subject.model))
    for finding in [*indices.findings, *calls.findings]:
        record.find(finding)
    if indices.findings or calls.unusable:
        return
    if not isinstance(loss, mx.array):
        text = f"the loss function returns a {type(loss).__name__}, which has no gradient"
        remedy = "return the loss as the array that it is, without .item(), float() or numpy"
        record.find(Finding("loss-from-item", "failure", text, remedy, "return loss   # not loss.item()"))
        return
    mx.eval(loss)
    if loss.size != 1 or loss.ndim:
        text = f"the loss has shape {list(loss.shape)}, not that of a scalar"
        record.find(Finding("loss-shape", "failure", text, "take its mean", "return losses.mean()"))
        return
    record.step(time.perf_counter() - start, loss)


def repeated(subject: Subject, record: Recorder) -> None:
    """Compute the loss again and again."""

    def body(batch: Any) -> mx.array:
        loss = first(call_with(batch, subject.loss_fn, subject.model))
        mx.eval(loss, subject.model.state)
        return mx.array(loss)

    with _lazy.watched(subject.loss_fn, "the loss function", record):
        record.measure(body, subject.some())


def gradient(subject: Subject, record: Recorder) -> None:
    """Compute loss and gradients, and change nothing."""

    def body(batch: Any) -> mx.array:
        value, gradients = value_and_gradients(subject, batch)
        mx.eval(value, gradients, subject.model.state)
        return mx.array(first(value))

    record.measure(body, subject.some())


def unevaluated(subject: Subject, record: Recorder) -> None:
    """Update without evaluating anything, a few times: the graph grows, as it has to; then evaluate it once."""
    optimizer, model = subject.optimizer, subject.model

    def body(batch: Any) -> None:
        _, gradients = value_and_gradients(subject, batch)
        optimizer.update(model, gradients)

    count = record.measure(body, subject.some(), steps=10)
    arrays = [each for _, each in _lazy.state_of(model, optimizer)]
    record.say("graph", operations=operations(*arrays), steps=count)
    record.at("evaluating what ten steps have left")
    mx.eval(arrays)


def joint(subject: Subject, record: Recorder) -> None:
    """Update, and evaluate parameters and optimizer state together."""
    with _lazy.watched(subject.loss_fn, "the loss function", record):
        record.measure(lambda batch: plain_step(subject, batch), subject.some())


def clearing(subject: Subject, record: Recorder) -> None:
    """Do the same, and clear the cache behind each step."""

    def body(batch: Any) -> mx.array:
        loss = plain_step(subject, batch)
        mx.clear_cache()
        return loss

    record.measure(body, subject.some())


def plain_step(subject: Subject, batch: Any) -> mx.array:
    """Take the step of MLX's documentation."""
    value, gradients = value_and_gradients(subject, batch)
    subject.optimizer.update(subject.model, clipped(subject, gradients))
    mx.eval(value, subject.model.state, subject.optimizer.state, mx.random.state)
    return mx.array(first(value))


def value_and_gradients(subject: Subject, batch: Any) -> tuple[Any, Any]:
    """Return what the loss function returns, and the gradients."""
    return call_with(batch, nn.value_and_grad(subject.model, subject.loss_fn), subject.model)  # type: ignore[no-any-return]


def draws(subject: Subject) -> bool:
    """Return whether the loss draws random numbers of MLX: for dropout, noise or samples."""
    before = mlx_key().tolist()
    value_and_gradients(subject, subject.some()[0])
    return bool(mlx_key().tolist() != before)


def clipped(subject: Subject, gradients: Any) -> Any:
    """Clip as the step's options say."""
    if (most := subject.options.get("max_grad_norm")) is not None:
        gradients, _ = optim.clip_grad_norm(gradients, most)
    if (value := subject.options.get("max_grad_value")) is not None:
        gradients = tree_map(lambda each: mx.clip(each, -value, value), gradients)
    return gradients


def first(value: Any) -> Any:
    """Return the loss among what the loss function returns."""
    return next(itertools.islice(value, 1), None) if isinstance(value, tuple | list) else value
