"""The upper rungs: compiled, the native step, and what a training has around it."""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from faststep._random import mlx_key
from faststep._step import Step, call_with
from faststep.doctor import _lazy, _own_step, _python_time, _shapes
from faststep.doctor._finding import Finding
from faststep.doctor._recorder import Recorder
from faststep.doctor._rungs_plain import clipped, draws, first, value_and_gradients
from faststep.doctor._subject import Subject
from faststep.doctor._user_code import place_of

_READS = "Attempting to eval an array during function transformations"
_FRESH = 64  # batches in which new shapes are looked for
_SAVES = 4


def compiled(subject: Subject, record: Recorder) -> None:
    """Compile the step of plain MLX."""
    model, optimizer = subject.model, subject.optimizer
    optimizer.init(model.trainable_parameters())
    states = [each.state for each in getattr(optimizer, "optimizers", [optimizer])]
    state = [model.state, states, mx.random.state]

    @functools.partial(mx.compile, inputs=state, outputs=state)
    def traced(batch: Any) -> Any:
        value, gradients = value_and_gradients(subject, batch)
        optimizer.update(model, clipped(subject, gradients))
        return value

    def body(batch: Any) -> mx.array:
        value = traced(batch)
        mx.eval(value, state)
        return mx.array(first(value))

    try:
        record.measure(body, subject.some())
    except ValueError as error:
        if "uncaptured inputs" in str(error):
            text = "mx.compile refuses the step: the loss reaches arrays beside its arguments (another model, a buffer)"
            remedy = "nothing to do if you train with fast_step or Step: they take such arrays as inputs"
            record.find(Finding("uncaptured", "note", text, remedy, "mx.compile(step, inputs=[..., other.state])"))
            return
        if _READS not in str(error):
            raise
        place = place_of(error) or "an unknown place"
        text = (
            f"the loss or the optimizer reads values while it computes: {place}. mx.compile refuses that, and a step "
            "waits there and computes twice what is read"
        )
        remedy = "compute with arrays instead: mx.where in place of if; return a metric beside the loss, do not read it"
        record.find(Finding("loss-reads-values", "warning", text, remedy, "mx.where(condition, a, b)"))


def native(subject: Subject, record: Recorder) -> None:
    """Take native steps."""
    step = _step(subject)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _lazy.watched(subject.loss_fn, "the loss function", record):
            record.measure(lambda batch: call_with(batch, step).loss, subject.some())
    stats = step.stats
    record.say("stats", mode=stats.mode, reason=stats.reason, traces=len(stats.traces), skipped=stats.skipped)
    batch = subject.some()[0]
    slow = _python_time.finding(stats, lambda: call_with(batch, subject.loss_fn, subject.model))
    if slow is not None:
        record.find(slow)
    elif stats.mode == "called":
        text = f"the loss was called at the last step, as in a plain loop: {stats.reason}"
        remedy = "nothing is wrong; a small net is faster if the call can be left out (docs/what_is_compiled.md)"
        record.find(Finding("called", "note", text, remedy))
    for text in dict.fromkeys(str(each.message) for each in caught):
        remedy = "see what it says; the step gives the same numbers either way"
        record.find(Finding("step-warning", "warning", text, remedy))


def shapes(subject: Subject, record: Recorder) -> None:
    """Take native steps on new batches, and see which of their shapes are new."""
    step, seen = _step(subject), _shapes.Shapes()
    modes: list[str] = []
    end = time.perf_counter() + 2 * record.seconds
    for batch in itertools.islice(subject.fresh(), _FRESH):
        seen.add(batch)
        start = time.perf_counter()
        mx.eval(call_with(batch, step).loss)
        record.step(time.perf_counter() - start)
        modes.append(step.stats.mode)
        if time.perf_counter() > end and seen.batches > 8:
            break
    stats = step.stats
    record.say("stats", traces=stats.traced, batches=seen.batches)
    if modes[:1] != ["plain"] and (finding := seen.finding(stats, modes.count("plain"))) is not None:
        record.find(finding)  # otherwise nothing is compiled, whatever the shapes


