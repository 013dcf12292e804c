"""Where an error in the user's data happened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Note on an exception that passes what was being read; the exception stays what it is.

    The note is in `__notes__`, which tracebacks show from Python 3.11 on (PEP 678). The first note wins: the item, not
    also the batch.
    """
    try:
        yield
    except Exception as error:
        if not hasattr(error, "__notes__"):
            with contextlib.suppress(AttributeError, TypeError):
                error.__notes__ = [f"faststep.data: {what}"]  # type: ignore[attr-defined, unused-ignore]
        raise
