"""The table: optimizers x models x clipping x accumulation."""

from __future__ import annotations

from collections.abc import Iterable

from support.helpers import OPTIMIZERS, Row

KINDS = ["mlp", "conv", "tied", "lstm", "graph", "vae", "lora", "frozen"]
# one of each class, where another dtype or layout is the question: each more is a second of g++ for a new machine
CLASSES = [
    *("sgd-momentum", "adamw", "adam", "adamax", "lion", "rmsprop", "adagrad", "adadelta"),
    *("adafactor-fixed", "muon", "multi", "user-adam"),
]
NORM, VALUE = 0.05, 0.01


def halved(models: Iterable[str], optimizers: Iterable[str]) -> list[Row]:
    """Cross models and optimizers, each pair with half of the four settings of clipping and accumulation.

    Clipped alone and accumulated alone, or neither and both, in turns: every model and every optimizer meet all four,
    and every pair has each option on and off. The other half would show nothing new: of the model the update knows
    the dtypes and the layout of its tensors only.
    """
    table = []
    for number, model in enumerate(models):
        for other, optimizer in enumerate(optimizers):
            first, second = (None, NORM) if (number + other) % 2 else (NORM, None)
            table += [Row(model, optimizer, first), Row(model, optimizer, second, accumulate=3)]
    return table


# how an element is clipped depends on its dtype, and on whether tensors lie in shared buffers
BY_VALUE = [
    Row(model, optimizer, norm, VALUE, accumulate)
    for model in ["conv", "bf16", "mixed"]
    for optimizer in ["adamw", "user"]
    for norm in [None, NORM]
    for accumulate in [1, 3]
]
TABLE = [
    *halved(KINDS, OPTIMIZERS),
    *halved(["bf16"], CLASSES),
    *halved(["looped"], ["sgd-momentum", "adamw", "lion", "adafactor", "muon", "user-adam"]),
    *halved(["nested", "decorated", "gpt", "mixed"], ["sgd-momentum", "adamw", "lion", "user-adam"]),
    *BY_VALUE,
]
