"""`fast_step`: the step in one call, which keeps the native step of each model, optimizer and set of options."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from faststep._step._misuse import explain
from faststep._step._options import Nonfinite, Options, Replay, Sync, Transform, whole_number
from faststep._step._program import Program
from faststep._step._user_optimizer import StepCache, as_optimizer

# The options have whether gradients are clipped to a norm, not the norm, which may be another at each call.
T = TypeVar("T")
_Key = tuple[int, int, Options, int, int]
# The optimizer comes last where it stands for an object that is none.
_Known = tuple[weakref.ref[nn.Module], weakref.ref[Any], Program, Optimizer | None]
_Others = dict[int, tuple[weakref.ref[Any], int]]
_MAX_PROGRAMS = 16  # of a model and an optimizer, models of an optimizer, and optimizers of a model
_FEW = 16  # calls, for which a trace takes more time than it saves where a net is small
_models: _Others = {}  # how many each optimizer has had
_optimizers: _Others = {}  # how many each model has had


class _Programs:
    """The programs of one thread, which go as it ends."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)  # unlike that of `threading.get_ident()`, it is never given out again
        self.caches: weakref.WeakValueDictionary[int, StepCache] = weakref.WeakValueDictionary()

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        for cache in list(self.caches.values()):
            for key in [key for key in cache.programs if key[3] == self.number]:
                del cache.programs[key]


class _Thread(threading.local):
    """The programs of the thread that reads it."""

    def __init__(self) -> None:
        self.programs = _Programs()


_thread = _Thread()


class _ShortLivedModels:
    """Models in turn that one loss has trained for a few calls, each gone as the next one came."""

    def __init__(self) -> None:
        self.code: Any = None
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.calls, self.short = [_FEW], 0

    def begin(self, model: nn.Module, loss_fn: Any, program: Program) -> None:
        """Note another one, and warn where there have been many."""
        code = getattr(loss_fn, "__code__", None)
        is_short = code is not None and code is self.code and self.model() is None and self.calls[0] < _FEW
        self.short = self.short + 1 if is_short else 0
        self.code, self.model, self.calls = code, weakref.ref(model), program.calls
        if self.short == _MAX_PROGRAMS:
            warnings.warn(
                f"faststep: {_MAX_PROGRAMS} models in turn have been trained for fewer than {_FEW} steps each: "
                "every one is traced anew, which takes as long as tens of steps of a small net. Keep one model and one "
                "optimizer, and put others' weights and state into them: model.update(weights), "
                "optimizer.state = optim.Adam(...).state",
                RuntimeWarning,
                stacklevel=4,
            )


_short_lived = _ShortLivedModels()


