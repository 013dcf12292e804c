"""The last layer of a language model apart from the rest, for losses that never hold all logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from faststep.losses import FewBits

_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_HEADS = (nn.Linear, nn.QuantizedLinear, *_EMBEDDINGS)


class Parted(NamedTuple):
    """A language model's outputs before its last layer, and that layer.

    Attributes:
        hidden: What the layer gets, floating point [batch, seq, width].
        weight: Its weight, floating point [vocabulary, width]; or the layer, where it is one in few bits.
        bias: Its bias, floating point [vocabulary], or None.
    """

    hidden: mx.array
    weight: mx.array | FewBits
    bias: mx.array | None

    @property
    def vocabulary(self) -> int:
        """The rows of the weight."""
        return int((self.weight if isinstance(self.weight, mx.array) else self.weight.weight).shape[0])


def parted(model: nn.Module, tokens: mx.array, **places: Any) -> Parted:
    """Compute what the last layer of a language model gets, and find the layer.

    A model may say both itself: `hidden(tokens, **places)` and `head`, the weight. Otherwise the layer is the only
    module called `lm_head`, or else the first embedding, to which the model is tied then; it passes on what it gets
    while the model is called, which has to return that as it is. So are the models of mlx-lm.

    Args:
        model: The model, `model(tokens, **places)` being its logits.
        tokens: Integers [batch, seq].
        **places: What else the model takes by name.

    Raises:
        ValueError: There is no such layer, it has an adapter, or the model does more with the logits than that.
    """
    if hasattr(model, "hidden") and hasattr(model, "head"):
        return Parted(model.hidden(tokens, **places), model.head, None)
    head, seen = _head_of(model), list[mx.array]()
    with _passing(head, seen):
        out = model(tokens, **places)
    if len(seen) != 1 or out is not seen[0]:
        raise ValueError(
            f"in_chunks: {_name(model)} changes its logits after its last layer (by a scale or a cap, say), so that a "
            "loss needs all of them: set in_chunks to false"
        )
    return Parted(out, head if isinstance(head, FewBits) else head.weight, head.get("bias"))


def _head_of(model: nn.Module) -> nn.Module:
    modules = {name: each for name, each in model.named_modules() if name}
    heads = [each for name, each in modules.items() if name.rpartition(".")[2] == "lm_head"]
    tied = [modules[name] for name in sorted(modules, key=len) if isinstance(modules[name], _EMBEDDINGS)]
    found = heads or tied[:1]
    if len(found) != 1 or not isinstance(found[0], _HEADS):
        there = f"a {type(found[0]).__name__}" if found else "none"
        raise ValueError(
            f"in_chunks: expected {_name(model)} to have hidden(tokens) and head, or a linear layer lm_head, or an "
            f"embedding that it is tied to, found {there}"
        )
    return found[0]


@contextlib.contextmanager
def _passing(head: nn.Module, seen: list[mx.array]) -> Iterator[None]:
    """Let a layer pass on what it gets, and note it."""

    def note(_: Any, x: mx.array) -> mx.array:
        seen.append(x)
        return x

    kind: Any = type(head)
    name = "as_linear" if isinstance(head, _EMBEDDINGS) else "__call__"
    head.__class__ = type(kind.__name__, (kind,), {name: note, "__module__": kind.__module__})
    try:
        yield
    finally:
        head.__class__ = kind


def _name(model: nn.Module) -> str:
    return repr(getattr(model, "model_type", type(model).__name__))
