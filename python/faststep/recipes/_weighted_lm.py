"""A language model's loss that weighs each text by where it comes from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from faststep.losses import linear_cross_entropy
from faststep.recipes._losses import check_outputs, in_range

Loss = Callable[..., Any]


def weighted_lm(*, weighted: bool = False, in_chunks: bool = False, outputs: bool = False) -> Loss:
    """Make a language model's loss in which texts of good authority and certain provenance count for more.

    With the mean cross entropy `c_i` of the tokens of text `i`, in nats, the authority `a_i > 0` of its source, and the
    entropy `H_i >= 0` of its provenance, in bits:

        w_i = a_i / 2 ** H_i
        loss = sum(w_i * c_i) / sum(w_i)

    `2 ** H` is the perplexity of the provenance (Jelinek, Mercer, Bahl, Baker, 1977): of how many origins, were they
    equally likely, it leaves the choice. It takes `input_ids`, integers [batch, seq]; `auth_weights`, floating point
    [batch]; `prov_entropies`, floating point [batch]; and a `mask`, bool [batch, seq], False in padding. Weights out of
    their range make the batch a bad one, which is skipped and reported.

    Args:
        weighted: Return `(mean, sum of the weights)`, as `Step(weighted=True)` takes it.
        in_chunks: Never hold all logits: `faststep.losses.linear_cross_entropy` over `model.hidden(input_ids)` and
            `model.head`.
        outputs: Return the logits behind loss and weight, for metrics; not with `in_chunks`.

    Raises:
        ValueError: `outputs` with `in_chunks`.
    """
    check_outputs(outputs, in_chunks)
    chunked = linear_cross_entropy if in_chunks else None  # a step reads all that a loss names

    def loss(
        model: nn.Module,
        input_ids: mx.array,
        auth_weights: mx.array,
        prov_entropies: mx.array,
        mask: mx.array | None = None,
        lengths: mx.array | None = None,  # of Pad, whose mask says the same
    ) -> Any:
        tokens, targets = input_ids[:, :-1], input_ids[:, 1:].astype(mx.int32)
        counts = mx.ones(targets.shape) if mask is None else mask[:, 1:].astype(mx.float32)
        if chunked is not None:
            logits, classes = None, model.head.shape[0]
            losses = chunked(model.hidden(tokens), model.head, targets, reduction="none")
        else:
            logits = model(tokens)
            classes = logits.shape[-1]
            labels = mx.where(in_range(targets, classes), targets, 0)
            losses = nn.losses.cross_entropy(logits.astype(mx.float32), labels)
        each = (losses * counts).sum(axis=1) / mx.maximum(counts.sum(axis=1), 1)
        weights = auth_weights / 2**prov_entropies
        good = (auth_weights > 0).all() & (prov_entropies >= 0).all() & mx.isfinite(weights).all()
        good = good & ((counts == 0) | in_range(targets, classes)).all()
        mean = mx.where(good, (weights * each).sum() / weights.sum(), -mx.inf)
        found = (mean, weights.sum()) if weighted else (mean,)
        found = (*found, logits) if outputs else found
        return found if len(found) > 1 else mean

    loss.explain = _explain  # type: ignore[attr-defined]
    return loss


def _explain(
    value: float, input_ids: mx.array, auth_weights: mx.array, prov_entropies: mx.array, *_: Any, **__: Any
) -> str | None:
    """Say why the loss of a batch has this value, where it is for what the batch has."""
    if value != -math.inf:
        return None
    named = {"input_ids": input_ids, "auth_weights": auth_weights, "prov_entropies": prov_entropies}
    ranges = ", ".join(f"{name} from {each.min().item()} to {each.max().item()}" for name, each in named.items())
    expected = "input_ids from 0 to one less than the model's outputs, auth_weights above 0, prov_entropies from 0 on"
    return f"expected {expected}, got {ranges}"
