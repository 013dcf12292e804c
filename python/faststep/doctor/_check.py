"""`check`: the native step beside plain MLX, on the user's own model."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map

from faststep._step import Options, Step, call_with, whole_number
from faststep.doctor._comparison import ALLOWED, Comparison, Difference, ModuleShape, Timing
from faststep.doctor._kept import Kept
from faststep.doctor._modules import watching
from faststep.doctor._plain import EPS, PlainLoop, nudged

NOISE = 1 + 3e-7  # what the gradients of the second plain run are multiplied by
_ULPS = 64.0  # units in the last place of the largest element that count as rounding
_ROUNDS = 5
Arrays = dict[tuple[str, str], mx.array]  # by kind and path
Loop = Callable[[Any], mx.array]


def check(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any],
    batches: Iterable[Any],
    *,
    steps: int = 10,
    seconds: float = 3.0,
    accumulate: int = 1,
    **options: Any,
) -> Comparison:
    """Compare the native step with plain MLX on a model of your own: numbers, time and memory.

    Both take the same batches from the same start: loss, gradients, clipping, update, evaluation. A second run of plain
    MLX shows how far rounding alone drives the numbers apart: its parameters begin a rounding error apart, its
    gradients are multiplied by 1 + 3e-7, and their norm is summed in another order. That is far where an optimizer
    divides noise by noise, as Adam does where a gradient is zero (a bias before BatchNorm).

    Model, optimizer, random states, and the place in a `faststep.data.Loader`, are put back; a generator has given its
    batches.

    Args:
        model: The model.
        optimizer: The optimizer.
        loss_fn: What `Step` takes.
        batches: Batches: tuples for `loss_fn(model, *batch)`, single arrays, or dicts, which are passed by name where
            the loss has these names, and whole where it takes one argument.
        steps: How many batches each side takes; where there are fewer, they are taken again.
        seconds: How long time and memory are measured, by turns; 0: not.
        accumulate: Batches of an update.
        **options: Options of `Step`.

    Returns:
        The differences, times, and what they say; `print` shows them.

    Raises:
        ValueError: There is no batch, or an option is out of its range.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, faststep
        >>> model, optimizer = nn.Linear(8, 1), optim.AdamW(learning_rate=1e-2)
        >>> batches = [(mx.random.normal((32, 8)), mx.zeros((32, 1))) for _ in range(3)]
        >>> loss_fn = lambda model, x, y: nn.losses.mse_loss(model(x), y)
        >>> found = faststep.check(model, optimizer, loss_fn, batches, steps=3, seconds=0, max_grad_norm=1.0)
        >>> found.same, found.mode
        (True, 'native')
    """
    whole_number("steps", steps, 1)
    Step(model, optimizer, loss_fn, accumulate=accumulate, **options)  # checks the options
    kept = Kept(model, optimizer, batches)
    try:
        taken = list(itertools.islice(batches, steps))
        kept.rewind()
        if not taken:
            raise ValueError("batches: expected at least one batch, got none")
        taken = list(itertools.islice(itertools.cycle(taken), steps))
        return _Check(model, optimizer, loss_fn, taken, kept, accumulate, options).run(seconds)
    finally:
        kept.restore()


class _Check:
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        batches: list[Any],
        kept: Kept,
        accumulate: int,
        options: dict[str, Any],
    ) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.batches, self.kept, self.accumulate, self.options = batches, kept, accumulate, options
        self.modes: set[str] = set()

    def run(self, seconds: float) -> Comparison:
        """Compare numbers, then measure."""
        modules = self._modules()
        self.kept.restore()
        plain = self._follow(self._plain())
        self.kept.restore()
        self._nudge()
        noisy = self._follow(self._plain(NOISE))
        self.kept.restore()
        step = self._step()
        native = self._follow(step)
        stats = step.stats
        left_out = stats.reason is None and "native" in self.modes  # now and then it is called all the same
        self.kept.restore()
        native_time, plain_time = self._measure(step, seconds) if seconds else (None, None)
        differences = _worst(self._difference(name, native, plain, noisy) for name in plain)
        return Comparison(
            len(self.batches),
            "native" if left_out else stats.mode,
            stats.reason,
            differences,
            native_time,
            plain_time,
            self._notes(plain),
            modules,
        )

    def _modules(self) -> tuple[ModuleShape, ...]:
        """Call the loss once, and return the modules with the shapes of their outputs."""
        outputs: dict[str, tuple[int, ...] | None] = {}

        def look(path: str, _: nn.Module, __: list[mx.array], arrays: list[mx.array]) -> None:
            outputs.setdefault(path, tuple(arrays[0].shape) if arrays else None)

        with watching(self.model, look):
            mx.eval(call_with(self.batches[0], self.loss_fn, self.model))
        modules = {path or "model": each for path, each in self.model.named_modules()}
        called = {path: modules[path] for path in outputs if path in modules}
        return tuple(_shape(path, each, outputs.get(path)) for path, each in (called | modules).items())

    def _plain(self, factor: float = 1.0) -> PlainLoop:
        chosen = Options(**{name: value for name, value in self.options.items() if name in Options._fields})
        return PlainLoop(self.model, self.optimizer, self.loss_fn, chosen, self.accumulate, factor)

    def _step(self) -> Step:
        return Step(self.model, self.optimizer, self.loss_fn, accumulate=self.accumulate, **self.options)

    def _nudge(self) -> None:
        """Move the float32 parameters by a rounding error."""
        moved = functools.partial(nudged, dtype=mx.float32)
        self.model.update(tree_map(moved, self.model.trainable_parameters()))

    def _follow(self, loop: PlainLoop | Step) -> Arrays:
        """Take all batches; return the losses, the first gradients, and parameters and state at the end."""
        found: Arrays = {}
        if isinstance(loop, Step):
            _, gradients = call_with(self.batches[0], loop.gradients)
        else:
            before = self.model.parameters()
            _, gradients = loop.gradients(self.batches[0])
            mx.eval(gradients)
            self.model.update(before)
        found |= _named("gradient", gradients)
        self.kept.reseed()
        for number, batch in enumerate(self.batches, start=1):
            if isinstance(loop, Step):
                loss = call_with(batch, loop).loss
                self.modes.add(loop.stats.mode)
            else:
                loss = loop(batch)
            found["loss", f"step {number}"] = mx.array(loss)
        found |= _named("parameter", self.model.parameters())
        found |= _named("optimizer", self.optimizer.state)
        mx.eval(found)
        return found

    def _difference(self, name: tuple[str, str], native: Arrays, plain: Arrays, noisy: Arrays) -> Difference:
        ours, theirs = native.get(name), plain[name]
        if ours is None or ours.shape != theirs.shape:
            return Difference(*name, float("inf"), 0.0, 0.0, 0.0)
        difference, noise = _apart(ours, theirs), _apart(noisy[name], theirs)
        scale = float(mx.abs(theirs.astype(mx.float32)).max()) if theirs.size else 0.0
        dtypes = [each for each in (theirs.dtype, self.options.get("compute_dtype")) if each is not None]
        eps = max(EPS.get(each, 0.0) for each in dtypes)
        limit = ALLOWED * noise + _ULPS * eps * (scale if scale < float("inf") else 0.0)
        return Difference(*name, difference, noise, scale, limit)

    def _notes(self, plain: Arrays) -> tuple[str, ...]:
        first = [float(each) for (kind, _), each in plain.items() if kind == "loss"]
        bad = sum(not abs(each) < float("inf") for each in first)
        return (f"{bad} of {len(first)} losses are not finite, in plain MLX too",) if bad else ()

    def _measure(self, step: Step, seconds: float) -> tuple[Timing, Timing]:
        """Time both by turns, each for half of the seconds."""
        loops: dict[str, Loop] = {"native": lambda batch: call_with(batch, step).loss, "plain": self._plain()}
        times: dict[str, list[float]] = {name: [] for name in loops}
        peaks = dict.fromkeys(loops, 0)
        for _ in range(_ROUNDS):
            for name, loop in loops.items():
                mx.clear_cache()  # of what the other one has freed
                pace = min(self._block(loop, 1) for _ in range(3))  # it takes over, and its memory is mapped
                count = max(1, min(200, round(seconds / (2 * _ROUNDS) / pace)))
                mx.reset_peak_memory()
                times[name].append(1e3 * self._block(loop, count))
                beside = self.kept.bytes_beside(self.model, self.optimizer)
                peaks[name] = max(peaks[name], mx.get_peak_memory() - beside)
        native, plain = (Timing(tuple(times[name]), peaks[name]) for name in loops)
        return native, plain

    def _block(self, loop: Loop, count: int) -> float:
        """Return the seconds of a step."""
        start = time.perf_counter()
        for batch in itertools.islice(itertools.cycle(self.batches), count):
            loss = loop(batch)
        mx.eval(loss)
        mx.synchronize()
        return (time.perf_counter() - start) / count


def _shape(path: str, module: nn.Module, output: tuple[int, ...] | None) -> ModuleShape:
    own: dict[str, Any] = {name: each for name, each in module.items() if isinstance(each, mx.array)}
    trains = module.trainable_parameters()
    frozen = sum(each.size for name, each in own.items() if name not in trains)
    return ModuleShape(path, type(module).__name__, output, sum(each.size for each in own.values()), frozen)


def _named(kind: str, tree: Any) -> Arrays:
    named: dict[str, Any] = dict(tree_flatten(tree))
    return {(kind, path): each for path, each in named.items() if isinstance(each, mx.array)}


def _apart(a: mx.array, b: mx.array) -> float:
    """Return the largest absolute difference; elements that are NaN in both, or the same infinity, are equal."""
    if a.size == 0:
        return 0.0
    if not mx.issubdtype(a.dtype, mx.floating):
        return float((a != b).any())
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    equal = (a == b) | (mx.isnan(a) & mx.isnan(b))
    apart = float(mx.where(equal, 0.0, mx.abs(a - b)).max())
    return apart if apart == apart else float("inf")


def _worst(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Return the furthest of each kind."""
    by_kind: dict[str, Difference] = {}
    for each in differences:
        known = by_kind.setdefault(each.kind, each)
        if (each.excess, each.difference) > (known.excess, known.difference):
            by_kind[each.kind] = each
    return tuple(by_kind[kind] for kind in ("loss", "gradient", "parameter", "optimizer") if kind in by_kind)
