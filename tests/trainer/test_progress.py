"""The progress display: in a real pseudo-terminal, and as plain lines where there is none."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from pathlib import Path
from typing import BinaryIO

import pytest
from support.places import TESTS, Child

CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9]+)*m")
SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"

TRAIN = """
import sys, time
from faststep.loggers import Progress
from support.trained import Training
training = Training([Progress()], steps=40, spoil=(4,))
"""


class Terminal:
    """Runs code in a pseudo-terminal and keeps what it writes."""

    def __init__(self, code: str, columns: int = 120, errors: BinaryIO | None = None, **environment: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        env |= {"PYTHONPATH": str(TESTS), "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        command = [sys.executable, "-c", textwrap.dedent(TRAIN) + textwrap.dedent(code)]
        self.process = subprocess.Popen(command, env=env, stdin=slave, stdout=slave, stderr=errors or slave)
        os.close(slave)
        self.output = ""

    def read(self, until: str = "") -> str:
        """Read until the text appears, or to the end."""
        while (not until or until not in self.output) and self.more():
            pass
        return self.output

    def more(self) -> bool:
        """Read once; False at the end."""
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux's way of saying that nobody has the other end
            data = b""
        self.output += data.decode(errors="replace")
        return bool(data)

    def end(self) -> str:
        """Read to the end; return what was written, without codes."""
        self.read()
        os.close(self._master)
        self.process.wait()
        return CODE.sub("", self.output)


def test_everything_is_shown_in_a_terminal() -> None:
    terminal = Terminal("training.start(); training.run(40, pause=0.05); training.end()")
    shown = terminal.end()
    assert terminal.process.returncode == 0, shown
    for word in ("module", "trainable", "blocks", "4,352", "5,376"):  # the table
        assert word in shown
    for word in ("step 40/40", "epoch 2", "loss", "grad norm", "learning rate", "skipped 1", "best", "steps/s"):
        assert word in shown, word
    for word in ("tokens/s", "data", "validation", "checkpoint", "active", "cache", "process 100 MB", "ETA 0:00:0"):
        assert word in shown, word
    assert re.search(r"data-bound: \d\d % of the step", shown)
    assert "warning at step 4: loss is not finite: the batch was skipped" in shown
    assert re.search(r"validation at step 40: loss \S+, perplexity", shown)
    assert re.search(r"ended +done", shown)
    assert re.search(r"best validation +\S+ at step \d0", shown)


def test_the_clock_moves_within_a_long_step() -> None:
    terminal = Terminal("training.start(); time.sleep(100)")
    while len(set(re.findall(r"elapsed 0:\d\d:\d\d", terminal.output))) < 3:  # a busy machine leaves some out
        assert terminal.more(), terminal.output
    terminal.process.kill()
    terminal.end()


@pytest.mark.parametrize("columns", [40, 60, 120])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    terminal = Terminal("training.start(); training.run(40, pause=0.02); training.end()", columns)
    shown = terminal.end()
    assert terminal.process.returncode == 0, shown
    lines = [line for part in CODE.split(terminal.output) for line in part.splitlines()]
    assert max(map(len, shown.splitlines())) <= columns
    assert max(map(len, lines)) > columns // 2
    for word in ("loss", "learning rate", "process 100 MB"):  # nothing is cut off
        assert word in shown


def test_what_the_user_prints_stays() -> None:
    code = """
    training.start()
    for step in range(20):
        training.run(step + 1, every=5, pause=0.03)
        print(f"own line {step} [bold]not markup[/]")
        print(f"own error {step}", file=sys.stderr)
    print("a line without its end", end="")
    training.end()
    """
    shown = Terminal(code).end()
    for step in range(20):
        assert shown.count(f"own line {step} [bold]not markup[/]") == 1
        assert shown.count(f"own error {step}\r\n") == 1
    assert "a line without its end" in shown


def test_errors_that_go_to_a_file_stay_there(tmp_path: Path) -> None:
    code = "training.start(); print('own error', file=sys.stderr); training.run(3); training.end()"
    with (tmp_path / "errors").open("wb") as errors:
        shown = Terminal(code, errors=errors).end()
    assert "own error" not in shown
    assert (tmp_path / "errors").read_text() == "own error\n"


def test_no_color() -> None:
    code = "training.start(); training.run(20, pause=0.02); training.end()"
    plain, coloured = Terminal(code, NO_COLOR="1"), Terminal(code)
    plain.end(), coloured.end()
    assert COLOUR.search(coloured.output)
    assert not COLOUR.search(plain.output)
    assert "step 20/40" in plain.output


@pytest.mark.parametrize(
    "ending", ["os.kill(os.getpid(), 9)", "raise ValueError('mine')", "os.kill(os.getpid(), 2); time.sleep(9)"]
)
def test_however_it_ends_the_terminal_has_its_cursor(ending: str) -> None:
    code = f"""
    import os
    training.start()
    try:
        training.run(10, pause=0.05)
        {ending}
    finally:
        training.loggers[0].close()
    """
    terminal = Terminal(code)
    shown = terminal.end()
    assert terminal.output.rfind(SHOW) > terminal.output.rfind(HIDE)
    if "mine" in ending:
        assert "ValueError: mine" in shown.splitlines()[-1]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_texts_move_no_cursor_and_break_no_encoding(encoding: str, term: str) -> None:
    code = """
    training.start()
    training.log("event", level="error", text="\\x1b[2Jgröße\\r\\n[red]x[/red] \\ud800", what="oom")
    training.run(20, pause=0.02)
    training.end()
    """
    terminal = Terminal(code, PYTHONIOENCODING=encoding, TERM=term)
    terminal.end()
    assert terminal.process.returncode == 0, terminal.output
    word = "größe" if encoding == "utf-8" else "gr\\xf6\\xdfe"
    assert f"error at step 0: \\x1b[2J{word}\\r\\n[red]x[/red] \\ud800" in terminal.output


def test_a_dumb_terminal_gets_plain_lines() -> None:
    terminal = Terminal("training.start(); training.run(20); training.end()", TERM="dumb")
    shown = terminal.end()
    assert shown == terminal.output
    assert "step 20/40 | epoch 1 | loss" in shown


def test_plain_lines(child: Child) -> None:
    run = "training.start(); training.run(40); training.end()"
    done = child(TRAIN + run, PYTHONIOENCODING="ascii")
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert done.stdout.isascii()
    lines = done.stdout.splitlines()
    for begin in ("step ", "validation at step ", "checkpoint at step "):
        assert sum(line.startswith(begin) for line in lines) == 4, begin
    assert sum(line.startswith("warning at step 4: ") for line in lines) == 1
    interval = next(line for line in lines if line.startswith("step 40/40"))
    for word in ("loss", "grad norm", "skipped 1", "steps/s", "tokens/s", "ETA"):
        assert word in interval
    assert ", lr " in next(line for line in lines if line.startswith("step 10/40"))
    assert max(map(len, lines)) < 120
    assert "ended: done" in lines


def test_plain_lines_are_flushed() -> None:
    code = TRAIN + "training.start(); training.run(10); time.sleep(100)"
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith(b"step 10/40"):
            pass
        process.send_signal(signal.SIGKILL)
