"""The command line as processes: a config that trains in a second, its data, and callbacks that do harm."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Done = subprocess.CompletedProcess[str]

CALLBACKS = """
import os, pathlib, signal

from faststep.training import Callback


class KillOnce(Callback):
    '''Kills its process at a step, where a file says that it has not been killed yet.'''

    def __init__(self, at: int, file: str, times: int = 1):
        self.at, self.file, self.times = at, pathlib.Path(file), times

    def on_step(self, trainer, number):
        deaths = self.file.read_text() if self.file.exists() else ""
        if number == self.at and len(deaths) < self.times:
            self.file.write_text(deaths + "x")
            os.kill(os.getpid(), signal.SIGKILL)


class Starve(Callback):
    '''Takes more memory than its control group has, as long as batches are large.'''

    def __init__(self, group: str):
        self.group = pathlib.Path(group)

    def on_step(self, trainer, number):
        if number == 6 and trainer.loader.batch_size > 8:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
            self.taken = bytearray(1 << 30)


class Refused(Callback):
    '''Asks numpy for more memory than any machine has, as long as batches are large.'''

    def on_step(self, trainer, number):
        if number == 6 and trainer.loader.batch_size > 8:
            import numpy as np

            np.ones(1 << 50)


class Slow(Callback):
    def on_step(self, trainer, number):
        import time

        time.sleep(0.05)


class Hanging:
    '''Rows of a file, of which one is waited for as long as a file is there.'''

    def __init__(self, file: str, until: str):
        import numpy as np

        data = np.load(file)
        self.rows, self.until = list(zip(data["x"][:160], data["y"][:160])), pathlib.Path(until)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        import time

        while index == 100 and self.until.exists():
            self.until.write_text("reached")
            time.sleep(1000)
        return self.rows[index]


class Lines:
    '''Writes the kind of every record into a file.'''

    def __init__(self, file: str):
        self.file = open(file, "a")

    def log(self, record):
        self.file.write(record["kind"] + "\\n")

    def close(self):
        self.file.write("closed\\n")
        self.file.close()


def broken(model, x, y):
    return model.no_such_thing(x)


def without_gradient(model, x, y):
    return (model.layers[0](x) ** 2).mean()


def not_made():
    return 1 / 0
"""


def faststep(*arguments: Any, status: int = 0, **options: Any) -> Done:
    """Run a command to its end."""
    command = [sys.executable, "-m", "faststep", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == status, (done.returncode, done.stdout[-2000:], done.stderr[-3000:])
    return done


def write_config(folder: Path) -> Path:
    """Write a config that trains in a second, and its data."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 8), dtype=np.float32)
    np.savez(folder / "data.npz", x=x, y=x.sum(axis=1, keepdims=True))
    (folder / "mine.py").write_text(CALLBACKS)
    values = {
        "run": str(folder / "run"),
        "model": {"use": "mlp", "sizes": [8, 32, 1], "dropout": 0.1},
        "loss": {"use": "mse"},
        "data": {
            "train": {"use": "arrays", "file": "data.npz", "stop": 160},
            "validation": {"use": "arrays", "file": "data.npz", "start": 160},
            "batch_size": 16,
            "shuffle": True,
        },
        "optimizer": {"use": "AdamW", "learning_rate": 0.01},
        "train": {"steps": 20, "log_every": 5, "validate_every": 10},
        "checkpoints": {"every": 5},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def set_(**values: Any) -> list[str]:
    pairs = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]
    return [word for pair in pairs for word in ("--set", pair)]


def checksums(run: Path) -> dict[str, str]:
    """Return the SHA-256 of the newest checkpoint's weights, optimizer state and step, with the random state."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def wait_for_line(process: subprocess.Popen[Any], file: Path, text: str) -> None:
    """Wait until a file has a text, while a process runs."""
    until = time.monotonic() + 120
    while process.poll() is None and not (file.exists() and text in file.read_text()):
        assert time.monotonic() < until, f"{file}: expected {text!r} in it within two minutes"
        time.sleep(0.01)
    assert process.poll() is None, "it ended before"
