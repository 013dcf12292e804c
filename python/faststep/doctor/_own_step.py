"""The user's own step beside the plain loop, from the same weights on the same batches: what the parameters do."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from faststep.doctor._finding import Finding
from faststep.doctor._kept import Kept
from faststep.doctor._own_calls import Named, OwnCall, own_calls
from faststep.doctor._recorder import Recorder
from faststep.doctor._rungs_plain import clipped, draws, value_and_gradients
from faststep.doctor._subject import Subject
from faststep.doctor._weights import uneven

_CLOSE, _CLOSE_IN_NOISE = 0.05, 0.3  # of a ratio, without and with dropout
_ALONG, _ALONG_IN_NOISE = 0.97, 0.5  # of a cosine
_UPHILL = 0.3  # cosine of a change and the gradient


def compare(subject: Subject, record: Recorder) -> list[Finding]:
    """Call the step, compare it with the plain loop, and put everything back."""
    kept = Kept(subject.model, subject.optimizer)
    calls = own_calls(subject, record)
    kept.restore()
    record.at("the gradients of plain MLX for the same batches")
    found = [*_Compared(subject, kept, calls).findings()]
    kept.restore()
    record.say("own", calls=len(calls), updates=sum(each.updated for each in calls))
    del calls
    gc.collect()  # or memory falls while it is measured
    return found


class _Compared:
    def __init__(self, subject: Subject, kept: Kept, calls: list[OwnCall]) -> None:
        self._subject, self._kept, self._calls = subject, kept, calls
        self._windows = list(_windows(calls))
        self._moved = {name for call in calls for name in call.moved}
        self._updates = [each for call in calls for each in call.updates]
        noisy = draws(subject)
        kept.restore()
        self._close = _CLOSE_IN_NOISE if noisy else _CLOSE
        self._along = _ALONG_IN_NOISE if noisy else _ALONG

    def findings(self) -> Iterator[Finding]:
        """Yield what is found, the cause before what follows from it."""
        mean = self._mean(self._windows[0]) if self._windows else self._mean(self._calls[:1])
        given = [gradients for _, _, gradients in self._updates if gradients is not None]
        if given and all(_norm(each) == 0 for each in given) and _norm(mean) > 0:
            text = (
                f"your step gives its optimizer gradients that are all zero, in {len(given)} updates; those of the "
                f"loss function on the same batch have the norm {_norm(mean):.3g}"
            )
            remedy = (
                "differentiate the loss that you compute, with respect to the model: nn.value_and_grad(model, loss_fn)"
                "(model, *batch); gradients are (path, value) pairs where tree_flatten has made a list of them"
            )
            yield Finding("zero-gradient", "failure", text, remedy, _PLAIN)
            return
        if not self._moved:
            yield from self._nothing_moves(mean)
            return
        swallowed = [*self._swallowed()]
        yield from swallowed
        if swallowed:
            return  # plain MLX fails at that batch, too
        yield from self._state_lost()
        yield from self._never(mean)
        yield from self._gradients(mean)

    def _nothing_moves(self, mean: Named) -> Iterator[Finding]:
        count = len(self._calls)
        if errors := [error for call in self._calls for error in call.errors]:
            text = (
                f"no parameter has changed in {count} calls of your step, and an error is swallowed in it: {errors[0]}"
            )
            yield Finding("swallowed-error", "failure", text, _RAISE, "raise   # in the except block")
            return
        rates = [float(each) for each in _rates(self._subject.optimizer)]
        if rates and not any(rates):
            return  # the numbers say so
        if self._updates:
            what = f"an optimizer has computed {len(self._updates)} updates that the model does not get"
            remedy = "call optimizer.update(model, gradients), or model.update(optimizer.apply_gradients(...))"
        else:
            what = "no optimizer of MLX was called"
            remedy = "update the model; a step that accumulates longer than that needs more time: seconds=30"
        text = (
            f"no parameter has changed in {count} calls of your step: {what}. The gradients of plain MLX have the norm "
            f"{_norm(mean):.3g}"
        )
        yield Finding("nothing-moves", "failure", text, remedy, _PLAIN)

    def _swallowed(self) -> Iterator[Finding]:
        """Yield the finding of calls that raise inside and update nothing, where the others update."""
        lost = [(number, call) for number, call in enumerate(self._calls, 1) if call.errors and not call.updated]
        if lost and max(len(each) for each in self._windows) > 1 and len(lost) < len(self._calls):
            lost = [(number, call) for number, call in lost if not _is_inside(call, self._calls)]
        if lost:
            number, call = lost[0]
            text = f"call {number} of your step updates nothing, and an error is swallowed in it: {call.errors[0]}"
            yield Finding("swallowed-error", "failure", text, _RAISE, "raise   # in the except block")

    def _state_lost(self) -> Iterator[Finding]:
        """Yield the finding of an optimizer that begins anew at each update."""
        if len(self._updates) < 2:
            return
        optimizers = {id(each) for each, _, _ in self._updates}
        counts = [count for _, count, _ in self._updates]
        if not _has_state(self._updates[0][0]):
            return
        remedy = "make the optimizer once, above the loop, and leave its state alone: it holds the moments"
        if len(optimizers) == len(self._updates):
            kind = type(self._updates[0][0]).__name__
            text = (
                f"your step makes a new {kind} for each of {len(counts)} updates: its moments begin at zero each time"
            )
            yield Finding("state-lost", "failure", text, remedy, "optimizer = optim.AdamW(1e-3)   # once")
        elif len(optimizers) == 1 and None not in counts and len(set(counts)) == 1:
            text = (
                f"the optimizer's state is lost between updates: its count of steps is {counts[0]} after each of "
                f"{len(counts)} updates, where it should be {len(counts)} after the last"
            )
            yield Finding("state-lost", "failure", text, remedy, "optimizer = optim.AdamW(1e-3)   # once")

    def _never(self, mean: Named) -> Iterator[Finding]:
        trainable = set(self._calls[0].before)
        still = sorted(name for name in trainable - self._moved if name in mean and _norm({name: mean[name]}) > 0)
        updates = sum(each.updated for each in self._calls)
        if still and updates > 1:
            text = (
                f"{len(still)} of {len(trainable)} trainable parameters never change in {updates} updates of your "
                f"step, though plain MLX has a gradient for them: {_listed(still)}"
            )
            remedy = "give the optimizer all gradients; freeze() what is not to be trained"
            yield Finding("some-never-move", "warning", text, remedy, _PLAIN)
        if frozen := sorted(self._moved - trainable):
            text = f"your step changes parameters that are frozen: {_listed(frozen)}"
            remedy = "nn.value_and_grad differentiates what is trainable, mx.value_and_grad everything"
            yield Finding("frozen-moves", "warning", text, remedy, _PLAIN)

    def _gradients(self, mean: Named) -> Iterator[Finding]:
        """Yield what is wrong with the gradients of the first window: sign, scale, weights."""
        window = self._windows[0]
        given = [gradients for _, _, gradients in window[-1].updates if gradients is not None]
        if len(given) == 1:
            cosine, ratio = _beside(given[0], mean)
            what = "the gradients that your step gives to its optimizer are"
        else:
            own, what = self._change(window), "the change that your step makes is"
            if self._calls[-1].count == self._calls[0].count:  # it has another optimizer, or none
                if (cosine := _beside(own, mean)[0]) > _UPHILL:
                    yield _against(f"its change has the cosine {cosine:.2f} with the gradient, not a negative one")
                return
            cosine, ratio = _beside(own, self._update(mean))
        count, norm = len(window), _norm(mean)
        if math.isnan(cosine):
            return
        if cosine < -self._along:
            yield _against(f"{what} {ratio:.2g} times those of plain MLX, and should be 1")
        elif count > 1 and cosine > self._along and abs(ratio / count - 1) < self._close:
            text = (
                f"your step does not average: over {count} calls {what} {ratio:.2f} times the mean of plain MLX, whose "
                f"norm is {norm:.3g}; it should be 1"
            )
            remedy = f"divide the sum by {count}, the number of calls: the learning rate is {count} times as large now"
            yield Finding(
                "not-averaged", "failure", text, remedy, f"tree_map(lambda g: g / {count}, gradients)\n{_ACC}"
            )
        elif count > 1 and cosine > self._along and abs(ratio * count - 1) < self._close:
            text = f"your step divides twice: over {count} calls {what} {ratio:.3g} times the mean of plain MLX, not 1"
            yield Finding("divided-twice", "warning", text, "divide the loss or the gradients, not both", _ACC)
        elif cosine > self._along and abs(ratio - 1) < self._close:
            if count > 1 and (found := uneven(self._subject, [call.batch for call in window])) is not None:
                yield found
            yield from self._unclipped(window[-1], given, norm)
            yield from self._old(mean)
        elif abs(cosine) < self._along or ratio > 1.5:
            text = f"{what} not those of the loss function on the same batches: {ratio:.3g} times, cosine {cosine:.2f}"
            remedy = "nothing is wrong if your step computes another loss, weighs it or adds to it"
            yield Finding("other-gradients", "note", text, remedy)

    def _unclipped(self, call: OwnCall, given: list[Named], norm: float) -> Iterator[Finding]:
        """Yield the finding of gradients that reach the optimizer whole, where they are to be clipped."""
        most = self._subject.options.get("max_grad_norm")
        limits = [(most, "max_grad_norm is")] if most is not None else []
        limits += [(each, "the result of clip_grad_norm is not used, whose limit is") for each in call.clips]
        limit, what = next((each for each in limits if norm > 1.1 * each[0]), (None, ""))
        if given and limit is not None:
            text = (
                f"your step does not clip: its optimizer gets gradients of the norm {norm:.3g}, and {what} {limit:.3g}"
            )
            remedy = "clip between the gradients and the update, and update by what is returned"
            code = f"gradients, _ = optim.clip_grad_norm(gradients, {limit:g})   # before optimizer.update"
            yield Finding("not-clipped", "warning", text, remedy, code)

    def _old(self, before: Named) -> Iterator[Finding]:
        """Yield the finding of a second update by gradients of the first."""
        if len(self._windows) < 2 or len(self._windows[1][-1].updates) != 1:
            return
        own, mean = self._windows[1][-1].updates[0][2], self._mean(self._windows[1])
        if own is None or (_beside(own, mean)[0] > self._along and abs(_beside(own, mean)[1] - 1) < self._close):
            return
        both = {name: before[name] + each for name, each in mean.items() if name in before}
        for should, what in ((both, "the sum of those of both updates"), (before, "those of the first")):
            cosine, ratio = _beside(own, should)
            if cosine > self._along and abs(ratio - 1) < self._close:
                text = f"the gradients of your step's second update are {what}, not its own"
                remedy = (
                    "begin each window with gradients of its own: nothing resets the sum, or nothing computes it anew"
                )
                yield Finding("old-gradients", "failure", text, remedy, "total = None   # after each update")
                return

    def _mean(self, window: list[OwnCall]) -> Named:
        """Return the mean of the loss function's gradients over a window, where it began."""
        subject, total = self._subject, None
        for call in window:
            subject.model.update(tree_unflatten(list(window[0].before.items())))
            mx.random.seed(call.seed)
            _, gradients = value_and_gradients(subject, call.batch)
            gradients = tree_map(lambda each: each.astype(mx.float32) / len(window), gradients)
            total = gradients if total is None else tree_map(lambda a, b: a + b, total, gradients)
            mx.eval(total)
        self._kept.restore()
        return dict(tree_flatten(total))

    def _change(self, window: list[OwnCall]) -> Named:
        """Return what a window has changed."""
        place = self._calls.index(window[-1]) + 1
        after = self._calls[place].before if place < len(self._calls) else {}
        before = window[0].before
        return {name: after[name].astype(mx.float32) - before[name].astype(mx.float32) for name in after}

    def _update(self, mean: Named) -> Named:
        """Return what the optimizer makes of the mean of the gradients."""
        before: Any = self._subject.model.trainable_parameters()
        tree = clipped(self._subject, tree_unflatten(list(mean.items())))
        after: Named = dict(tree_flatten(self._subject.optimizer.apply_gradients(tree, before)))
        flat: Named = dict(tree_flatten(before))
        update = {name: after[name].astype(mx.float32) - flat[name].astype(mx.float32) for name in after}
        mx.eval(update)
        self._kept.restore()
        return update


