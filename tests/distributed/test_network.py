"""Two ranks with a network between them, of two namespaces: a slow one that drops packets, and one that is cut."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from faststep._command import HUNG
from support.places import TESTS
from support.ring import ended, run, start

pytestmark = pytest.mark.skipif(
    sys.platform != "linux"
    or os.geteuid() != 0
    or shutil.which("tc") is None
    or not mx.distributed.is_available("ring"),
    reason="a network of one's own needs root, iproute2 and MLX's ring",
)
PROGRAM = TESTS / "support" / "rank_lost.py"
NAMES = [f"faststep{os.getpid()}-{rank}" for rank in range(2)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """Make the namespaces, an address in each and a cable between them; return the file of the addresses."""
    commands = [f"ip netns add {name}" for name in NAMES]
    commands += [f"ip link add eth0 netns {NAMES[0]} type veth peer name eth0 netns {NAMES[1]}"]
    for rank, name in enumerate(NAMES):
        commands += [f"ip -n {name} address add 10.77.0.{rank + 1}/24 dev eth0", f"ip -n {name} link set eth0 up"]
    try:
        for command in commands:
            if (done := subprocess.run(command.split(), capture_output=True, text=True)).returncode:
                pytest.skip(f"{command}: {done.stderr}")
        file = tmp_path / "addresses.json"
        file.write_text(json.dumps([[f"10.77.0.{rank + 1}:23456"] for rank in range(2)]))
        yield file
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def started(hosts: Path, how: str) -> list[subprocess.Popen[str]]:
    command = shlex.join([sys.executable, str(PROGRAM), how])
    inside = f"ip netns exec {NAMES[0][:-1]}$MLX_RANK {command}"
    return start(
        2, hosts.parent, "-c", f"exec env MLX_HOSTFILE={shlex.quote(str(hosts))} {inside}", program="/bin/bash"
    )


def test_a_slow_network_that_drops_packets_gives_the_same_bits(hosts: Path, tmp_path: Path) -> None:
    slow = "root tbf rate 8mbit burst 4k latency 5ms".split()
    for name in NAMES:
        done = subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *slow], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(done.stderr)
    said = ended(started(hosts, "whole"))
    dropped = subprocess.run(["tc", "-s", "-n", NAMES[0], "qdisc"], capture_output=True, text=True).stdout
    assert "(dropped 0, " not in dropped.partition("tbf")[2], dropped
    assert set(said) == set(run(2, tmp_path, PROGRAM, "whole"))
    assert said[0].startswith("weights ")


def test_where_the_cable_is_cut_all_ranks_end(hosts: Path) -> None:
    children = started(hosts, "cut")
    said = ended(children, 60)
    assert [child.returncode for child in children] == [HUNG, HUNG], said
    for text in said:
        assert "no progress for 2 s: exchanging arrays with other ranks" in text
        assert "the network between them does not answer" in text
