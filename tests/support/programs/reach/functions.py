"""Functions, classes and modules that a loss counts in, or that change between its calls."""

from __future__ import annotations

import operator
import textwrap
import types
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.programs.reach.registry import (
    Made,
    program,
    squares,
)


@program("closure")
def attribute_of_a_function_that_the_loss_makes() -> Made:
    def weigh(loss: mx.array) -> mx.array:
        made = vars(weigh)
        weigh.n = made.get("n", 0) + 1  # type: ignore[attr-defined]
        return loss * (1 + 0.1 * made["n"])

    return Made(lambda model, x: weigh(squares(model, x)), lambda: vars(weigh).get("n"))


@program("closure")
def static_variable_of_a_function() -> Made:
    def count(loss: mx.array) -> mx.array:
        if not hasattr(count, "n"):
            count.n = 0  # type: ignore[attr-defined]
        count.n += 1  # type: ignore[attr-defined]
        return loss

    return Made(lambda model, x: count(squares(model, x)), lambda: vars(count).get("n"))


@program("object")
def attribute_of_a_class_that_the_loss_makes() -> Made:
    class Stats:
        n: int

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if not hasattr(Stats, "n"):
            Stats.n = 0
        Stats.n += 1
        return squares(model, x) * (1 + 0.1 * Stats.n)

    return Made(loss_fn, lambda: Stats.n)


@program("object")
def attribute_of_a_subclass_over_an_inherited_one() -> Made:
    class Base:
        calls = 0

        @classmethod
        def tick(cls) -> None:
            cls.calls += 1

    class Term(Base):
        pass

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        Term.tick()
        return squares(model, x) * (1 + 0.1 * Term.calls)

    return Made(loss_fn, lambda: (Term.calls, Base.calls))


@program("object")
def singleton_by_new() -> Made:
    class Tracker:
        _instance: Any = None
        steps: int
        weight: float

        def __new__(cls) -> Any:
            if cls._instance is None:
                cls._instance = super().__new__(cls)
                cls._instance.steps, cls._instance.weight = 0, 1.0
            return cls._instance

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        tracker = Tracker()
        tracker.steps += 1
        return squares(model, x) * tracker.weight

    def before(number: int) -> None:
        Tracker().weight = 1 + 0.1 * number

    return Made(loss_fn, lambda: Tracker().steps, before)


def module(code: str) -> Any:
    found = types.ModuleType("helpers_of_a_program")
    exec(textwrap.dedent(code), vars(found))
    return found


@program("closure")
def global_of_a_module_that_is_imported() -> Made:
    helpers = module("""
        n = 0
        def tick():
            global n
            n += 1
            return n
        """)
    return Made(lambda model, x: squares(model, x) * (1 + 0.1 * helpers.tick()), lambda: helpers.n)


@program("closure")
def count_in_a_module_that_is_imported() -> Made:
    helpers = module("""
        n = 0
        def tick():
            global n
            n += 1
        """)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        helpers.tick()
        return squares(model, x)

    return Made(loss_fn, lambda: helpers.n)


@program("closure")
def method_caller_that_is_replaced() -> Made:
    state = {"reduce": operator.methodcaller("mean")}

    def before(number: int) -> None:
        if number == 4:
            state["reduce"] = operator.methodcaller("sum")

    return Made(lambda model, x: state["reduce"](mx.square(model(x))), lambda: None, before)


@program("process")
def name_of_a_module_that_comes_later() -> Made:
    config = module("rate = 1.0")

    def before(number: int) -> None:
        if number == 5:
            config.scale = 2.0

    return Made(lambda model, x: squares(model, x) * getattr(config, "scale", config.rate), lambda: None, before)


@program("object")
def count_of_a_set() -> Made:
    class Sizes(set[int]):
        adds = 0

        def add(self, value: int) -> None:
            self.adds += 1
            super().add(value)

    sizes = Sizes()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        sizes.add(len(x))
        return squares(model, x) * (1 + 0.1 * sizes.adds)

    return Made(loss_fn, lambda: sizes.adds)
