"""The time of a step on many devices, from that on one and what a network does: a calculation, nothing is run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Network = Literal["ring", "nccl"]
_JOINED = 32 << 20  # bytes of one exchange, as the step joins gradients
_WANTED = 0.9  # of the time is to be computing
# Bytes a parameter of float32 training with AdamW, without activations: it and two moments, the sum of a window, and
# two more copies of the gradients at the peak (docs/distributed.md); sharded without the window.
_REPLICATED, _SHARDED = 24, 16


@dataclass(frozen=True)
class RanksPlan:
    """A step of data parallel training on so many devices.

    Attributes:
        devices: The number of devices.
        exchange: Seconds in which the gradients are summed, while no device computes.
        step: Seconds of a step.
        efficiency: The share of the step in which devices compute, 0 to 1.
        accumulate: The batches of an update with which that share is 0.9 or more.
        replicated: Bytes on each device of parameters, gradients and optimizer state (AdamW, float32).
        sharded: The same where all of them are shared out, as `nn.fully_shard` does.
    """

    devices: int
    exchange: float
    step: float
    efficiency: float
    accumulate: int
    replicated: int
    sharded: int


def plan_ranks(
    parameters: float,
    seconds: float,
    devices: Sequence[int] = (8, 64, 1024),
    *,
    bandwidth: float,
    latency: float,
    network: Network = "nccl",
    bytes_each: int = 4,
) -> list[RanksPlan]:
    """Calculate what a step of `Step(..., group=...)` costs on some numbers of devices.

    The gradients are summed behind the backward pass, in exchanges of 32 MiB one after another, each of which sends
    `2 (N - 1) / N` of its bytes from each of the N devices. Its messages follow on one another: `2 (N - 1)` of them in
    a ring, `2 log2 N` in a tree, which NCCL takes for many devices.

    Args:
        parameters: The number of trainable parameters.
        seconds: Seconds of a step on one device with the batch of one device, as measured (`faststep profile`).
        devices: The numbers of devices.
        bandwidth: Bytes a second that each device can send: the slowest link on the way around.
        latency: Seconds of a small message from one device to the next.
        network: "ring" or "nccl".
        bytes_each: Bytes of a gradient as it is sent: 4, for half-precision parameters too.

    Returns:
        A plan for each number of devices.

    Raises:
        ValueError: A number is not above 0, or the network is another.

    Example:
        >>> from faststep.training import plan_ranks
        >>> (plan,) = plan_ranks(1e9, 0.32, [8], bandwidth=50e9, latency=1e-5)
        >>> round(plan.exchange, 3), round(plan.efficiency, 2), plan.accumulate
        (0.147, 0.68, 5)
    """
    given = {"parameters": parameters, "seconds": seconds, "bandwidth": bandwidth, "bytes_each": bytes_each}
    given |= {"devices": min(devices, default=0)}
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    if latency < 0:
        raise ValueError(f"latency: expected seconds from 0 on, got {latency}")
    if network not in ("ring", "nccl"):
        raise ValueError(f'network: expected "ring" or "nccl", got {network!r}')
    size = parameters * bytes_each
    plans = []
    for number in devices:
        hops = 2 * (number - 1) if network == "ring" else 2 * math.ceil(math.log2(number))
        messages = hops * (math.ceil(size / _JOINED) + 1)  # and the row of numbers before them
        exchange = 2 * (number - 1) / number * size / bandwidth + messages * latency if number > 1 else 0.0
        least = exchange * _WANTED / (1 - _WANTED) / seconds
        plans.append(
            RanksPlan(
                devices=number,
                exchange=exchange,
                step=seconds + exchange,
                efficiency=seconds / (seconds + exchange),
                accumulate=max(1, math.ceil(least - 1e-9)),
                replicated=round(parameters * _REPLICATED),
                sharded=math.ceil(parameters * _SHARDED / number),
            )
        )
    return plans
