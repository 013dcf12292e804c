"""Comparison of the sizes that model and data declare, before anything is trained.

A dataset may have `vocabulary` (one more than the highest token that it gives), `longest` (the most tokens of an item),
`classes` and `channels`, whole numbers; a model `vocabulary`, `context`, `classes` and `channels`.
"""

from __future__ import annotations

from typing import Any


def check_match(model: Any, source: Any) -> None:
    """Refuse a dataset that a model cannot take, where both say so.

    Raises:
        ValueError: It has more tokens, longer items, more classes or other channels than the model.
    """
    there, known = _number(source, "vocabulary"), _number(model, "vocabulary")
    if there and known and there > known:
        raise ValueError(f"expected tokens below {known}, the model's vocabulary; the tokenizer has {there}")
    there, known = _number(source, "longest"), _number(model, "context")
    if there and known and there > known:
        raise ValueError(f"length: expected at most {known}, the model's longest sequence, got {there}")
    there, known = _number(source, "classes"), _number(model, "classes")
    if there and known and there != known:
        raise ValueError(f"expected {known} classes, as the model has, got {there}")
    there, known = _number(source, "channels"), _number(model, "channels")
    if there and known and there != known:
        raise ValueError(f"expected {known} channels, as the model has, got {there}")


def _number(of: Any, name: str) -> int | None:
    value = getattr(of, name, None)
    return value if type(value) is int else None
