"""Numbers that are equal and not the same, 0.0 and -0.0 or 1 and 1.0, are other numbers to a step."""

from __future__ import annotations

import cmath
import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.late import LATE, Program, losses, squares

NUMBERS: dict[str, tuple[Any, Any]] = {
    "float": (0.0, -0.0),
    "NumPy's float32": (np.float32(0.0), np.float32(-0.0)),
    "complex": (complex(-1.0, 0.0), complex(-1.0, -0.0)),
    "class": (1, 1.0),
    "flag": (1, True),
}


class Keeping(nn.Module):
    """A model with a number."""

    def __init__(self, number: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.number = number

    def __call__(self, x: mx.array) -> Any:
        return self.layer(x) * scale(self.number)


def scale(number: Any) -> float:
    """Return another number for each of those that are equal."""
    if isinstance(number, complex):
        return 1.0 + 0.1 * cmath.phase(number)
    return 1.0 + 0.1 * math.copysign(1.0, number) + 0.01 * len(type(number).__name__)


PLACES = [(where, name) for where in ("module", "tuple") for name in NUMBERS]
PLACES += [(where, name) for where in ("model", "object") for name in ("NumPy's float32", "complex")]


@pytest.mark.parametrize(("where", "name"), PLACES)
def test_a_number_that_is_equal_is_another_one(where: str, name: str) -> None:
    one, other = NUMBERS[name]

    def made(p: Program) -> None:
        if where == "model":
            p.model = owner = Keeping(one)
            p.loss = squares
        elif where == "module":
            owner = Keeping(one)
            p.loss = lambda model, x: squares(model, x) * scale(owner.number) + squares(owner, x)
        elif where == "tuple":
            kept = SimpleNamespace(number=tuple([one] * 5000))  # compared as a whole
            p.loss = lambda model, x: squares(model, x) * scale(kept.number[7])
            p.change(lambda: setattr(kept, "number", tuple([other] * 5000)))
            return
        else:
            owner = SimpleNamespace(number=one)  # type: ignore[assignment]
            p.loss = lambda model, x: squares(model, x) * scale(owner.number)
        p.change(lambda: setattr(owner, "number", other))

    np.testing.assert_allclose(losses(made, True), losses(made, False), rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_negative_zero_is_one_in_a_kernel_too(dtype: str) -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.number = nn.Linear(3, 1), 0.0

        def __call__(self, x: mx.array) -> mx.array:
            number, one = (mx.array(each, getattr(mx, dtype)) for each in (self.number, -1.0))
            return self.layer(x) * (1.0 + 0.1 * mx.arctan2(number, one).astype(mx.float32))

    def made(p: Program) -> None:
        p.model, p.loss = Turning(), squares
        for at in (1, 3, LATE):
            p.change(lambda: setattr(p.model, "number", -0.0), at)
            p.change(lambda: setattr(p.model, "number", 0.0), at + 1)

    np.testing.assert_allclose(losses(made, True), losses(made, False), rtol=2e-5)
