"""Draws from random states of the whole process, which threads must not make: they come in another order each time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

States = dict[str, Any]


def states() -> States:
    """Return the states of the process's own generators, by name."""
    kind, words, *rest = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (kind, np.asarray(words).tobytes(), *rest)}


def refuse_draws(before: States) -> None:
    """Refuse what was drawn since then, by the thread that makes batches: nothing else ran meanwhile.

    Raises:
        ValueError: Something was.
    """
    after = states()
    drawn = [name for name in before if before[name] != after[name]]
    if drawn:
        raise ValueError(
            f"source: an item or the collate draws from {' and '.join(drawn)}, whose state is the process's, in a "
            "worker thread: the order of the draws would be another each time, and a resumed training not the same. "
            "Draw from a generator of the item's own, numpy.random.default_rng([seed, epoch, index]) (set_epoch(epoch) "
            "tells the epoch), or make batches without threads: workers=0"
        )