def fast_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., T],
    *batch: Any,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    accumulate: int = 1,
    weighted: bool = False,
    nonfinite: Nonfinite = "skip",
    max_loss: float | None = None,
    compute_dtype: mx.Dtype | None = None,
    ema_decay: float | None = None,
    state_bits: Literal[8] | None = None,
    stochastic_rounding: bool = False,
    transform: Transform | None = None,
    compile: bool = True,
    replay: Replay = "auto",
    in_flight: int = 2,
    max_traces: int = 64,
    clear_cache_every: int = 0,
    group: mx.distributed.Group | None = None,
    sync: Sync = "check",
    check_ranks: int = 0,
    **named: Any,
) -> T:
    """Train on one batch: `Step` in one call, which keeps one for each model, optimizer and set of options.

    It replaces these lines, and gives the same numbers:

        loss, gradients = nn.value_and_grad(model, loss_fn)(model, *batch, **named)
        gradients, _ = optim.clip_grad_norm(gradients, max_grad_norm)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state, mx.random.state)

    Args:
        model: The model; all its trainable parameters are updated.
        optimizer: The optimizer, or an object of your own with an `update(model, gradients)`.
        loss_fn: `loss_fn(model, *batch, **named)` returns a scalar `mx.array`, or a tuple that begins with one. A
            lambda made again at every call is the same loss as long as its code, defaults and closure are.
        *batch: Arrays, dicts, lists and tuples of them, and other values.
        max_grad_norm: Clip the gradients to this global norm, which may change from call to call; None: no clipping.
        max_grad_value: Clip every element of the gradients to this absolute value; None: no clipping.
        accumulate: Update once every so many calls. `Step(model, optimizer, loss_fn, ...).flush()` applies a window
            that is not full: a `Step` of the same model and optimizer shares it.
        weighted: The loss function returns `(mean_loss, weight, *aux)`.
        nonfinite: "skip" a batch whose loss or gradients are not finite, "raise" an error, or "allow" it.
        max_loss: A loss above this counts as not finite; None: no limit.
        compute_dtype: Compute the loss in this dtype and update float32 masters; None: the parameters' own.
        ema_decay: Keep a moving average of the parameters; `Step(..., ema_decay=...).average()` shows it.
        state_bits: 8 keeps the moments of Adam and AdamW in 8 bits, see `Step`; None: in the dtypes of MLX.
        stochastic_rounding: Round updates of bfloat16 parameters by Adam or AdamW by chance, see `Step`.
        transform: `transform(model, gradients)` returns the gradients that the optimizer gets, as in `Step`; pass the
            same function at each call. None: none.
        compile: Compile the step.
        replay: Record a step once and launch it again, on CUDA as one graph, on a CPU as a list of tasks: "auto", True
            or False (`Step` says what each does).
        in_flight: How many steps may still run on the device when a call returns; only one, if it holds more than
            1 GiB of activations.
        max_traces: How many compiled steps are kept.
        clear_cache_every: Call `mx.clear_cache()` after every so many steps; 0: never.
        group: The processes that train one model: gradients are averaged over them before each update. None: this
            process alone.
        sync: "check" or "broadcast" values of model and optimizer at the first call of a group, as `Step` does.
        check_ranks: Compare the ranks of a group after every so many updates; 0: at the first call only.
        **named: Arguments of the loss function by name; the names of the options above are taken.

    Returns:
        What the loss function returned, lazily. With a `group`, a call that updates returns the mean loss over the
        window and all ranks in place of its own.

    Raises:
        RankError: As a `Step`'s call does.
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
        max_grad_norm is not None,
        max_grad_value,
        weighted,
        nonfinite,
        max_loss,
        compute_dtype,
        ema_decay,
        state_bits,
        stochastic_rounding,
        transform,
        compile,
        replay,
        in_flight,
        max_traces,
        clear_cache_every,
        sync,
        check_ranks,
    )
    accumulate = whole_number("accumulate", accumulate, 1)
    # MLX's streams and random state are a thread's
    key = (id(model), id(optimizer), options, _thread.programs.number, id(group))
    cache = StepCache.at(model, optimizer)
    try:
        known = None if cache is None else cache.programs.get(key)
    except TypeError:  # an option that is not even hashable
        Program(model, optimizer, options._replace(max_grad_norm=max_grad_norm))
        raise
    if known is None or known[0]() is not model or known[1]() is not optimizer:
        known = _keep(key, model, optimizer, loss_fn, max_grad_norm, group)
    _, _, program, own = known
    if program.options.max_grad_norm != max_grad_norm:
        program.clip_to(max_grad_norm)
    optimizer = optimizer if own is None else own
    call = program.call(model, optimizer, loss_fn, batch, named)
    if program.unchecked:
        program.begin_ranks(model, optimizer, (batch, named))
    try:
        value, _, _, update, mean = program.core.step(call, accumulate)
    except TypeError:
        explain(loss_fn, model, batch, named)
        raise
    if update is not False:
        program.updated(model, optimizer)
    return cast(T, value if mean is None else (mean, *value[1:]) if isinstance(value, tuple) else mean)


def _keep(
    key: _Key,
    model: nn.Module,
    optimizer: Any,
    loss_fn: Any,
    max_grad_norm: float | None,
    group: mx.distributed.Group | None,
) -> _Known:
    taken = as_optimizer(optimizer)
    program = Program(model, taken, key[2]._replace(max_grad_norm=max_grad_norm), group)
    cache = StepCache.made_at(model, optimizer)
    _thread.programs.caches[id(cache)] = cache
    alike = [each for each in cache.programs if each[:2] == key[:2] and each[3] == key[3]]
    if len(alike) == _MAX_PROGRAMS:
        if key[:2] not in cache.warned:
            cache.warned.add(key[:2])
            _warn_of_changing_options(alike)
        del cache.programs[alike[0]]
    if not alike:
        models = _count("models", _models, optimizer, "Make a module that joins others once, outside of the loop")
        advice = "Make the optimizer once, outside of the loop, and set its rate"
        if _count("optimizers", _optimizers, model, advice) == models == 1:
            _short_lived.begin(model, loss_fn, program)
    found = weakref.ref(cache)

    def drop(reference: object) -> None:
        cache = found()
        kept = None if cache is None else cache.programs.get(key)
        if cache is not None and kept is not None and reference in kept[:2]:
            del cache.programs[key]
            cache.warned.discard(key[:2])

    own = None if taken is optimizer else taken
    cache.programs[key] = known = weakref.ref(model, drop), weakref.ref(optimizer, drop), program, own
    return known


def _count(what: str, others: _Others, of: Any, advice: str) -> int:
    """Return how many models or optimizers there have been with one of the other, and warn where they are many."""
    known, count = others.get(id(of), (None, 0))
    count = count + 1 if known is not None and known() is of else 1
    if count == 1:
        for number in [number for number, (known, _) in others.items() if known() is None]:
            del others[number]
    others[id(of)] = weakref.ref(of), count
    if count == _MAX_PROGRAMS + 1:
        one = "optimizer" if what == "models" else "model"
        warnings.warn(
            f"faststep: fast_step has had more than {_MAX_PROGRAMS} {what} with one {one}: each makes traces of "
            f"its own, which takes seconds and memory. {advice}",
            RuntimeWarning,
            stacklevel=4,
        )
    return count


def _warn_of_changing_options(alike: list[_Key]) -> None:
    """Warn of options that change again and again."""
    options = [each[2]._asdict() | {"group": each[4]} for each in alike]
    names = [name for name in options[0] if len({each[name] for each in options}) > 1]
    warnings.warn(
        f"faststep: fast_step has had more than {len(alike)} values of {' and '.join(names)} for one model: each makes "
        "traces of its own, which takes seconds and memory. Keep to a few values",
        RuntimeWarning,
        stacklevel=4,
    )
