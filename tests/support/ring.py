"""Processes of this machine in a ring."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

from support.places import TESTS


def free_ports(count: int) -> int:
    """Return the first of so many free ports in a row."""
    while True:
        first = random.randrange(20000, 32000)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def start(
    ranks: int, folder: Path, *arguments: str | Path, program: str | Path = sys.executable
) -> list[subprocess.Popen[str]]:
    """Start a program, Python otherwise, with these arguments as so many ranks of one ring; a ring of one is none."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in held]
    for each in held:
        each.close()
    (folder / "hosts.json").write_text(json.dumps(hosts))
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path}
    if ranks > 1:
        variables["MLX_HOSTFILE"] = str(folder / "hosts.json")
    return [
        subprocess.Popen(
            [program, *map(str, arguments)],
            env={**variables, "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def ended(children: list[subprocess.Popen[str]], seconds: float = 100) -> list[str]:
    """Wait for the ranks, end those that are late, and return what each has said."""
    try:
        return [child.communicate(timeout=seconds)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def run(ranks: int, folder: Path, *arguments: str | Path) -> list[str]:
    """Run the ranks to their end, which is to be a good one, and return what each has said."""
    children = start(ranks, folder, *arguments)
    said = ended(children)
    assert [child.returncode for child in children] == [0] * ranks, "\n".join(said)
    return said
