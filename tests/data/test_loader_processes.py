"""Worker processes: order, resume, epochs and errors as without them, and real signals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from faststep.data import Loader
from support.configs import GOOD, make, refusal, train


class Slow:
    """Items with their epoch and the process that has read them; some do what they must not."""

    def __init__(self, kind: str = "") -> None:
        self.kind, self.epoch = kind, -1

    def __len__(self) -> int:
        return 10

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 3 and self.kind == "error":
            raise KeyError("no such row")
        if index == 3 and self.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "draws":
            random.random()
        item = {"x": np.full(3, index, dtype=np.float32), "epoch": self.epoch, "process": os.getpid()}
        return item | ({"x": mx.zeros(3)} if self.kind == "mlx" else {})


def rows(loader: Loader) -> list[Any]:
    return [(batch["x"][:, 0].tolist(), batch["epoch"].tolist()) for batch in loader]


def test_order_epochs_and_resume_are_those_without() -> None:
    plain = Loader(Slow(), batch_size=3, shuffle=True, seed=4)
    loader = Loader(Slow(), batch_size=3, shuffle=True, seed=4, workers=2, processes=True)
    assert rows(loader) == rows(plain)
    for batch, expected in zip(loader, plain, strict=False):
        assert batch["x"].tolist() == expected["x"].tolist()
        assert {*batch["process"].tolist()} & {os.getpid()} == set()
        break
    again = Loader(Slow(), batch_size=3, shuffle=True, seed=4)
    again.load_state(loader.state)
    assert rows(loader) == rows(again)
    assert loader.epoch == 2


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("error", KeyError, "no such row"),
        ("dies", RuntimeError, r"a worker process has ended \(SIGKILL\) while it read an item"),
        ("mlx", TypeError, "expected items without MLX arrays, got one"),
        ("draws", ValueError, "an item or the collate draws from random"),
    ],
)
def test_errors_arrive(kind: str, error: type[Exception], message: str) -> None:
    loader = Loader(Slow(kind), batch_size=5, workers=1, processes=True)
    for _ in range(2 if kind == "dies" else 1):  # another process takes the place of one that has ended
        with pytest.raises(error, match=message) as caught:
            rows(loader)
    if kind == "error":
        assert caught.value.__notes__ == ["faststep.data: item 3"]
        assert "in __getitem__" in str(caught.value.__cause__)


def test_what_cannot_be_read_elsewhere() -> None:
    with pytest.raises(ValueError, match="processes: expected workers, one or more, and a sequence, got workers=0"):
        Loader(Slow(), processes=True)
    with pytest.raises(ValueError, match="got an iterable, which is read in one place"):
        Loader(iter([1]), workers=1, processes=True)
    with pytest.raises(TypeError, match="processes: the dataset cannot be sent to another process"):
        Loader([lambda: 1], workers=1, processes=True)
    columns = Loader(np.arange(6.0), batch_size=3, workers=1, processes=True)
    assert [batch.tolist() for batch in columns] == [[0, 1, 2], [3, 4, 5]]


MINE = """
    import numpy as np
    import beside_mine

    class Rows:
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return np.full(8, index, dtype=np.float32) / 12, np.full(4, beside_mine.factor * index, dtype=np.float32)
"""


def test_a_file_of_a_config_is_found_in_the_process(tmp_path: Path) -> None:
    """It is on no import path, and imports another file of its folder."""
    text = GOOD.replace("{use: arrays, file: data.npz}", "{use: 'rows_of_mine.py:Rows'}")
    files = {"rows_of_mine": MINE, "beside_mine": "factor = 0.5"}
    plain = train(make(tmp_path, text, **files))
    assert train(make(tmp_path, text, "data.workers=2", "data.processes=true", **files)) == plain
    assert "data.processes: set, but nothing reads it" in refusal(tmp_path, text, "data.processes=true", **files)


PROGRAM = """
    import os, sys, time
    from faststep.data import Loader

    class Hangs:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            if index == 8:
                time.sleep(600)
            print("pid", os.getpid(), flush=True)
            return index

    if __name__ == "__main__":
        for batch in Loader(Hangs(), batch_size=8, workers=1, processes=True):
            print("ready", flush=True)
"""


def lives(pid: int) -> bool:
    """Return whether there is such a process, which has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_they_end_with_the_one_that_started_them(tmp_path: Path, sent: signal.Signals) -> None:
    """Killed, or by Ctrl-C of the terminal, which all of them get, while an item hangs."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(tmp_path / "program.py")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(9)]
    assert lines[-1] == "ready\n", child.stderr.read() if child.stderr else ""
    worker = int(lines[0].split()[1])
    (child.kill if sent == signal.SIGKILL else lambda: os.killpg(child.pid, sent))()
    _, told = child.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while lives(worker):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert told.count("KeyboardInterrupt") == (sent == signal.SIGINT)
