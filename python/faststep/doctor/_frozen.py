"""Parameters that are frozen where it looks like an accident: a layer among trained ones, a part of a trained layer."""

from __future__ import annotations

import re
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from faststep.doctor._finding import Finding

_NUMBERED = re.compile(r"^(.*\.|)(\d+)\.(.+)$")
_BUFFERS = ("running_mean", "running_var")


def findings(model: nn.Module) -> Iterator[Finding]:
    """Yield what is found."""
    everything: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    trained: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    floating = [name for name, each in everything.items() if mx.issubdtype(each.dtype, mx.floating)]
    frozen = [name for name in floating if name not in trained and not name.endswith(_BUFFERS)]
    if holes := sorted(_holes(frozen, set(trained))):
        text = f"frozen between layers that train: {_listed(holes)}"
        yield Finding("frozen-layer", "warning", text, _REMEDY, f"model.{holes[0].rpartition('.')[0]}.unfreeze()")
    modules = {name.rpartition(".")[0] for name in trained}
    quantized = {name.rpartition(".")[0] for name in everything if name.endswith(".scales")}
    parts = [name for name in frozen if (inside := name.rpartition(".")[0]) in modules and inside not in quantized]
    if parts := sorted(set(parts) - set(holes)):
        text = f"frozen inside layers whose other parameters train: {_listed(parts)}"
        module, _, key = parts[0].rpartition(".")
        yield Finding("frozen-part", "note", text, _REMEDY, f"model.{module}.unfreeze(keys={key!r})")


_REMEDY = "unfreeze them, where they were not frozen on purpose; freeze(keys=...) looks at names alone"


def _holes(frozen: list[str], trained: set[str]) -> Iterator[str]:
    """Yield frozen parameters of numbered layers, of whose like one before and one behind train."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in trained:
        if match := _NUMBERED.match(name):
            numbers.setdefault((match[1], match[3]), []).append(int(match[2]))
    for name in frozen:
        if (match := _NUMBERED.match(name)) and (like := numbers.get((match[1], match[3]))):
            if min(like) < int(match[2]) < max(like):
                yield name


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"model.{name}" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
