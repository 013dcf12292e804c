"""The native step behind `Step` and `fast_step`."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from faststep._native import core
from faststep._step._average import refuse_average
from faststep._step._misuse import refuse_options
from faststep._step._model_shards import ModelShards
from faststep._step._options import Options, check_sync, whole_number
from faststep._step._ranks import Ranks
from faststep._step._replicas import Replicas
from faststep._step._shard import ShardedOptimizer
from faststep._step._user_optimizer import OwnOptimizer

# model, optimizer, the loss function, its positional and named arguments
_Call = tuple[nn.Module, Optimizer, Callable[..., Any] | None, tuple[tuple[Any, ...], dict[str, Any]]]

_TASKS = Path("/proc/self/task")  # a folder for each thread that the system knows
_WAIT = 1.0  # second, the longest that is waited for threads that have ended
_threads: set[int] = set()  # by their numbers in the system: those with a step, but for the main one


class Program:
    """The native step of a model, an optimizer and options, for any loss function; it keeps neither object alive."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        options: Options,
        group: mx.distributed.Group | None = None,
        shard_optimizer: bool = False,
    ) -> None:
        """Check the options."""
        # of anything else the native step says what it is
        self.shards = ModelShards.of(model, group) if isinstance(model, nn.Module) else None
        named = None
        if self.shards is not None:
            self.shards.check(options, shard_optimizer)
            group, named = self.shards.group, (set(self.shards.cuts), self.shards.same_batch)
        self.options = options
        self.calls = [0]  # number of calls, for whoever holds the list, also when the step is gone
        self.named: set[str] = set()  # names of arguments that are no misspelt options
        self.core = core.Step(model, optimizer, options, group, named)
        check_sync(options.sync)
        self.ranks = Ranks(self.core, group, self.shards is not None and self.shards.same_batch)
        self.unchecked = self.ranks.size > 1  # they are compared at the first step
        every = whole_number("check_ranks", options.check_ranks, 0)
        self._check_every = every if self.ranks.size > 1 else 0
        self.sharded: ShardedOptimizer | None = None
        self._updates = 0  # or windows that were skipped: as many on all ranks
        if threading.current_thread() is not threading.main_thread():
            _threads.add(threading.get_native_id())
        self.clip_to(options.max_grad_norm)

    def clip_to(self, max_grad_norm: float | None) -> None:
        """Clip to another norm from the next step on."""
        self.options = self.options._replace(max_grad_norm=self.core.set_max_grad_norm(max_grad_norm))

    def begin_ranks(self, model: nn.Module, optimizer: Optimizer, batch: Any = ()) -> None:
        """Compare model, optimizer and options with those of the other ranks before the first update.

        Ranks that share a model, by layers, have the same batch too.
        """
        with self.ranks.told():
            replicas = self._replicas(model, optimizer)
            replicas.begin(self.ranks)
            if self.ranks.same_batch:
                replicas.check_batch(self.ranks, batch)
            if self.sharded is not None:
                self.core.share_out(self.sharded.share_out(model, self.ranks, self.options), self.ranks.rank)
        self.unchecked = False

    def check_ranks(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Compare them again, now."""
        if self.ranks.size > 1:
            with self.ranks.told():
                self._replicas(model, optimizer).check(self.ranks)

    def _replicas(self, model: nn.Module, optimizer: Optimizer) -> Replicas:
        return Replicas(model, optimizer, self.options, self.core.state(), self.sharded is not None, self.shards)

    def updated(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Count an update, and compare the ranks where that is due."""
        if self._check_every:
            self._updates += 1
            if self._updates % self._check_every == 0:
                self.check_ranks(model, optimizer)

    def call(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any] | None,
        batch: tuple[Any, ...],
        named: dict[str, Any],
    ) -> _Call:
        """Return what the user passes as the native step takes it."""
        if named and not named.keys() <= self.named:
            refuse_options(loss_fn, named)
            self.named |= named.keys()
        self.calls[0] += 1
        refuse_average(model)
        if isinstance(optimizer, OwnOptimizer):
            optimizer.follow()
        return model, optimizer, loss_fn, (batch, named)

    def flush(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Update by the window that is open; return whether there was one."""
        call = self.call(model, optimizer, None, (), {})
        if self.unchecked:
            self.begin_ranks(model, optimizer)
        found = self.core.flush(call)
        if found:
            self.updated(model, optimizer)
        return found


@atexit.register
def _wait_for_threads() -> None:
    """Wait until threads that have ended are gone.

    As such a thread goes, MLX frees its random state, for which it needs the interpreter: once that is on its way out,
    the process aborts.
    """
    ended = _threads - {thread.native_id for thread in threading.enumerate()}
    last = time.monotonic() + _WAIT
    while time.monotonic() < last and any((_TASKS / str(thread)).exists() for thread in ended):
        time.sleep(1e-3)
