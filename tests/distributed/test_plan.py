"""`plan_ranks`: the calculation beside its formulas, and beside what was measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
from faststep.training import plan_ranks
from support.commands import faststep


def test_it_explains_what_was_measured() -> None:
    """Of two H200 (docs/distributed.md): by the bandwidth of the exchange alone, below the step as measured."""
    gradients, alone, exchange, measured = 652e6, 20.0e-3, 1.9e-3, 23.1e-3
    (plan,) = plan_ranks(gradients / 4, alone, [2], bandwidth=gradients / exchange, latency=0.0)
    assert plan.exchange == pytest.approx(exchange)
    assert 0.9 * measured < plan.step < measured


def test_messages_and_bytes() -> None:
    """A ring of slow messages is bound by their number, a tree by bytes; accumulation brings the share to 90 %."""
    ring, tree = (
        plan_ranks(1e9, 0.3, [1, 1024], bandwidth=50e9, latency=1e-5, network=each)  # type: ignore[arg-type]
        for each in ("ring", "nccl")
    )
    lists = math.ceil(4e9 / 2**25) + 1
    bytes_alone = 2 * 1023 / 1024 * 4e9 / 50e9
    assert ring[0].exchange == 0
    assert ring[1].exchange == pytest.approx(bytes_alone + lists * 2046e-5)
    assert tree[1].exchange == pytest.approx(bytes_alone + lists * 20e-5)
    assert ring[0].accumulate == 1
    for plan in (ring[1], tree[1]):
        share = [each * 0.3 / (each * 0.3 + plan.exchange) for each in (plan.accumulate, plan.accumulate - 1)]
        assert share[1] < 0.9 <= share[0]
    assert tree[1].sharded == math.ceil(16e9 / 1024)


def test_the_command() -> None:
    options: list[Any] = ["--parameters", "7e9", "--seconds", 2.26, "--bandwidth", 50, "--latency", 10]
    lines = faststep("plan-ranks", *options).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["devices", "8", "64", "1024"]
    assert lines[1].split()[1:] == ["1.030", "3.290", "69%", "5", "168.0", "14.0"]
    assert "devices: expected a number above 0" in faststep("plan-ranks", *options, "--devices", 0, status=2).stderr
    assert "network: expected" in faststep("plan-ranks", *options, "--network", "token", status=2).stderr
