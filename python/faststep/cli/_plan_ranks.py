"""The command that calculates a step on many devices."""

from __future__ import annotations

from typing import Annotated

import typer

from faststep.cli._status import Exit


def plan_ranks(
    parameters: Annotated[float, typer.Option(help="Trainable parameters: 7e9.", show_default=False)],
    seconds: Annotated[float, typer.Option(help="Of a step on one device, as measured.", show_default=False)],
    bandwidth: Annotated[float, typer.Option(help="Gigabytes a second that each device sends.", show_default=False)],
    latency: Annotated[float, typer.Option(help="Microseconds of a small message.", show_default=False)],
    devices: Annotated[str, typer.Option(help="How many, with commas.")] = "8,64,1024",
    network: Annotated[str, typer.Option(help="ring, or nccl: messages in a tree.")] = "nccl",
    bytes_each: Annotated[int, typer.Option(help="Bytes of a gradient as it is sent.")] = 4,
) -> None:
    """Calculate what a step with a group costs on many devices, from a measured one on one device; nothing is run.

    The memory is that of float32 training with AdamW, without activations.
    """
    from faststep.training import plan_ranks

    try:
        plans = plan_ranks(
            parameters,
            seconds,
            [int(each) for each in devices.split(",")],
            bandwidth=bandwidth * 1e9,
            latency=latency * 1e-6,
            network=network,  # type: ignore[arg-type]
            bytes_each=bytes_each,
        )
    except ValueError as error:
        raise Exit(str(error)) from None
    typer.echo("devices  exchange, s   step, s  computing  for 90 %: accumulate  GB replicated  GB sharded")
    for plan in plans:
        typer.echo(
            f"{plan.devices:7}{plan.exchange:13.3f}{plan.step:10.3f}{plan.efficiency:11.0%}{plan.accumulate:22}"
            f"{plan.replicated / 1e9:15.1f}{plan.sharded / 1e9:12.1f}"
        )
