"""Records of a profile: stretches of time by stage, traces, operations, memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

LOOP, DATA = "your loop", "data"


class Span(NamedTuple):
    """A stretch of time in one stage; seconds count from the beginning of the recording."""

    stage: str
    began: float
    ended: float
    active: int


class Held(NamedTuple):
    """The bytes that MLX has in use while an operation of a step runs, by what they are for.

    Attributes:
        others: What is none of the following: constants, and what else the process holds.
        parameters: The trainable parameters; where an update does not write over the old ones, both.
        state: The optimizer's state, and what a step keeps beside it.
        model: The model's other arrays: frozen parameters and buffers.
        batch: The batch and the random key.
        activations: What the loss is computed from.
        backward: What gradients are computed from, beside activations.
        gradients: Those of the parameters, as they are handed to the update.
        update: What the update computes beside parameters and state.
        cache: Freed buffers that MLX keeps for itself.
    """

    others: int
    parameters: int
    state: int
    model: int
    batch: int
    activations: int
    backward: int
    gradients: int
    update: int
    cache: int

    @property
    def in_use(self) -> int:
        """All of it but the cache."""
        return sum(self) - self.cache


KINDS = Held._fields[:-1]


class Operation(NamedTuple):
    """One operation of a step, evaluated by itself.

    Attributes:
        name: MLX's name of it; "Compiled..." is several elementwise ones in one kernel.
        module: The path of the module that it belongs to, "(loss)", "(update)", or empty where it is not known. In the
            forward pass that is the module whose call made it. In the backward pass, and of what is fused, it is that
            of the parameter that it reads, or of an operation whose input or result it reads: a close guess, which
            may be the neighbour.
        output: Dtype and shape of its output.
        bytes: Bytes of its inputs and outputs.
        seconds: Its time alone, the least of three.
        by_events: Whether the device has timed it, as CUDA does; otherwise it was waited for.
        held: Memory while it runs in a step that nothing is measured in, as the memory plan counts it
            (`Step.memory_plan`): what the device may not have let go of yet counts, of the step before as well.
    """

    name: str
    module: str
    output: str
    bytes: int
    seconds: float
    by_events: bool
    held: Held


@dataclass
class Recording:
    """The recording of a loop around a step.

    Attributes:
        steps: Calls of the step.
        seconds: Time of all.
        spans: Stretches of time by stage: "your loop" between two calls, "data" where the loop takes batches from
            `Profile.data`, and the stages of `Step.stage`, of whose "objects" the first in a call is "look", others
            are "show"; each with the bytes that MLX had in use when it began.
        traces: Traces that were made meanwhile: cause and seconds.
        operations: Operations of one step, in the order of their evaluation, once `Profile.measure` has been called.
        bytes: What is held at the end, by kind (`Stats.bytes`).
    """

    steps: int = 0
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    traces: list[tuple[str, float]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)

    def peak(self) -> Operation | None:
        """Return the operation that runs while most memory is in use; none where operations have not been measured."""
        return max(self.operations, key=lambda each: each.held.in_use, default=None)

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage, the largest first."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            seconds[span.stage] += span.ended - span.began
        return dict(sorted(seconds.items(), key=lambda each: -each[1]))