def _against(text: str) -> Finding:
    remedy = "the optimizer subtracts: give it the gradients as they are"
    return Finding("against-gradient", "failure", f"your step goes against the gradient: {text}", remedy, _PLAIN)


def _windows(calls: list[OwnCall]) -> Iterator[list[OwnCall]]:
    """Yield the calls of each update."""
    window: list[OwnCall] = []
    for call in calls:
        window.append(call)
        if call.updated:
            yield window
            window = []


def _is_inside(call: OwnCall, calls: list[OwnCall]) -> bool:
    """Return whether a call within a window had its own part: the window is not longer than the shortest one."""
    windows = list(_windows(calls))
    own = next((each for each in windows if any(other is call for other in each)), None)
    return own is not None and len(own) <= min(map(len, windows))


def _beside(own: Named, should: Named) -> tuple[float, float]:
    """Return the cosine of two trees, and the scale of the first by the second."""
    names = [name for name in should if name in own and own[name].shape == should[name].shape]
    if not names:
        return math.nan, math.nan
    a = [own[name].astype(mx.float32) for name in names]
    b = [should[name].astype(mx.float32) for name in names]
    dot = float(sum((x * y).sum() for x, y in zip(a, b, strict=True)))
    squares = [float(sum(x.square().sum() for x in each)) for each in (a, b)]
    if not all(squares):
        return math.nan, math.nan
    return dot / math.sqrt(squares[0] * squares[1]), math.copysign(math.sqrt(squares[0] / squares[1]), dot)


def _norm(named: Named) -> float:
    return math.sqrt(sum(float(each.astype(mx.float32).square().sum()) for each in named.values()))


def _rates(optimizer: Any) -> list[Any]:
    each = [part for part in getattr(optimizer, "optimizers", [optimizer]) if isinstance(part, Optimizer)]
    return [part.learning_rate for part in each if "learning_rate" in part.state]


def _has_state(optimizer: Any) -> bool:
    """Return whether an optimizer keeps more than its rate and its count of steps."""
    try:
        named = dict(tree_flatten(optimizer.state))
    except (ValueError, RuntimeError, AttributeError):
        return False
    return any(name.rpartition(".")[2] not in ("step", "learning_rate") for name in named)


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"model.{name}" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


_RAISE = "let errors out, or print the traceback and count them: a step that fails has trained nothing"
_PLAIN = (
    "loss, gradients = nn.value_and_grad(model, loss_fn)(model, *batch)\n"
    "optimizer.update(model, gradients)   # or: fast_step(model, optimizer, loss_fn, *batch)"
)
_ACC = "fast_step(model, optimizer, loss_fn, *batch, accumulate=n)   # averages by itself"
