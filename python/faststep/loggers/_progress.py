"""The progress of a training, for people who watch it."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from faststep._records import Record
from faststep._records import plain as as_plain
from faststep.loggers._live import Live
from faststep.loggers._notebook import Notebook, in_notebook
from faststep.loggers._plain import Plain
from faststep.loggers._status import Status


class Progress:
    """The progress of a training, in a terminal, in a notebook or as plain lines.

    In a notebook it is one output of the cell, drawn again with the records. In a terminal it is a display that is
    drawn four times a second by a thread of its own, so that the clock moves within a long step too; events,
    validations and what the user's own code prints appear above it. Everywhere else it is a plain line for each
    interval, validation, checkpoint and event, without control codes and flushed at once. At the start there is a table
    of the parameters by module, at the end a summary.

    `NO_COLOR` in the environment turns colours off, `TERM=dumb` the display.

    Args:
        file: Where to write; None: `sys.stdout`.
        plain: True for plain lines in a terminal and a notebook too; None: when `file` is neither.

    Raises:
        ImportError: rich is not installed (the display only).

    Example:
        >>> progress = Progress()
        >>> progress.log({"kind": "start", "time": 0.0, "step": 0, "device": "cpu", "resumed": False})
        training on cpu
        >>> progress.log({"kind": "event", "time": 0.1, "step": 3, "level": "warning", "text": "a batch was skipped"})
        warning at step 3: a batch was skipped
        >>> progress.close()
    """

    def __init__(self, file: TextIO | None = None, *, plain: bool | None = None) -> None:
        notebook = file is None and plain is None and in_notebook()
        file = sys.stdout if file is None else file
        if plain is None:
            plain = not file.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown")
        self._status = Status()
        self._view: Plain | Live | Notebook
        if notebook:
            self._view = Notebook(self._status)
        else:
            self._view = Plain(file, self._status) if plain else Live(file, self._status)

    def log(self, record: Record) -> None:
        """Show the record."""
        if record["kind"] != "step":  # intervals cover them
            record = as_plain(record)  # no array is evaluated by the thread that draws
            self._status.take(record)
            self._view.show(record)

    def close(self) -> None:
        """Restore the terminal."""
        self._view.close()
