"""What a step will take of the device's memory, before it is taken."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields

from faststep._native import core

_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class MemoryPlan:
    """What steps on a batch will take of the device's memory, in bytes. `str(plan)` is a table in megabytes.

    The peaks are those that `mx.get_peak_memory` will report, with everything that the process holds. A CPU is taken to
    be as slow as it can be: what it has not computed yet holds its memory, so a plan is rather above the peak than
    below it. A GPU is taken to be done with a step before the next one begins: one that falls behind holds more, until
    MLX waits for it at `mx.get_memory_limit()`. What a GPU's libraries take for themselves is not in the plan.

    Attributes:
        parameters: The trainable parameters.
        optimizer_state: The optimizer's state, and what the step keeps beside it: masters, average, window.
        gradients: The gradients, all of them; a step that has to keep none of them frees each as soon as it is used.
        activations: What else there is at the peak: activations, temporaries, and memory that is not free yet because
            the device works behind the thread that feeds it.
        batch: The arrays of the batch.
        other_arrays: The model's other arrays: frozen parameters and buffers, and the random key.
        elsewhere: What the process holds in MLX's memory beside this step.
        cache: Freed buffers that MLX keeps beside the memory in use (`mx.get_cache_memory`). On the CPU they add to
            what the process takes, at most `mx.set_cache_limit`; a GPU's are given back when memory is short.
        first_peak: The peak of the first step, which holds the old state for a while to be able to go back to it.
        steady_peak: The peak of the steps after it.
        device_memory: What the device has; of a CPU's, what the process may take by its control group if that is less.
            None where nobody says.
        fits: Whether the peak is below that; True where it is not known.
    """

    parameters: int
    optimizer_state: int
    gradients: int
    activations: int
    batch: int
    other_arrays: int
    elsewhere: int
    cache: int
    first_peak: int
    steady_peak: int
    device_memory: int | None
    fits: bool

    @property
    def peak(self) -> int:
        """The most memory in use at once, in the first step or later."""
        return max(self.first_peak, self.steady_peak)

    def __str__(self) -> str:
        """Return the table."""
        rows = {field.name: getattr(self, field.name) for field in fields(self)}
        del rows["device_memory"], rows["fits"]
        lines = [self._line(name, number) for name, number in rows.items()]
        if self.device_memory is None:
            return "\n".join(lines)
        answer = "fits into" if self.fits else "does not fit into"
        return "\n".join([*lines, f"{answer} {self.device_memory / _MEGABYTE:,.0f} MB"])

    def _line(self, name: str, number: int) -> str:
        share = f" {number / self.device_memory:8.1%}" if self.device_memory else ""
        return f"{name.replace('_', ' '):16}{number / _MEGABYTE:12,.2f} MB{share}"


def memory_plan(plan: core.MemoryPlan) -> MemoryPlan:
    """Make a plan of what the engine found, and warn when it does not fit; for the caller's caller."""
    taken = MemoryPlan(**{field.name: getattr(plan, field.name) for field in fields(MemoryPlan)})
    if not taken.fits and taken.device_memory:
        warnings.warn(
            f"faststep: a step will take up to {taken.peak / _MEGABYTE:,.0f} MB, and the device has "
            f"{taken.device_memory / _MEGABYTE:,.0f} MB: the process will end without an exception when they are used "
            "up. Take a smaller batch, or compute activations anew with mx.checkpoint",
            RuntimeWarning,
            stacklevel=3,
        )
    return taken
