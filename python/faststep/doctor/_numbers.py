"""Checks of numbers: gradients by parameter, updates that round away, values that are not finite, labels, rates."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from faststep._random import mlx_key, seed_of
from faststep._step import call_with
from faststep.doctor import _all_batches, _data_checks, _frozen, _gradients, _meaning, _outside
from faststep.doctor._finding import Finding
from faststep.doctor._held import Losses
from faststep.doctor._loss_functions import LossCalls, watching_losses
from faststep.doctor._modules import Indices, Layouts, Origin, bad_rows, watching
from faststep.doctor._recorder import Recorder
from faststep.doctor._rungs_plain import clipped, first, value_and_gradients
from faststep.doctor._subject import Subject, arguments

_STEPS = 30


def numbers(subject: Subject, record: Recorder) -> None:
    """Look at data, modules, gradients and updates of the first steps."""
    for finding in [*_data_checks.findings(subject), *_frozen.findings(subject.model)]:
        record.find(finding)
    if not _trainable(subject.model):
        record.find(_all_frozen(subject.model))
        return
    record.at("the loss, module by module")
    if not _forward(subject, record):
        return
    record.at("labels and tokens of all batches")
    if not _all_batches.look(subject, record):
        return
    record.at("what the loss depends on")
    for finding in [*_meaning.findings(subject), *_outside.findings(subject)]:
        record.find(finding)
    record.at("the first gradients")
    tracked = _gradients.Tracked(subject.model)
    cut = tracked.cut_off(subject)
    begin = _mean_loss(subject)
    bad = _steps(subject, record, tracked)
    record.say("gradients", modules=tracked.by_module())
    found = cut + tracked.findings(cut) if bad is None else bad
    if (diverges := tracked.diverges(begin, subject)) is not None:
        found = [diverges]  # gradients explode with it, and values are not finite in the end
    for each in [*found, *tracked.rates(subject.optimizer)]:
        record.find(each)


def _trainable(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.trainable_parameters()))


def _all_frozen(model: nn.Module) -> Finding:
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    count = sum(each.size for each in arrays.values())
    text = f"nothing is trainable: all {count:,} parameters are frozen"
    remedy = "unfreeze what is to be trained; linear_to_lora_layers and quantize freeze, and so does freeze()"
    return Finding("all-frozen", "failure", text, remedy, "model.unfreeze()   # or: model.head.unfreeze()")


def _forward(subject: Subject, record: Recorder) -> bool:
    """Compute the loss with every module watched; return whether it could be computed."""
    layouts, indices, calls = Layouts(), Indices(), LossCalls()
    shapes: dict[str, list[int]] = {}

    def look(path: str, module: nn.Module, inputs: list[mx.array], outputs: list[mx.array]) -> None:
        layouts(path, module, inputs, outputs)
        indices(path, module, inputs, outputs)
        if outputs:
            shapes.setdefault(path, list(outputs[0].shape))

    before = subject.model.parameters()
    try:
        with watching(subject.model, look), watching_losses(calls):
            for batch in subject.some()[:3]:
                value = call_with(batch, subject.loss_fn, subject.model)
                if indices.findings or calls.unusable:
                    return False  # to compute it would read, and later write, where nothing belongs
                mx.eval(value)
    except Exception as error:
        if not layouts.findings:
            record.failed(error)
        return False
    finally:
        subject.model.update(before)
        for finding in [*layouts.findings, *indices.findings, *calls.findings]:
            record.find(finding)
    record.say("shapes", outputs=shapes)
    return True


def _mean_loss(subject: Subject) -> float | None:
    """Return the mean loss of the first batches before a step; None where one is not finite."""
    losses = Losses(subject)
    found = [each for batch in subject.some() if (each := losses.of(batch)) is not None]
    return sum(found) / len(found) if len(found) == len(subject.some()) else None


def _steps(subject: Subject, record: Recorder, tracked: _gradients.Tracked) -> list[Finding] | None:
    """Take plain steps and follow the gradients; return what is not finite, where that is so."""
    batches, end = subject.some(), time.perf_counter() + record.seconds
    model, optimizer = subject.model, subject.optimizer
    for number in range(1, _STEPS + 1):
        batch, start = batches[(number - 1) % len(batches)], time.perf_counter()
        record.at(f"step {number}")
        key, before = mlx_key(), model.parameters()
        value, gradients = value_and_gradients(subject, batch)
        mx.eval(value, gradients)
        named: dict[str, mx.array] = dict(tree_flatten(gradients))
        bad = sorted(name for name, each in named.items() if not bool(mx.isfinite(each).all()))
        if bad or not bool(mx.isfinite(first(value))):
            model.update(before)
            tracked.losses.append(float(first(value)))
            return [_not_finite(subject, number, batch, key, bad)]
        optimizer.update(model, clipped(subject, gradients))
        mx.eval(model.state, optimizer.state)
        tracked.step(
            float(first(value)), named, dict(tree_flatten(before)), dict(tree_flatten(model.parameters())), optimizer
        )
        record.step(time.perf_counter() - start, first(value))
        if number >= 5 and time.perf_counter() > end:
            break
    return None


def _not_finite(subject: Subject, number: int, batch: Any, key: mx.array, bad: list[str]) -> Finding:
    """Find out where the first value comes from that is not finite."""
    code = "step = Step(..., nonfinite='skip')   # the default: such a batch changes nothing"
    for name, leaf in arguments(batch):
        if isinstance(leaf, mx.array) and (rows := bad_rows(leaf)):
            text = f"step {number}: {name} of the batch has values that are not finite, in samples {_few(rows)}"
            return Finding("not-finite", "failure", text, "clean the data, or leave such samples out", code)
    origin = Origin()
    mx.random.seed(seed_of(key))
    before = subject.model.parameters()
    with watching(subject.model, origin):
        value = first(call_with(batch, subject.loss_fn, subject.model))
        finite = bool(mx.isfinite(value))
    subject.model.update(before)
    if origin.path is not None:
        samples = f", in samples {_few(origin.rows)} of the batch" if len(origin.rows) < _rows(batch) else ""
        text = (
            f"step {number}: {origin.path} ({origin.kind}) gives values that are not finite for finite inputs{samples}"
        )
        remedy = _OVERFLOW
    elif not finite:
        text = (
            f"step {number}: the loss is not finite, though what every module gives is: it comes from the loss function"
        )
        remedy = (
            "look for log(0), a division by a sum that is zero (a batch whose mask is empty), or exp of large numbers"
        )
    else:
        text = f"step {number}: the loss is finite, and the gradient is not: {_names(bad)}"
        remedy = "look for a square root, a norm or a power at zero, whose slope is infinite: add a small number inside"
    return Finding("not-finite", "failure", text, remedy, code)


_OVERFLOW = (
    "look for log, sqrt or a division at zero in this module; where the weights have grown: a smaller learning rate, "
    "warm-up, max_grad_norm=1.0; in float16: compute_dtype=mx.bfloat16"
)


def _rows(batch: Any) -> int:
    return next((leaf.shape[0] for _, leaf in arguments(batch) if isinstance(leaf, mx.array) and leaf.ndim), 0)


def _few(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")


def _names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