def prefetch(subject: Subject, record: Recorder) -> None:
    """Make the batches in a thread, ahead of the native step."""
    from faststep.data import Loader

    step, loader = _step(subject), subject.batches
    if not (isinstance(loader, Loader) and loader.workers):
        loader = Loader(_Again(subject), batch_size=1, collate=_only, workers=1)
    with loader:
        batches, over, size = iter(loader), record.enough(), 0
        while True:
            record.at("a batch of the worker")
            start = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            loss = call_with(batch, step).loss
            mx.eval(loss)
            record.step(time.perf_counter() - start, loss)
            arrays = [leaf for _, leaf in tree_flatten(batch) if isinstance(leaf, mx.array)]  # type: ignore[str-unpack]
            size = max(size, sum(array.nbytes for array in arrays))
            if over():  # memory grows for a while where the worker runs ahead
                break
        record.say("ahead", bytes=(loader.workers + loader.prefetch) * size)


class _Again:
    """The batches of a subject, as a source whose items they are."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __iter__(self) -> Iterator[Any]:
        return self._subject.fresh()


def _only(items: Sequence[Any]) -> Any:
    return items[0]


def accumulation(subject: Subject, record: Recorder) -> None:
    """Update once for two batches."""
    step = _step(subject, accumulate=2)
    record.measure(lambda batch: call_with(batch, step).loss, subject.some())
    step.flush()


def validation(subject: Subject, record: Recorder) -> None:
    """Validate behind every step."""
    from faststep.training import validate

    step = _step(subject)
    batches = list(itertools.islice(subject.validation, 4)) if subject.validation is not None else subject.some()[:4]

    def body(batch: Any) -> mx.array:
        record.at("a step")
        loss = call_with(batch, step).loss
        mx.eval(loss)
        record.at("a validation")
        validate(step, batches)
        return mx.array(loss)

    record.measure(body, subject.some())


def checkpoint(subject: Subject, record: Recorder) -> None:
    """Write checkpoints where the run would have them."""
    from faststep.checkpoints import Checkpoints

    step = _step(subject)
    call_with(subject.some()[0], step)
    parent = subject.folder or Path(tempfile.gettempdir())
    there = next(each for each in (parent.absolute(), *parent.absolute().parents) if each.is_dir())
    folder = Path(tempfile.mkdtemp(prefix=".faststep-doctor-", dir=there))
    record.say("folder", path=str(folder))  # for the one who ends this process, should it hang
    times, written = [], 0
    try:
        checkpoints = Checkpoints(folder / "checkpoints", background=False)
        for number in range(1, _SAVES + 1):
            record.at("writing a checkpoint")
            start = time.perf_counter()
            path = checkpoints.save(step, None, number=number, numbers={})
            times.append(time.perf_counter() - start)
            written = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            record.step(times[-1])
            if sum(times) > 4 * record.seconds:
                break
        checkpoints.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = sorted(times)[len(times) // 2]
    record.say("written", bytes=written, seconds=seconds)
    if seconds > 1.0 + written / _SLOW_DISK:
        text = f"a checkpoint of {written / 1e6:.1f} MB takes {seconds:.1f} s to write in {there}: the disk is slow"
        remedy = "let `run` be a folder on a local disk, or write checkpoints less often"
        record.find(Finding("slow-disk", "warning", text, remedy, "run: /local/runs\ncheckpoints: {every: 1000}"))


_SLOW_DISK = 50e6  # bytes a second


def own(subject: Subject, record: Recorder) -> None:
    """Compare the user's own step with the plain loop, then take many of its steps."""
    own_step = subject.own_step
    assert own_step is not None, "the rung is there for it"
    mx.eval(subject.model.parameters())  # what the model was made of is no part of the step
    compared = _own_step.compare(subject, record)
    for finding in compared:
        record.find(finding)
    if any(each.name == "swallowed-error" for each in compared):
        return  # what it leaves behind comes of that
    record.at("your step again and again")

    def body(batch: Any) -> None:
        call_with(batch, own_step)

    with _lazy.watched(own_step, "your step", record):
        taken = record.measure(body, subject.some())
    if (left := _lazy.left_behind(subject.model, subject.optimizer, taken)) is not None:
        record.find(left)
    before = mlx_key()  # not that before the first step, which may have been traced
    body(subject.some()[0])
    if before.tolist() == mlx_key().tolist() and draws(subject):
        text = (
            "the loss draws random numbers (dropout, noise), and your step leaves mx.random.state as it was: every "
            "step draws the same ones"
        )
        remedy = "give the random state to the compiled step, as an input and an output"
        code = (
            "state = [model.state, optimizer.state, mx.random.state]\n@partial(mx.compile, inputs=state, outputs=state)"
        )
        record.find(Finding("random-state", "warning", text, remedy, code))


def _step(subject: Subject, accumulate: int = 1) -> Step:
    return Step(subject.model, subject.optimizer, subject.loss_fn, accumulate=accumulate, **subject.options)
