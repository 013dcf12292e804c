"""What the code of an optimizer of a user's own reads beside its arrays and numbers, changed between the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_map
from support.beside import Box, Program, beside, squares

OPTIONS = {"decay": 1.0}


class Own(optim.SGD):
    """Reads what is neither its own nor an array of its state."""

    strength, table = 1.0, [1.0]

    def __init__(self, box: Box) -> None:
        super().__init__(0.1)
        self.box = box

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: Any) -> mx.array:
        scale = OPTIONS["decay"] * self.strength * self.table[0] * self.box.value
        return super().apply_single(gradient * scale, parameter, state)


@pytest.mark.parametrize("kind", ["dict", "class", "list", "object", "array", "array in place"])
def test_what_an_optimizers_own_code_reads_is_seen_to_change(kind: str) -> None:
    box = Box(mx.array(1.0) if "array" in kind else 1.0)
    change: dict[str, Callable[[], object]] = {
        "dict": lambda: OPTIONS.update(decay=3.0),
        "class": lambda: setattr(Own, "strength", 3.0),
        "list": lambda: Own.table.__setitem__(0, 3.0),
        "object": lambda: setattr(box, "value", 3.0),
        "array": lambda: setattr(box, "value", mx.array(3.0)),
        "array in place": lambda: box.value.__imul__(3.0),
    }

    def build(patch: pytest.MonkeyPatch) -> Program:
        patch.setitem(OPTIONS, "decay", 1.0)
        patch.setattr(Own, "strength", 1.0)
        patch.setattr(Own, "table", [1.0])
        box.value = mx.array(1.0) if "array" in kind else 1.0
        return squares, [change[kind], lambda: None]

    step = beside(build, optimizer=lambda: Own(box))
    assert (step.stats.mode, step.stats.traced) == ("traced", 2)


def test_a_number_that_an_optimizer_reads_and_that_changes_at_every_step_is_right_uncompiled() -> None:
    box = Box(1.0)

    def build(patch: pytest.MonkeyPatch) -> Program:
        patch.setitem(OPTIONS, "decay", 1.0)
        box.value = 1.0
        return squares, [lambda: setattr(box, "value", box.value * 1.1)] * 12

    with pytest.warns(RuntimeWarning, match=r"optimizer's code reads .*box.value, which has changed again"):
        step = beside(build, optimizer=lambda: Own(box))
    assert step.stats.mode == "plain"


class Scaler:
    """Scales losses; the program counts by it after each step."""

    def __init__(self) -> None:
        self.scale, self.good = 4.0, 0

    def update(self) -> None:
        """Count a step: a method that no code of the optimizer calls, with the name of one of an optimizer's."""
        self.good += 1
        if self.good % 8 == 0:
            self.scale *= 2


class Scaled(optim.Adam):
    def __init__(self, scaler: Scaler) -> None:
        super().__init__(0.01)
        self.scaler = scaler

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        return super().apply_gradients(tree_map(lambda each: each / self.scaler.scale, gradients), parameters)


def test_a_method_of_another_object_is_not_taken_for_the_update() -> None:
    scalers = list[Scaler]()

    def build(patch: pytest.MonkeyPatch) -> Program:
        scalers.append(scaler := Scaler())
        return lambda model, x: squares(model, x) * scaler.scale, [scaler.update] * 12

    step = beside(build, optimizer=lambda: Scaled(scalers[-1]))
    assert (step.stats.mode, step.stats.traced <= 3) == ("traced", True)


class Adjusted(optim.AdamW):
    """Has options that are computed of what stands on its class."""

    factor, eps = 1.0, 1e-3

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(1e-2)
        if kind == "a class's":
            del self.eps

    def scaled(self, name: str, value: Any) -> Any:
        return value * self.factor if self.kind == name else value

    @property
    def learning_rate(self) -> Any:
        return self.scaled("rate", self.state["learning_rate"])

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.state["learning_rate"] = mx.array(value)

    @property
    def weight_decay(self) -> Any:
        return self.scaled("decay", 0.5)

    @weight_decay.setter
    def weight_decay(self, value: Any) -> None:
        """Leave it."""

    @property
    def betas(self) -> Any:
        return [self.scaled("betas", 0.5), 0.9]

    @betas.setter
    def betas(self, value: Any) -> None:
        """Leave it."""


@pytest.mark.parametrize("kind", ["rate", "decay", "betas", "a class's"])
def test_what_properties_of_an_optimizer_read_of_its_class_is_seen_to_change(kind: str) -> None:
    def build(patch: pytest.MonkeyPatch) -> Program:
        name, other = ("eps", 1.0) if kind == "a class's" else ("factor", 0.1)
        return squares, [lambda: patch.setattr(Adjusted, name, other), lambda: None]

    beside(build, optimizer=lambda: Adjusted(kind))
