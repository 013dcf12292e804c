"""Short runs that try a training out: a few steps of everything, and one batch again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FEW = {"steps": 4, "epochs": None, "max_time": None, "validation_batches": 2}  # options of a trainer
FEW |= {"validate_every": 0, "checkpoint_every": 0, "log_every": 1, "patience": None}


class OneBatch:
    """A loader that gives the first batch of another one in the place of each: a model that learns can learn it.

    Epochs, places and states are those of the other loader.
    """

    def __init__(self, loader: Any) -> None:
        """Take the place of a loader; nothing is read yet."""
        self._loader, self._begun, self._first = loader, loader.state, list[Any]()

    def __getattr__(self, name: str) -> Any:
        """Return what the other loader has."""
        return getattr(self._loader, name)

    @property
    def on_wait(self) -> Any:
        """Function that is called while a batch is waited for: the other loader's."""
        return self._loader.on_wait

    @on_wait.setter
    def on_wait(self, call: Any) -> None:
        self._loader.on_wait = call

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Give the batch for the rest of the epoch."""
        if not self._first:
            place = self._loader.state
            self._loader.load_state(self._begun)
            self._first = [next(iter(self._loader))]
            self._loader.load_state(place)
        for _ in self._loader:
            yield self._first[0]
