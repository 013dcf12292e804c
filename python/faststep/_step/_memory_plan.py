"""The memory plan: what a step takes of the device's memory, known before the first one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields

from faststep._native import core

_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that steps on a batch take on the device, in bytes; `str(plan)` is a table in megabytes.

    The peaks are those that `mx.get_peak_memory` will report, with everything that the process holds. Parameters,
    gradients, state, activations and others add up to the higher one, unless the gradients are never there all at once.

    A CPU is taken to work as late as MLX lets it: what it has not computed yet holds its memory, so a plan is rather
    above the peak than below it. For a GPU the plan is an estimate, which no test holds against a measured peak: every
    step is taken to be done when the next one begins. A GPU that falls behind holds activations of the steps in flight
    too, each of at most 1 GiB, and what its libraries take for themselves is not in the plan.

    Attributes:
        parameters: The trainable parameters.
        gradients: The gradients, all of them; a step that has to keep none of them frees each as soon as it is used.
        state: The optimizer's state, and what the step keeps beside it: masters, average, window.
        activations: The rest of the peak: activations, temporaries, the old state while it is still held, and memory
            that is not free yet because the device works behind the thread that feeds it.
        others: What else is held all the time: the batch, frozen parameters and buffers, and whatever else the process
            has in MLX's memory.
        cache: Freed buffers that MLX keeps beside the memory in use (`mx.get_cache_memory`). On the CPU they add to
            what the process takes, at most `mx.set_cache_limit`; a GPU's are given back when memory is short.
        replay: What a capture of the step will hold beside all that (`replay` of `Step`): copies of
            parameters and state, and the memory of one step. A step that finds less than that free is not captured, so
            it counts neither in the peaks nor in `fits`. 0 where nothing is replayed.
        first_peak: The peak of the first update, which holds the old state for a while to be able to go back to it;
            later, that of the next one.
        steady_peak: The peak of the updates after it.
        limit: The device's memory; of a CPU's, what the process may take by its control group if that is less. None
            where it is unknown.
        fits: Whether the peak, on the CPU with the cache, is within the limit; True where that is not known.
    """

    parameters: int
    gradients: int
    state: int
    activations: int
    others: int
    cache: int
    replay: int
    first_peak: int
    steady_peak: int
    limit: int | None
    fits: bool

    @property
    def peak(self) -> int:
        """The most memory in use at once, in the first update or later, in bytes."""
        return max(self.first_peak, self.steady_peak)

    def __str__(self) -> str:
        """Return the table."""
        rows = {field.name: getattr(self, field.name) for field in fields(self)}
        del rows["limit"], rows["fits"]
        if not self.replay:
            del rows["replay"]
        lines = [self._line(name, number) for name, number in {**rows, "peak": self.peak}.items()]
        if self.limit is None:
            return "\n".join(lines)
        answer = "fits into" if self.fits else "does not fit into"
        return "\n".join([*lines, f"{answer} {self.limit / _MEGABYTE:,.0f} MB"])

    def _line(self, name: str, number: int) -> str:
        share = f" {number / self.limit:8.1%}" if self.limit else ""
        return f"{name.replace('_', ' '):16}{number / _MEGABYTE:12,.2f} MB{share}"


def memory_plan(plan: core.MemoryPlan) -> MemoryPlan:
    """Make a plan of what the engine found; where it does not fit, warn at the call of `Step.memory_plan`."""
    taken = MemoryPlan(**{field.name: getattr(plan, field.name) for field in fields(MemoryPlan)})
    if not taken.fits and taken.limit:
        warnings.warn(
            f"faststep: a step will take up to {taken.peak / _MEGABYTE:,.0f} MB, and the device has "
            f"{taken.limit / _MEGABYTE:,.0f} MB: the process will end without an exception when they are used "
            "up. Take a smaller batch, or recompute activations with mx.checkpoint",
            RuntimeWarning,
            stacklevel=3,
        )
    return taken
