"""Modules of a model watched while the loss is computed once: what goes into each, and what comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from faststep.doctor._finding import Finding

Look = Callable[[str, nn.Module, list[mx.array], list[mx.array]], None]


@contextlib.contextmanager
def watching(model: nn.Module, look: Look) -> Iterator[None]:
    """Call `look(path, module, inputs, outputs)` behind every call of a module in the block.

    A call that raises is looked at too, without outputs. Each module is of a class of its own meanwhile.
    """
    changed: list[tuple[nn.Module, type]] = []
    known: set[int] = set()
    try:
        for path, module in model.named_modules():
            kind = type(module)
            if id(module) in known or not callable(module):
                continue
            known.add(id(module))
            object.__setattr__(module, "__class__", _looked_at(kind, path or "model", look))
            changed.append((module, kind))
        yield
    finally:
        for module, kind in changed:
            object.__setattr__(module, "__class__", kind)


def _looked_at(kind: type, path: str, look: Look) -> type:
    def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        inputs = arrays_of([arguments, named])
        try:
            value = kind.__call__(self, *arguments, **named)
        except Exception:
            look(path, self, inputs, [])
            raise
        look(path, self, inputs, arrays_of(value))
        return value

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__})


def arrays_of(tree: Any) -> list[mx.array]:
    """Return the arrays of a tree."""
    if isinstance(tree, mx.array):
        return [tree]
    found: dict[str, Any] = dict(tree_flatten(tree)) if isinstance(tree, dict | list | tuple) else {}
    return [each for each in found.values() if isinstance(each, mx.array)]


def bad_rows(array: mx.array) -> list[int]:
    """Return the places along the first axis at which a floating array is not finite."""
    if not mx.issubdtype(array.dtype, mx.floating) or array.size == 0:
        return []
    bad = ~mx.isfinite(array)
    rows: Any = (bad.reshape(array.shape[0], -1).any(axis=1) if array.ndim else bad.reshape(1)).tolist()
    return [place for place, each in enumerate(rows) if each]


class Origin:
    """The module out of which the first value comes that is not finite, while what went in is."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.kind = ""
        self.rows: list[int] = []

    def __call__(self, path: str, module: nn.Module, inputs: list[mx.array], outputs: list[mx.array]) -> None:
        """Look at a call."""
        if self.path is not None or any(bad_rows(each) for each in inputs):
            return
        for each in outputs:
            if rows := bad_rows(each):
                self.path, self.kind, self.rows = path, type(module).__name__, rows
                return


_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


class Layouts:
    """Convolutions whose input looks as if its channels came first; MLX wants them last."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._any = False  # only the first convolution meets the data themselves

    def __call__(self, path: str, module: nn.Module, inputs: list[mx.array], outputs: list[mx.array]) -> None:
        """Look at a call."""
        axes = next((count for kind, count in _CONVOLUTIONS.items() if isinstance(module, kind)), 0)
        if not axes or self._any or not inputs or inputs[0].ndim != axes + 2:
            return
        self._any = True
        x = inputs[0]
        wanted = module.weight.shape[-1] * getattr(module, "groups", 1)
        order = ", ".join(map(str, [0, *range(2, axes + 2), 1]))
        remedy = "give convolutions [batch, length, channels] (or [batch, height, width, channels])"
        code = f"x = x.transpose({order})   # before {path}"
        if x.shape[-1] != wanted and x.shape[1] == wanted:
            shape = f"{path} ({type(module).__name__}) gets {list(x.shape)}"
            text = f"{shape}: {wanted} channels are expected last, not second"
            self.findings.append(Finding("channels-first", "failure", text, remedy, code))
        elif x.shape[1] == x.shape[-1] == wanted and _is_smoother_along_channels(x):
            text = (
                f"{path} ({type(module).__name__}) gets {list(x.shape)}, where channels and length are as many: the "
                "values change smoothly along the last axis, as along time or space, so channels seem to come first"
            )
            self.findings.append(Finding("channels-first", "warning", text, remedy, code))
        elif x.shape[1] < x.shape[-1] == wanted and _is_smoother_along_channels(x, 0.25):
            text = (
                f"{path} ({type(module).__name__}) gets {list(x.shape)} and takes the last axis as {wanted} channels: "
                "the values change smoothly along it, as along time or space"
            )
            remedy = "nothing is wrong if those are channels, such as frequencies; otherwise transpose, and let the "
            remedy += f"convolution have {x.shape[1]} input channels"
            self.findings.append(Finding("channels-first", "note", text, remedy, code))


def _is_smoother_along_channels(x: mx.array, least: float = 0.5) -> bool:
    """Return whether neighbours along the last axis are much more alike than those along the second one."""
    x = x.astype(mx.float32)

    def roughness(axis: int) -> float:
        n = x.shape[axis]
        ahead, behind = mx.take(x, mx.arange(1, n), axis=axis), mx.take(x, mx.arange(n - 1), axis=axis)
        return float(mx.abs(ahead - behind).mean())

    return roughness(x.ndim - 1) < least * roughness(1)


class Indices:
    """Rows that embeddings are asked for and do not have: MLX reads what lies there."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def __call__(self, path: str, module: nn.Module, inputs: list[mx.array], outputs: list[mx.array]) -> None:
        """Look at a call."""
        if not isinstance(module, nn.Embedding | nn.QuantizedEmbedding) or not inputs or self.findings:
            return
        x = inputs[0]
        if not mx.issubdtype(x.dtype, mx.integer) or x.size == 0:
            return
        rows, low, high = module.weight.shape[0], int(x.min()), int(x.max())
        if low < -rows or high >= rows:
            text = (
                f"{path} has {rows} rows and is asked for rows {low} to {high}: MLX does not check rows, and reads "
                "other memory"
            )
            remedy = "make the embedding as large as the vocabulary, or look for ids that are not of it"
            code = f"nn.Embedding({high + 1}, ...)"
            self.findings.append(Finding("tokens-out-of-range", "failure", text, remedy, code))
