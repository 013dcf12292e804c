"""Errors in the user's data, with their place."""

from __future__ import annotations

import contextlib
from types import TracebackType


class about:
    """Note on an exception that passes what was being read; the exception stays what it is.

    The note is in `__notes__`, which tracebacks show from Python 3.11 on (PEP 678). The first note wins: the item, not
    also the batch.
    """

    __slots__ = ("what",)

    def __init__(self, *what: object) -> None:
        """Keep the words, which are put together when they are needed."""
        self.what = what

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Note."""
        if isinstance(error, Exception) and not hasattr(error, "__notes__"):
            with contextlib.suppress(AttributeError, TypeError):
                note = f"faststep.data: {' '.join(map(str, self.what))}"
                error.__notes__ = [note]  # type: ignore[attr-defined, unused-ignore]


class TooLong(ValueError):
    """An item that its collate has no room for."""


class Interrupted(KeyboardInterrupt):
    """Raised by `Loader.on_wait` to end a loop that waits for a worker; the place in the data is that before it."""
