"""What a loss reaches by names made as it runs, by functions under other names, and in objects of subclasses."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step
from support import names
from support.names import Change, Net, called_by_address, programs, setting


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RATE_OF_FOCAL", "RATE_OF_HUBER"):
        monkeypatch.setattr(names, name, 1.0)
    for held in (names.OfClass, names.module):
        monkeypatch.setattr(held, "a", 1.0, raising=False)
    monkeypatch.setattr(names.module, "focal_loss", names.focal_loss, raising=False)
    monkeypatch.setitem(sys.modules, names.module.__name__, names.module)


@pytest.mark.parametrize("name", programs())
def test_a_change_is_seen(name: str) -> None:
    factor, change = programs()[name]
    loss_fn = names.loss_of(factor)
    step, x = Step(nn.Linear(4, 1), optim.SGD(0.0), loss_fn), mx.ones((2, 4))
    for number in range(8):
        if number in (3, 5, 6):
            change(float(number))
        wanted = loss_fn(step.model, x).item()
        assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)
    assert step.stats.mode == "native"


class Closed:
    """An object at whose attributes nobody can look: what reaches it is not traced."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("closed")


class Rates:
    """Numbers and functions of whose names the code has a part, beside what it does not ask for."""

    __slots__ = ("__dict__", "first_slot")
    first_of_class, shut = 1.0, Closed()

    def __init__(self) -> None:
        self.first_rate = self.first_slot = 1.0
        self.closed, self.which, self.last = Closed(), "first", "_rate"

    def first_of_method(self) -> float:
        return self.first_rate


rates = Rates()
of_module = types.ModuleType("rates_of_a_test")
of_module.first_rate, of_module.closed = 1.0, Closed()  # type: ignore[attr-defined]
MADE: dict[str, tuple[Any, str, Callable[[], float]]] = {
    "a constant": (rates, "first_rate", lambda: getattr(rates, "first_rate")),  # noqa: B009
    "another value": (rates, "first_rate", lambda: getattr(rates, "first_rate", 2.0)),
    "formatted": (rates, "first_rate", lambda: getattr(rates, f"{rates.which}_rate")),
    "formatted in the middle": (rates, "first_rate", lambda: getattr(rates, f"fi{rates.which[2:]}_ra{'te':<2}", None)),
    "joined": (rates, "first_rate", lambda: getattr(rates, "first" + rates.last)),
    "joined twice": (rates, "first_rate", lambda: getattr(rates, rates.which + "_" + rates.last[1:])),
    "of a call": (rates, "first_rate", lambda: getattr(next(iter([rates])), "first_" + "rate")),
    "within another": (rates, "first_rate", lambda: getattr(rates, getattr(rates, "which") + "_rate", None)),  # noqa: B009
    "of a slot": (rates, "first_slot", lambda: getattr(rates, f"{rates.which}_slot")),
    "of a class": (Rates, "first_of_class", lambda: getattr(Rates, f"{rates.which}_of_class")),
    "of its class": (Rates, "first_of_class", lambda: getattr(rates, f"{rates.which}_of_class")),
    "what a method reads": (rates, "first_rate", lambda: getattr(rates, f"{rates.which}_of_method")()),
    "of a module": (of_module, "first_rate", lambda: getattr(of_module, f"{rates.which}_rate")),
    "two": (rates, "first_rate", lambda: getattr(rates, f"{rates.which}_slot") * getattr(rates, f"{rates.which}_rate")),
}


@pytest.mark.parametrize("name", MADE)
def test_what_getattr_is_asked_for_is_seen_and_nothing_else_is_opened(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, factor = MADE[name]
    monkeypatch.setattr(owner, attribute, 1.0)
    loss_fn = names.loss_of(factor)
    step, x = Step(nn.Linear(4, 1), optim.SGD(0.0), loss_fn), mx.ones((2, 4))
    for number in range(8):
        if number in (3, 5, 6):
            setattr(owner, attribute, float(number))
        wanted = loss_fn(step.model, x).item()
        assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)
    assert step.stats.mode == "native", step.stats.reason


def test_what_getattr_is_asked_for_by_a_name_from_elsewhere_may_be_anything() -> None:
    step = Step(nn.Linear(4, 1), optim.SGD(0.0), names.loss_of(lambda: getattr(rates, rates.which + rates.last)))
    with pytest.warns(RuntimeWarning, match="its attributes are hidden"):
        step(mx.ones((2, 4)))
    assert step.stats.mode != "native"


def test_what_a_method_reads_that_a_user_has_put_into_a_class_of_mlx_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, scales = nn.Linear.__call__, [1.0]
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: linear(self, x) * scales[0])
    step, x = Step(nn.Linear(4, 1), optim.SGD(0.0), lambda model, x: model(x).square().mean()), mx.ones((2, 4))
    for number in range(6):
        scales[0] = 1.0 + number // 3
        assert step(x).loss.item() == pytest.approx(step.model(x).square().mean().item(), rel=1e-5)
    assert step.stats.mode == "native"


def test_a_function_that_nobody_can_find_is_told_with_its_line() -> None:
    step = Step(nn.Linear(4, 1), optim.SGD(0.0), names.loss_of(called_by_address))
    step(mx.ones((2, 4)))
    with pytest.warns(RuntimeWarning, match=r"reads what by_address reads \(.*names.py:\d+\) as it is called"):
        step(mx.ones((2, 4)))


def test_attributes_of_containers_in_a_model_are_seen() -> None:
    step, x = Step(Net(), optim.SGD(0.0), lambda model, x: model(x).square().mean()), mx.ones((2, 4))
    changes: list[Change] = [lambda _: None, setting(step.model.table, "default"), setting(step.model.items_)]
    for change in changes:
        change(3.0)
        for _ in range(2):
            assert step(x).loss.item() == pytest.approx(step.model(x).square().mean().item(), rel=1e-5)
    assert step.stats.mode == "native"


ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a dict of a subclass": (names.Missing, lambda held: held.a),
    "a list of a subclass": (names.Items, lambda held: held.a),
    "a tuple of a subclass": (names.Pair, lambda held: held.a),
    "an ordered dict": (names.Ordered, lambda held: getattr(held, names.A)),
    "a class": (lambda: names.OfClass, lambda held: held.a),
    "a class, by a name that is made": (lambda: names.OfClass, lambda held: getattr(held, names.A)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_an_argument_has_beside_its_items_is_seen(name: str) -> None:
    make, read = ARGUMENTS[name]
    held = make()
    held.a = 1.0

    def loss_fn(model: nn.Module, x: mx.array, held: Any) -> mx.array:
        return model(x).square().mean() * read(held)

    step, x = Step(nn.Linear(4, 1), optim.SGD(0.0), loss_fn), mx.ones((2, 4))
    for number in range(6):
        held.a = 1.0 + number // 3
        assert step(x, held).loss.item() == pytest.approx(loss_fn(step.model, x, held).item(), rel=1e-5)
    assert step.stats.mode == "native"


def test_what_a_dict_among_the_arguments_makes_of_a_missing_key_is_seen() -> None:
    rates = [1.0]
    made = collections.defaultdict(lambda: rates[0])

    def loss_fn(model: nn.Module, x: mx.array, made: Any) -> mx.array:
        return model(x).square().mean() * made.default_factory()

    step, x = Step(nn.Linear(4, 1), optim.SGD(0.0), loss_fn), mx.ones((2, 4))
    for number in range(6):
        rates[0] = 1.0 + number // 3
        assert step(x, made).loss.item() == pytest.approx(loss_fn(step.model, x, made).item(), rel=1e-5)
