"""The step: gradients, clipping, update and evaluation in one call."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from faststep import _state
from faststep._native import core
from faststep._options import Nonfinite, Options
from faststep._plan import MemoryPlan, memory_plan


@dataclass(frozen=True)
class StepOutput:
    """What one step gives. The arrays are lazy: reading one waits for that step.

    Attributes:
        loss: The loss, a scalar in the dtype in which the loss function returned it.
        aux: What the loss function returned beside the loss (and, with `weighted=True`, beside its weight), an empty
            tuple where it returned nothing else.
        grad_norm: The global norm of the gradients before clipping, a float32 scalar; with `accumulate`, that of the
            window's average. None where there was no update, and where nothing needs it: with `nonfinite="allow"` and
            without `max_grad_norm`.
        skipped: Whether nothing of the batch was taken, a bool scalar; False with `nonfinite="allow"`.
        weight: What the loss function returned as the loss's weight, with `weighted=True`; None otherwise.
    """

    loss: mx.array
    aux: tuple[Any, ...]
    grad_norm: mx.array | None
    skipped: mx.array | bool
    weight: Any
    _update: mx.array | bool  # whether there was one, or the array that tells whether it was missed

    @property
    def updated(self) -> mx.array | bool:
        """Whether parameters and optimizer state were updated: a bool scalar, or False within a window."""
        return self._update if isinstance(self._update, bool) else mx.logical_not(self._update)


@dataclass(frozen=True)
class Stats:
    """What a step has done so far.

    Attributes:
        steps: The number of calls.
        updates: The number of updates that were made.
        skipped: How many batches were not taken, because loss or gradients were not finite or the loss too large.
            Asking waits for the steps in flight.
        mode: How the step is computed. "native": the update on flat buffers, in Rust. "traced": the update by the
            optimizer's own Python code, compiled with the rest. "plain": the same step without compilation.
        reason: Why the mode is not "native": the parameter, the optimizer, or the line of the loss; None where it is.
        traces: The traces that are kept, each with its cause and how long it took.
        traced: The number of all traces that were made.
        seconds: Where the time of all calls went. "look": at what the user has changed. "trace": calls that made a
            trace, all of them. "build": replaying traces. "evaluate": handing the work to MLX, which on a CPU does most
            of it then, and on a GPU holds a large step back until the last one has let go of its memory. "wait": for
            steps in flight. "show": giving the results to the user's objects.
        bytes: What is held. "parameters", "optimizer": its state. "step": masters, average and window. "model": the
            model's other arrays.
        unchanged: The share, from 0 to 1, of weights that an update rounded to no change: of up to 128 spread over each
            buffer, at one update in 128 (the second one first), weights whose first moment is zero left out. Near 1 the
            parameters are too coarse for the learning rate: see `compute_dtype`. None before the first reading.
    """

    steps: int
    updates: int
    skipped: int
    mode: str
    reason: str | None
    traces: tuple[core.TraceRecord, ...]
    traced: int
    seconds: dict[str, float]
    bytes: dict[str, int]
    unchanged: float | None


class Step:
    """The training step of a model, an optimizer and a loss function.

    It replaces these lines, and gives the same numbers:

        loss, gradients = nn.value_and_grad(model, loss_fn)(model, *batch)
        gradients, norm = optim.clip_grad_norm(gradients, max_grad_norm)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state, mx.random.state)

    The loss function is called while the step is traced, which is once for each signature of the batch; afterwards the
    trace is replayed natively. What Python code in it does beside computing arrays (printing, counting) happens then
    only. Model, optimizer and `mx.random.state` are current after every call, and what is changed in them between calls
    is seen.

    A loss function that cannot be traced or compiled is called a second time and runs uncompiled from then on, after
    one `RuntimeWarning` that says why; what its Python code does beside computing has then happened twice. One
    `RuntimeWarning` each tells what has gone wrong for a hundred steps without an error: every batch is skipped, the
    loss is not finite, all gradients are zero, the loss does not depend on a parameter, updates are rounded to nothing.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from faststep import Step
        >>> model, optimizer = nn.Linear(8, 1), optim.AdamW(learning_rate=1e-2)
        >>> def loss_fn(model, x, y):
        ...     return nn.losses.mse_loss(model(x), y)
        >>> step = Step(model, optimizer, loss_fn, max_grad_norm=1.0)
        >>> x, y = mx.random.normal((32, 8)), mx.zeros((32, 1))
        >>> losses = [step(x, y).loss.item() for _ in range(20)]
        >>> losses[-1] < losses[0], step.stats.mode
        (True, 'native')
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        *,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        accumulate: int = 1,
        weighted: bool = False,
        nonfinite: Nonfinite = "skip",
        max_loss: float | None = None,
        compute_dtype: mx.Dtype | None = None,
        ema_decay: float | None = None,
        compile: bool = True,
        in_flight: int = 2,
        max_traces: int = 64,
        cache_limit: int | None = None,
        clear_cache_every: int = 0,
    ) -> None:
        """Make the step; nothing is traced before its first call.

        Args:
            model: The model, of which everything trainable is updated.
            optimizer: The optimizer; it is initialised when it has not been.
            loss_fn: `loss_fn(model, *batch, **named)` returns a scalar `mx.array`, or a tuple that begins with one, as
                for `nn.value_and_grad(model, loss_fn)`.
            max_grad_norm: Clip the gradients to this global norm, as `optim.clip_grad_norm` does. None: no clipping.
            max_grad_value: Bring every element of the gradients into `[-max_grad_value, max_grad_value]`, after
                clipping by norm where both are given, so that both limits hold. None: no clipping.
            accumulate: Update once for so many calls, by the average of their gradients, which are summed in float32
                where the parameters are in half precision. `Step.accumulate` may be changed at any time.
            weighted: The loss function returns `(mean_loss, weight, *aux)`, the weight being what the loss is a mean
                over (tokens, say), a scalar array or a number: the average is weighted by it.
            nonfinite: What to do about a NaN or an infinity in the loss or in a gradient. "skip": leave parameters,
                optimizer state and buffers as they are, on the device, without a wait. "raise": the same, then wait
                for the step and raise `FloatingPointError`, which names the first such gradient. "allow": take every
                step, as the plain loop does. A gradient whose square overflows float32 counts as infinite. A batch that
                is skipped does not count in the average of its window.
            max_loss: A loss above this counts as not finite; None: no limit.
            compute_dtype: Compute the loss in this dtype: `mx.bfloat16` or `mx.float16`. Trainable parameters and
                float32 arrays of the batch are cast to it (frozen parameters and buffers are not), while the update
                works on float32 masters and float32 optimizer state; the model shows its parameters in the dtype that
                they had. With float16 the loss is scaled dynamically, and a step whose gradients overflow is skipped.
                With `mx.float32` the loss is computed in float32 and the masters are kept. None: everything in the
                parameters' own dtype.
            ema_decay: Keep a moving average of the parameters: `decay * average + (1 - decay) * parameter` after every
                update, in float32 for half precision; see `average`. None: none.
            compile: Compile the step. Without, the loss function is called at every step.
            in_flight: How many steps may be under way on the device when a call returns; one only, where that one
                holds more than 1 GiB of activations.
            max_traces: How many traces are kept; the one used least recently goes first.
            cache_limit: Let MLX keep at most so many bytes of freed memory, in the whole process
                (`mx.set_cache_limit`). None: leave it.
            clear_cache_every: Call `mx.clear_cache()` after every so many steps; 0: never.

        Raises:
            TypeError: `model` or `optimizer` is something else, or an option has another type.
            ValueError: An option is out of its range.
        """
        options = Options(
            max_grad_norm,
            max_grad_value,
            weighted,
            nonfinite,
            max_loss,
            compute_dtype,
            ema_decay,
            compile,
            in_flight,
            max_traces,
            clear_cache_every,
        )
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self._weighted = weighted
        self._program = Program(model, optimizer, options)
        self.accumulate = accumulate
        if cache_limit is not None:
            mx.set_cache_limit(_count("cache_limit", cache_limit, 0))

    @property
    def accumulate(self) -> int:
        """How many calls make one update. An open window is applied at the call at which it has as many batches."""
        return self._accumulate

    @accumulate.setter
    def accumulate(self, calls: int) -> None:
        self._accumulate = _count("accumulate", calls, 1)

    def __call__(self, *batch: Any, **named: Any) -> StepOutput:
        """Train on one batch.

        Args:
            *batch: What the loss function takes after the model: arrays, dicts, lists and tuples of them, and static
                values, of which every new one is a new trace.
            **named: The same, by name.

        Returns:
            Loss, auxiliary values and the gradients' norm, all lazy.

        Raises:
            TypeError: An argument is neither an array nor static, or the loss is no array.
            ValueError: The loss is no scalar, nothing is trainable, an array waits for another thread, or MLX refuses a
                shape; or the loss exchanges arrays with other ranks (`mx.distributed`, `nn.fully_shard`) in a step with
                `max_grad_norm`, `max_loss` or a `nonfinite` other than "allow", which each rank would apply by itself.
                Exceptions of the loss function pass unchanged. All of these leave model, optimizer and random state as
                they were.
            RuntimeError: The step belongs to another thread, or the device failed; or the model shows its average.
            FloatingPointError: With `nonfinite="raise"`: loss or gradients are not finite. Nothing was updated.
        """
        call = self._program.call(self.model, self.optimizer, self.loss_fn, batch, named)
        value, norm, skipped, update = self._program.core.step(call, self._accumulate)
        loss, aux = (value[0], value[1 + self._weighted :]) if isinstance(value, tuple) else (value, ())
        weight = value[1] if self._weighted else None
        return StepOutput(loss, aux, norm, False if skipped is None else skipped, weight, update)

    def flush(self) -> bool:
        """Update by the window that is open, averaged over what is in it.

        To be called at the end of an epoch, whose last window may not be full.

        Returns:
            Whether there was a window.

        Raises:
            RuntimeError: As a step does.
            FloatingPointError: As a step does.
        """
        return self._program.flush(self.model, self.optimizer)

    @property
    def options(self) -> Options:
        """The options that the step was made with, beside `accumulate`."""
        return self._program.options

    @contextlib.contextmanager
    def average(self) -> Iterator[nn.Module]:
        """Show the average of the parameters in the model, for evaluation.

        In a `with` block the model has the average in place of its parameters, in their dtypes; behind it, whatever
        happens, it has its parameters back. Before the first step the average is the parameters.

        Yields:
            The model.

        Raises:
            ValueError: The step has no `ema_decay`.
        """
        if self._program.options.ema_decay is None:
            raise ValueError("average: expected a step with ema_decay, got one without")
        kept = self._program.core.state()
        parameters = self.model.trainable_parameters()
        if kept is not None and kept["ema"] is not None:
            average = _state.like(parameters, dict(kept["ema"]))
            self.model.update(tree_map(lambda ema, parameter: ema.astype(parameter.dtype), average, parameters))
        _showing[id(self.model)] += 1
        try:
            yield self.model
        finally:
            _showing[id(self.model)] -= 1
            if not _showing[id(self.model)]:
                del _showing[id(self.model)]
            self.model.update(parameters)

    @property
    def state(self) -> dict[str, Any]:
        """What an exact resume needs beyond model, optimizer and random state: a tree of arrays and plain numbers.

        "masters", "ema" and "window" are trees like `model.trainable_parameters()`, with what was kept for parameters
        that are frozen now, float32 where the parameters are in half precision (masters are kept for those only), and
        there only where the step keeps them; "weight", a float32
        scalar, and "batches", a number, tell how much is in the window; "loss_scale", a float32 scalar, goes with
        "good_steps", an int32 scalar; "steps", "updates" and "skipped" are the counts of `stats`. Asking waits for the
        steps in flight.
        """
        return _state.tree(self._program.core.state(), self._program.core.stats()[:3], self.model)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, in this process or another.

        The model and the optimizer are loaded by themselves, before or after. A master counts as long as it rounds to
        the parameter that the model has at the next step; otherwise the parameter is the new master.

        Args:
            state: What `Step.state` gave; its arrays may have been through a safetensors file.

        Raises:
            ValueError: It has unknown or missing names, or arrays of other shapes than the model's. Nothing has
                changed.
        """
        self._program.core.load_state(*_state.flat(state, self.model))

    def gradients(self, *batch: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
        """Compute loss and gradients of one batch and change nothing.

        Args:
            *batch: As for a step.
            **named: As for a step.

        Returns:
            What the loss function returned, and the tree of gradients, before clipping: what
            `nn.value_and_grad(model, loss_fn)(model, *batch, **named)` returns.

        Raises:
            TypeError: As a step does.
            ValueError: As a step does.
            RuntimeError: As a step does.
        """
        return self._program.core.gradients(self._program.call(self.model, self.optimizer, self.loss_fn, batch, named))

    def memory_plan(self, *batch: Any, **named: Any) -> MemoryPlan:
        """Say what steps on such a batch will take of the device's memory, before the first one takes it.

        The step is traced, which the first step then need not do, and MLX's evaluation of it is gone through without
        computing anything: model, optimizer and random state stay as they are. A loss function that cannot be traced is
        called and may compute; what the plan says is then less certain.

        Args:
            *batch: As for a step.
            **named: As for a step.

        Returns:
            The plan. A `RuntimeWarning` says so when it does not fit into the device's memory.

        Raises:
            TypeError: As a step does.
            ValueError: As a step does.
            RuntimeError: As a step does.

        Example:
            >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
            >>> from faststep import Step
            >>> step = Step(nn.Linear(1000, 1000), optim.Adam(1e-3), lambda model, x: model(x).square().mean())
            >>> plan = step.memory_plan(mx.zeros((64, 1000)))
            >>> plan.parameters, plan.fits
            (4004000, True)
        """
        call = self._program.call(self.model, self.optimizer, self.loss_fn, batch, named)
        return memory_plan(self._program.core.memory_plan(call, self._accumulate))

    def synchronize(self) -> None:
        """Wait for all work in flight.

        Raises:
            RuntimeError: A step failed on the device, or the step belongs to another thread.
        """
        self._program.core.synchronize()

    def __repr__(self) -> str:
        """Name model, optimizer, loss and the options that are not the defaults; waits for nothing."""
        parts = [type(self.model).__name__, type(self.optimizer).__name__]
        parts.append(getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__))
        options = {"accumulate": self._accumulate, **self.options._asdict()}
        default = {"accumulate": 1, **Options()._asdict()}
        parts += [f"{name}={value!r}" for name, value in options.items() if value != default[name]]
        return f"Step({', '.join(parts)})"

    @property
    def stats(self) -> Stats:
        """What the step has done so far."""
        steps, updates, skipped, mode, traces, traced, seconds, held, unchanged = self._program.core.stats()
        return Stats(steps, updates, skipped, *mode, tuple(traces), traced, seconds, held, unchanged)


# model, optimizer, the loss function, its positional and named arguments
_Call = tuple[nn.Module, Optimizer, Callable[..., Any] | None, tuple[tuple[Any, ...], dict[str, Any]]]


class Program:
    """The native step of a model, an optimizer and options, for any loss function; keeps neither of the two alive."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: Options) -> None:
        """Check the options."""
        self.options = options
        self.core = core.Step(model, optimizer, options)

    def call(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        batch: tuple[Any, ...],
        named: dict[str, Any],
    ) -> _Call:
        """Return what the user passes as the native step takes it."""
        _refuse_average(model)
        return model, optimizer, loss_fn, (batch, named)

    def flush(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Update by the window that is open; return whether there was one."""
        _refuse_average(model)
        return self.core.flush((model, optimizer, None, ((), {})))


_showing: Counter[int] = Counter()  # ids of models that show their average


def _refuse_average(model: nn.Module) -> None:
    if id(model) in _showing:
        raise RuntimeError(
            "the model shows its average: expected steps behind the `with step.average()` block, got one in it"
        )


def _count(name: str, value: int, least: int) -> int:
    """Check a number that an option counts."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if count < least:
        raise ValueError(f"{name}: expected a number from {least} on, got {count}")
    return count


_Key = tuple[int, int, Options]
_programs: dict[_Key, tuple[weakref.ref[nn.Module], weakref.ref[Optimizer], Program]] = {}


def fast_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any],
    *batch: Any,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    accumulate: int = 1,
    weighted: bool = False,
    nonfinite: Nonfinite = "skip",
    max_loss: float | None = None,
    compute_dtype: mx.Dtype | None = None,
    ema_decay: float | None = None,
    compile: bool = True,
    in_flight: int = 2,
    max_traces: int = 64,
    clear_cache_every: int = 0,
    **named: Any,
) -> Any:
    """Train on one batch: `Step` in one call, which keeps one for each model, optimizer and set of options, weakly.

    It replaces these lines, and gives the same numbers:

        loss, gradients = nn.value_and_grad(model, loss_fn)(model, *batch, **named)
        gradients, _ = optim.clip_grad_norm(gradients, max_grad_norm)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state, mx.random.state)

    Args:
        model: The model, of which everything trainable is updated.
        optimizer: The optimizer.
        loss_fn: `loss_fn(model, *batch, **named)` returns a scalar `mx.array`, or a tuple that begins with one. A
            lambda made anew at every call is the same loss as long as its code, defaults and closure are.
        *batch: Arrays, dicts, lists and tuples of them, and static values.
        max_grad_norm: Clip the gradients to this global norm; None: no clipping.
        max_grad_value: Clip every element of the gradients to this absolute value; None: no clipping.
        accumulate: Update once for so many calls. `Step(model, optimizer, loss_fn, ...).flush()` applies a window that
            is not full: a `Step` of the same model and optimizer shares it.
        weighted: The loss function returns `(mean_loss, weight, *aux)`.
        nonfinite: "skip" a step whose loss or gradients are not finite, "raise" for it, or "allow" it.
        max_loss: A loss above this counts as not finite; None: no limit.
        compute_dtype: Compute the loss in this dtype and update float32 masters; None: the parameters' own.
        ema_decay: Keep a moving average of the parameters; `Step(..., ema_decay=...).average()` shows it.
        compile: Compile the step.
        in_flight: How many steps may be under way on the device when a call returns; one only, where that one holds
            more than 1 GiB of activations.
        max_traces: How many traces are kept.
        clear_cache_every: Call `mx.clear_cache()` after every so many steps; 0: never.
        **named: Arguments of the loss function by name; the options above are not among them.

    Returns:
        What the loss function returned, lazily.

    Raises:
        TypeError: As `Step` and its call do.
        ValueError: As `Step` and its call do.
        RuntimeError: As `Step` and its call do.
        FloatingPointError: As a `Step`'s call does.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from faststep import fast_step
        >>> model, optimizer = nn.Linear(4, 2), optim.Adam(learning_rate=1e-2)
        >>> x, y = mx.random.normal((16, 4)), mx.zeros((16,), mx.int32)
        >>> for _ in range(3):
        ...     loss = fast_step(
        ...         model, optimizer, lambda m, x, y: nn.losses.cross_entropy(m(x), y, reduction="mean"), x, y
        ...     )
        >>> loss.shape, optimizer.step.item()
        ((), 3)
    """
    options = Options(
        max_grad_norm,
        max_grad_value,
        weighted,
        nonfinite,
        max_loss,
        compute_dtype,
        ema_decay,
        compile,
        in_flight,
        max_traces,
        clear_cache_every,
    )
    accumulate = _count("accumulate", accumulate, 1)
    key = (id(model), id(optimizer), options)
    try:
        known = _programs.get(key)
    except TypeError:  # an option that is not even hashable
        Program(model, optimizer, options)
        raise
    if known is None or known[0]() is not model or known[1]() is not optimizer:
        known = _keep(key, model, optimizer)
    program = known[2]
    return program.core.step(program.call(model, optimizer, loss_fn, batch, named), accumulate)[0]


def _keep(
    key: _Key, model: nn.Module, optimizer: Optimizer
) -> tuple[weakref.ref[nn.Module], weakref.ref[Optimizer], Program]:
    def drop(reference: object) -> None:
        if (kept := _programs.get(key)) and reference in kept[:2]:
            del _programs[key]

    program = Program(model, optimizer, key[2])
    _programs[key] = weakref.ref(model, drop), weakref.ref(optimizer, drop), program
    return _programs[key]
