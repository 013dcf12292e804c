"""Shapes of batches that are new, static values that change, and whether a model draws random numbers."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from faststep._step import Stats
from faststep.doctor._finding import Finding
from faststep.doctor._subject import arguments

_MANY = 8  # signatures that a training may have


class Shapes:
    """The signatures of batches: shapes and dtypes of their arrays, values of what is static, by argument."""

    def __init__(self) -> None:
        self.batches = 0
        self.known: dict[str, list[Any]] = {}
        self._whole: set[tuple[Any, ...]] = set()

    def add(self, batch: Any) -> None:
        """Look at a batch."""
        self.batches += 1
        found = [(name, _signature(leaf)) for name, leaf in arguments(batch)]
        self._whole.add(tuple(found))
        for name, signature in found:
            if signature not in (values := self.known.setdefault(name, [])):
                values.append(signature)

    def finding(self, stats: Stats, uncompiled: int) -> Finding | None:
        """Return what is wrong where too many have made traces; `uncompiled` steps got none, after many others."""
        different, made = len(self._whole), stats.traced + uncompiled
        if min(different, made) <= _MANY or 4 * different < self.batches:
            return None  # a number that only changes what an operation gets is an input, and makes no trace
        name, values = max(self.known.items(), key=lambda item: len(item[1]))
        seconds = sum(each.seconds for each in stats.traces) / max(1, len(stats.traces))
        some = ", ".join(str(list(each) if isinstance(each, tuple) else each) for each in values[:4])
        text = (
            f"{different} of {self.batches} batches have a new signature: {name} varies ({some}, ...); "
            f"{stats.traced} new traces took {1e3 * seconds:.0f} ms each"
        )
        if uncompiled:
            text += f", and {uncompiled} steps ran uncompiled"
        if isinstance(values[0], tuple):
            remedy = "pad batches to a few lengths: multiples of 64, say"
            return Finding("new-shapes", "warning", text, remedy, "Loader(..., collate=Pad(multiple=64))")
        remedy = "pass a number that changes as an array; by a length, mask in place of slicing"
        return Finding("new-shapes", "warning", text, remedy, f"mx.array({name.replace(' ', '_')})")


def _signature(leaf: Any) -> Any:
    return tuple(leaf.shape) if hasattr(leaf, "shape") else repr(leaf)[:60]


def probability(module: nn.Module) -> float:
    """Return the share that a dropout layer drops; 0 for other layers."""
    kept = getattr(module, "_p_1", None) if isinstance(module, nn.Dropout | nn.Dropout2d | nn.Dropout3d) else None
    return 0.0 if kept is None else 1.0 - float(kept)
