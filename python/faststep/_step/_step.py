"""`Step`: gradients, clipping, update and evaluation in one call."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from faststep._step import _state
from faststep._step._attributes import Attributes
from faststep._step._average import begin_showing, end_showing
from faststep._step._memory_plan import MemoryPlan, memory_plan
from faststep._step._misuse import explain, function, refuse_unknown
from faststep._step._options import Nonfinite, Options, Replay, Sync, Transform, positive, whole_number
from faststep._step._output import Stats, StepOutput
from faststep._step._program import Program
from faststep._step._ranks import Ranks, end_hung_rank, mean_gradients
from faststep._step._shard import ShardedOptimizer
from faststep._step._user_optimizer import as_optimizer
from faststep._watch import Watchdog, hang_report

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    M = TypeVar("M", bound=nn.Module, default=Any)  # the model
    T = TypeVar("T", default=Any)  # what the loss function returns
else:  # typing_extensions need not be installed
    from typing import TypeVar

    M, T = TypeVar("M"), TypeVar("T")


class Step(Generic[M, T]):
    """The training step of a model, an optimizer and a loss function.

    It replaces these lines, and gives the same numbers:

        loss, gradients = nn.value_and_grad(model, loss_fn)(model, *batch)
        gradients, norm = optim.clip_grad_norm(gradients, max_grad_norm)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state, mx.random.state)

    The loss function is called once a step, as in the plain loop, and the graph that it builds picks the compiled step.
    The call is left out if nothing that the loss reads has changed, and all that it reads can be watched
    (docs/what_is_compiled.md). Model, optimizer and `mx.random.state` are current after every call, and changes that
    you make to them between calls count.

    A `RuntimeWarning` is given once for each thing that goes wrong without an error: labels or rows out of range, the
    first skipped batch (and what was not finite in it), gradients of zero, parameters without a gradient, and after 100
    steps batches that are all skipped, a loss that is not finite and updates that are rounded to nothing.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from faststep import Step
        >>> model, optimizer = nn.Linear(8, 1), optim.AdamW(learning_rate=1e-2)
        >>> def loss_fn(model, x, y):
        ...     return nn.losses.mse_loss(model(x), y)
        >>> step = Step(model, optimizer, loss_fn, max_grad_norm=1.0)
        >>> x, y = mx.random.normal((32, 8)), mx.zeros((32, 1))
        >>> losses = [step(x, y).loss.item() for _ in range(20)]
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self,
        model: M,
        optimizer: Optimizer,
        loss_fn: Callable[..., T],
        *,
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
        cache_limit: int | None = None,
        clear_cache_every: int = 0,
        hang_timeout: float | None = None,
        group: mx.distributed.Group | None = None,
        sync: Sync = "check",
        check_ranks: int = 0,
        shard_optimizer: bool = False,
        **unknown: NoReturn,
    ) -> None:
        """Make the step; nothing is traced before its first call.

        Args:
            model: The model; all its trainable parameters are updated.
            optimizer: The optimizer; it is initialised if necessary. An object of your own that is not an
                `mlx.optimizers.Optimizer` needs an `update(model, gradients)`, and keeps its arrays in attributes.
            loss_fn: `loss_fn(model, *batch, **named)` returns a scalar `mx.array`, or a tuple that begins with one, as
                for `nn.value_and_grad(model, loss_fn)`.
            max_grad_norm: Clip the gradients to this global norm, as `optim.clip_grad_norm` does. None: no clipping.
                `Step.max_grad_norm` may be set to another number at any time.
            max_grad_value: Clip every element of the gradients to `[-max_grad_value, max_grad_value]`, after clipping
                by norm if both are given, so that both limits hold. None: no clipping.
            accumulate: Update once every so many calls, with the average of their gradients, summed in float32 if the
                parameters are in half precision. `Step.accumulate` may be changed at any time.
            weighted: The loss function returns `(mean_loss, weight, *aux)`. The weight, a scalar array or a number, is
                the count that the loss is a mean over (tokens, for example); the average of the gradients is weighted
                by it.
            nonfinite: What to do if the loss or a gradient is NaN or infinite. "skip": leave parameters, optimizer
                state and buffers as they are, on the device, without a wait; what the loss does to Python objects
                stays. "raise": the same, then wait for the step and raise `FloatingPointError`, which names the first
                such gradient. "allow": train on every batch, as the plain loop does. A gradient whose square overflows
                float32 counts as infinite. A skipped batch does not count in the average of its window.
            max_loss: A loss above this counts as not finite; None: no limit.
            compute_dtype: Compute the loss in this dtype: `mx.bfloat16` or `mx.float16`. Trainable parameters and
                float32 arrays of the batch are cast to it (frozen parameters and buffers are not). The update works on
                float32 masters and float32 optimizer state; the model's parameters keep their dtype. With float16 the
                loss is scaled dynamically, and a step whose gradients overflow is skipped. With `mx.float32` the loss
                is computed in float32 and the masters are kept. None: everything in the parameters' own dtype.
            ema_decay: Keep a moving average of the parameters: `decay * average + (1 - decay) * parameter` after every
                update, in float32 for half precision; see `average`. None: none.
            state_bits: 8 keeps the moments of Adam and AdamW in 8 bits, a quarter of float32's bytes: in the place of
                `m` and `v`, `optimizer.state` has `m_codes` (int8) and `v_codes` (uint8), [blocks, elements of a
                block], and float32 `m_scales` and `v_scales`, [blocks, 1]. The update is computed in float32. A
                parameter of fewer than 4,096 elements, or of a number that 64 does not divide, keeps `m` and `v`. A
                state in one form, from a checkpoint say, is taken over into the other. None: the dtypes of MLX.
            stochastic_rounding: Compute the update of bfloat16 parameters by Adam or AdamW in float32, and round it up
                or down by chance, so that small updates add up without float32 masters; moments that are no codes
                too. The chance follows from the number of the update: a run that is resumed draws the same.
            transform: `transform(model, gradients)` returns the gradients that the optimizer gets: for clipping by
                layer, masks, noise or centralisation. It gets a tree like `model.trainable_parameters()`, averaged over
                the window and clipped, and may drop some entries. It is called once an update, like an optimizer of
                your own, or left out with the loss (docs/what_is_compiled.md). `grad_norm` is the norm before it. None:
                none.
            compile: Compile the step. False: evaluate it operation by operation.
            replay: Record a step once and launch it again: as one CUDA graph, or on a CPU as a list of tasks that the
                calling thread runs. "auto" (the default): a trace that MLX has evaluated a few times is captured if
                that takes no more than half of the free memory (on a CPU 1/32), and compared with MLX's evaluation of
                one step. If both agree it is launched from then on; if not, MLX evaluates further steps. On a CPU two
                steps are compared, to the bit, once the kernels are compiled; a step is done when the call returns, and
                a capture is dropped that is no faster than MLX (docs/environment.md). True: as soon as a step's memory
                has been measured, with a warning where it cannot be. False: never. `stats.traces` says what was
                captured, and why a trace is not replayed. What the model and the optimizer then hold are lazy copies,
                which any thread may evaluate between two steps; to evaluate all of them after each step costs a copy of
                all parameters each time. A capture keeps the memory of a step between steps (`memory_plan` says how
                much, `stats.bytes` what it is). It is dropped if less than 1/32 of `mx.get_memory_limit()` is free when
                a step begins; a shortage of memory during other work is not noticed.
            in_flight: How many steps may still run on the device when a call returns; only one, if it holds more than 1
                GiB of activations.
            max_traces: How many compiled steps are kept; the least recently used one is dropped first.
            cache_limit: Let MLX keep at most so many bytes of freed memory, in the whole process
                (`mx.set_cache_limit`); a capture of `replay` leaves no more of its memory unused. None: leave it.
            clear_cache_every: Call `mx.clear_cache()` after every so many steps; 0: never.
            hang_timeout: Seconds after which a call that does not end is reported on stderr, once: what the step waits
                for, the batch, memory, and the stacks of all threads. With a `group`, a rank that has waited for others
                so long then exits with code 5. None: never.
            group: The processes that train one model, each with its own batches: gradients are averaged over them
                before each update (docs/distributed.md). None: this process alone (in MLX's functions None means all),
                or those that share the model by its layers (`shard_linear`), which take the same batches.
            sync: Values of model and optimizer at the first call of a group: "check" that all ranks have the same, to
                the bit, or "broadcast" rank 0's, frozen parameters and buffers too.
            check_ranks: Compare the ranks, as `Step.check_ranks` does, after every so many updates, skipped ones
                included; 0: at the first call only.
            shard_optimizer: Each rank of the group updates a part of the parameters, whole ones, and has the optimizer
                state of that part alone; then they exchange parameters. Not with a `MultiOptimizer`, an object of your
                own, `transform`, `ema_decay`, `sync="broadcast"`, nor `compute_dtype` for half-precision parameters.
            **unknown: Refused: there are no other options. The error names the option that may be meant.

        Raises:
            TypeError: `model` or `optimizer` is something else, or an option has another type or does not exist.
            ValueError: An option is out of its range.
        """
        refuse_unknown(unknown)
        options = Options.among(locals())
        shards = shard_optimizer and group is not None and group.size() > 1
        self._sharded = ShardedOptimizer(optimizer, options) if shards else None
        self.model, self.optimizer, self.loss_fn = model, optimizer, function(loss_fn)
        self._weighted = weighted
        self._program = Program(model, self._optimizer, options, group, shard_optimizer)
        self._program.sharded = self._sharded
        self._attributes = Attributes(self.optimizer)
        self.accumulate = accumulate
        if cache_limit is not None:
            mx.set_cache_limit(whole_number("cache_limit", cache_limit, 0))
        if hang_timeout is not None:
            Watchdog(self, Step.stage, positive("hang_timeout", hang_timeout), _report_hang)

    @property
    def optimizer(self) -> Any:
        """The optimizer, or a stand-in for an object of your own. A new one is used from the next call on."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        if self._sharded is not None and optimizer is not self._sharded.optimizer:
            raise ValueError("optimizer: expected the one of the step, whose state is shared out (shard_optimizer)")
        self._given = optimizer
        self._optimizer = as_optimizer(self._given)

    @property
    def has_whole_optimizer(self) -> bool:
        """True where there is all that a checkpoint has: with nothing shared out, or within `whole_optimizer`."""
        shards = self._program.shards
        return (self._sharded is None or self._sharded.is_whole) and (shards is None or shards.whole is not None)

    @contextlib.contextmanager
    def whole_optimizer(self) -> Iterator[None]:
        """Have the whole of what is shared out on rank 0, for a checkpoint: by `shard_optimizer`, or a sharded model.

        A `with` block, to be entered on all ranks; the trainer does so by itself.

        Raises:
            RankError: Another rank has failed, is gone, or is somewhere else.
        """
        with contextlib.ExitStack() as stack:
            if self._sharded is not None:
                stack.enter_context(self._sharded.whole(self.model, self._program.ranks))
            if self._program.shards is not None:
                stack.enter_context(self._program.shards.shown(self._own_parts(), self._program.ranks))
            yield

    @property
    def is_fully_sharded(self) -> bool:
        """True where the ranks share the model, and each has batches of its own: with `nn.fully_shard`."""
        shards = self._program.shards
        return shards is not None and not shards.same_batch

    @property
    def parts(self) -> tuple[Any, Any, dict[str, Any]]:
        """The model's parameters, the optimizer's state and `state`, those of all ranks within `whole_optimizer`."""
        shards = self._program.shards
        return self._own_parts() if shards is None or shards.whole is None else shards.whole

    def _own_parts(self) -> tuple[Any, Any, dict[str, Any]]:
        model: Any = self.model
        return model.parameters(), self.optimizer.state, self.state

    def own_part(self, name: str, array: mx.array) -> mx.array:
        """Return what this rank has of an array of a checkpoint: all of it, but for shards of a model."""
        shards = self._program.shards
        return array if shards is None else shards.part(name, array)

    @property
    def accumulate(self) -> int:
        """The number of calls that make one update; an open window is applied at the call that gives it as many."""
        return self._accumulate

    @accumulate.setter
    def accumulate(self, calls: int) -> None:
        self._accumulate = whole_number("accumulate", calls, 1)

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which gradients are clipped; another number may be set at any time, which makes no new trace.

        A step that was made with None clips none; made with `math.inf`, it takes other numbers later.
        """
        return self._program.options.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        self._program.clip_to(norm)

    def __call__(self, *batch: Any, **named: Any) -> StepOutput:
        """Train on one batch.

        Args:
            *batch: What the loss function takes after the model: arrays, dicts, lists and tuples of them, and other
                values.
            **named: The same, by name.

        Returns:
            Loss, auxiliary values and the gradients' norm, all lazy.

        Raises:
            TypeError: An argument is neither an array nor static, or the loss is no array.
            ValueError: The loss is no scalar, nothing is trainable, an array waits for another thread, or MLX refuses a
                shape; or the loss exchanges arrays with other ranks, without shards in the model, in a step with
                `max_grad_norm`, `max_loss` or a `nonfinite` other than "allow", which each rank would apply by itself.
                Exceptions of the loss function pass unchanged. All of these leave model, optimizer and random state as
                they were.
            RuntimeError: The step belongs to another thread, or the device failed; or the model shows its average.
            FloatingPointError: With `nonfinite="raise"`: loss or gradients are not finite. Nothing was updated.
            RankError: With a `group`: another rank has failed, is gone, or has another model, options or update.
                Nothing was updated on any rank, and the window that was open is gone.
        """
        call = self._program.call(self.model, self._optimizer, self.loss_fn, batch, named)
        if self._program.unchecked:
            self._program.begin_ranks(self.model, self._optimizer, (batch, named))
        try:
            value, norm, skipped, update, mean = self._program.core.step(call, self._accumulate)
        except TypeError:
            explain(self.loss_fn, self.model, batch, named)
            raise
        if update is not False:
            self._program.updated(self.model, self._optimizer)
        loss, aux = (value[0], value[1 + self._weighted :]) if isinstance(value, tuple) else (value, ())
        weight = value[1] if self._weighted else None
        missed = False if skipped is None else skipped
        return StepOutput(loss if mean is None else mean, aux, norm, missed, weight, loss, update)

    def flush(self) -> bool:
        """Update by the window that is open, averaged over what is in it.

        To be called at the end of an epoch, whose last window may not be full. With a `group` on all ranks, at the same
        update: a rank without a batch adds nothing to the average.

        Returns:
            True if there was a window to update by, on any rank.

        Raises:
            RuntimeError: As a step does.
            FloatingPointError: As a step does.
        """
        return self._program.flush(self.model, self._optimizer)

    @property
    def options(self) -> Options:
        """The options of the step, beside `accumulate`."""
        return self._program.options

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes that the optimizer keeps beside its `state`, as far as they have changed since the step was made.

        A counter, or an average, of a user's own class; a checkpoint has them. Set, they are given to the optimizer.
        """
        return self._attributes.changed(self.optimizer)

    @attributes.setter
    def attributes(self, values: dict[str, Any]) -> None:
        self._attributes.put(self.optimizer, values)

    @contextlib.contextmanager
    def average(self) -> Iterator[M]:
        """Show the average of the parameters in the model, for evaluation.

        In a `with` block the model has the average in place of its parameters, in their dtypes; behind it, whatever
        happens, it has its parameters back. Before the first step the average is the parameters; parameters that are
        frozen now stay as they are.

        Yields:
            The model.

        Raises:
            ValueError: The step has no `ema_decay`.
        """
        if self._program.options.ema_decay is None:
            raise ValueError("average: expected a step with ema_decay, got one without")
        kept = self._program.core.state()
        model: nn.Module = self.model
        parameters = model.trainable_parameters()
        if kept and (named := _state.of_group("ema", kept[0])):
            average = _state.like(parameters, named)
            self.model.update(tree_map(lambda ema, parameter: ema.astype(parameter.dtype), average, parameters))
        begin_showing(self.model)
        try:
            yield self.model
        finally:
            end_showing(self.model)
            self.model.update(parameters)

    @property
    def state(self) -> dict[str, Any]:
        """State for an exact resume, beyond model, optimizer and random state: a tree of arrays and plain numbers.

        "masters", "ema" and "window" are trees like `model.trainable_parameters()`, with what was kept for parameters
        that are frozen now, float32 where the parameters are in half precision (masters are kept for those only), and
        there only where the step keeps them; "weight", a float32 scalar, and "batches", a number, tell how much is in
        the window, and "losses", with a `group`, the sum of its losses; "loss_scale", a float32 scalar, goes with
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

    def gradients(self, *batch: Any, **named: Any) -> tuple[T, dict[str, Any]]:
        """Compute loss and gradients of one batch; all arrays of model and optimizer, and the random state, stay.

        Changes that the loss function makes itself stay: a count of its calls, new arrays that it puts on the model.

        Args:
            *batch: As for a step.
            **named: As for a step.

        Returns:
            What the loss function returned, and the tree of gradients, before clipping: what
            `nn.value_and_grad(model, loss_fn)(model, *batch, **named)` returns. With a `group`, loss and gradients are
            averaged over the ranks, all of which have to call it; of a sharded model they are this rank's part.

        Raises:
            TypeError: As a step does.
            ValueError: As a step does.
            RuntimeError: As a step does.
        """
        call = self._program.call(self.model, self._optimizer, self.loss_fn, batch, named)
        core, ranks = self._program.core, self._program.ranks
        try:
            if ranks.size == 1 or self._program.shards is not None:
                return core.gradients(call)
            return mean_gradients(lambda: core.gradients(call), self._weighted, ranks)
        except TypeError:
            explain(self.loss_fn, self.model, batch, named)
            raise

    def memory_plan(self, *batch: Any, **named: Any) -> MemoryPlan:
        """Plan the memory that steps on such a batch take on the device, before the first one takes it.

        The step is traced, which the first step then need not do, and MLX's evaluation of it is simulated without
        computing anything: model, optimizer and random state stay as they are. A loss function that cannot be traced is
        called and may compute; what the plan says is then less certain. A warning names what the loss takes from that
        nobody can put back (a generator function, `itertools.count`).

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
        call = self._program.call(self.model, self._optimizer, self.loss_fn, batch, named)
        return memory_plan(self._program.core.memory_plan(call, self._accumulate))

    @property
    def ranks(self) -> Ranks:
        """The ranks of the `group`; this process alone without one."""
        return self._program.ranks

    def check_ranks(self) -> None:
        """Compare model, optimizer and options with those of the other ranks of the `group`, to the bit.

        The first step does so by itself, and later ones every `check_ranks` updates. To be called on all ranks; each
        array is read once.

        Raises:
            RankError: Something differs: what, and on which ranks.
        """
        self._program.check_ranks(self.model, self._optimizer)

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

    def stage(self) -> tuple[str, int]:
        """Return what a call is doing; to be asked in another thread.

        Returns:
            "idle" between calls, "objects" (the user's are read or written), "trace", "build", "first evaluation",
            "evaluation" (work is handed to the device), "wait" (for it), or "collective" where arrays are exchanged
            with other ranks; and the number of stages entered so far, which stands still while a call hangs.
        """
        return self._program.core.stage()[:2]

    def hang_report(self, stage: str, seconds: float, facts: Mapping[str, str] | None = None) -> str:
        """Return a report of a stage that hangs, with the batch of the call under way; for a watchdog of one's own.

        Args:
            stage: What `stage` says, or a stage of a training.
            seconds: How long it lasts.
            facts: More lines, by name.

        Returns:
            The stage and what to do, the batch, the size of the graph, traces, memory, and the stacks of all threads.
        """
        _, _, operations, traces = self._program.core.stage()
        facts = {**(facts or {}), "graph": f"{operations} operations", "traces": f"{traces} so far"}
        return hang_report(stage, seconds, facts, type(self).__call__.__code__)

    @property
    def stats(self) -> Stats:
        """Counts, mode, traces, times and memory so far."""
        found = self._program.core.stats()
        steps, updates, skipped, mode, traces, traced, seconds, held, unchanged, lazy, given, warned = found
        counts = steps, updates, skipped
        return Stats(*counts, *mode, tuple(traces), traced, seconds, held, unchanged, lazy, given, tuple(warned))


def _report_hang(step: Step[Any, Any], stage: str, seconds: float) -> None:
    ranks = step.ranks
    facts = {} if ranks.size == 1 else {"group": f"rank {ranks.rank} of {ranks.size}, in call {step._program.calls[0]}"}
    print(f"faststep: {step.hang_report(stage, seconds, facts)}", file=sys.stderr, flush=True)
    if facts and stage == "collective":
        end_hung_rank()
