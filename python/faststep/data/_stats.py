"""Counts and times of a loader."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoaderStats:
    """Counts of a loader since it was made; they are no part of its state.

    Attributes:
        batches: Batches that were given out.
        items: Items in them, or pieces of items that were packed.
        tokens: Tokens in them, as `Pad` and `Pack` count them, or else by the source's `tokens_per_item`; otherwise 0.
        wait: Seconds that the caller waited for a batch; without workers that is what it took to make it.
        seconds: Seconds spent in loops over the loader, the wait and the caller's own work between batches.
        real: Elements of items along the padded axis, as `Pad` and `Pack` count them; 0 with other collates.
        elements: The same with the padding.
    """

    batches: int = 0
    items: int = 0
    tokens: int = 0
    wait: float = 0.0
    seconds: float = 0.0
    real: int = 0
    elements: int = 0

    @property
    def wait_share(self) -> float | None:
        """The share of the time that was spent waiting for data, 0 to 1; None before the first batch."""
        return self.wait / self.seconds if self.seconds else None

    @property
    def efficiency(self) -> float | None:
        """The share of the elements that is not padding, 0 to 1; None where nothing is padded."""
        return self.real / self.elements if self.elements else None
