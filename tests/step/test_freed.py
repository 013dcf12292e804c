"""What a step keeps alive: nothing that only the step refers to, whatever the loss does and reaches."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step, fast_step
from faststep._step._user_optimizer import StepCache
from mlx.utils import tree_flatten, tree_map

BATCH = mx.ones((2, 4))


class Sgd:
    """An optimizer of no class of MLX's, which may lead to anything."""

    trainer: Trainer

    def update(self, model: nn.Module, gradients: dict[str, Any]) -> None:
        model.update(tree_map(lambda p, g: p - 0.1 * g, model.parameters(), gradients))


class Trainer:
    """A step that hangs at the object whose method is its loss."""

    def __init__(self, kind: str, optimizer: Any, way: str = "step") -> None:
        self.model, self.optimizer, self.kind = nn.Linear(4, 1), optimizer, kind
        self.calls, self.total, self.log, self.last = 0, 0.0, [0], {"loss": mx.array(0.0)}
        self.seen, self.pair = {self}, (0, mx.array(0.0))
        self.model.calls = 0
        self.compiled = mx.compile(lambda x: x * self.scale())
        if isinstance(optimizer, Sgd):
            optimizer.trainer = self
        if way == "step":
            self.step: Callable[[mx.array], Any] = Step(self.model, optimizer, getattr(self, kind))
        else:
            self.step = lambda x: fast_step(self.model, optimizer, lambda model, x: getattr(self, kind)(model, x), x)

    def scale(self) -> float:
        return 2.0 + 0 * len(self.kind)

    def nothing(self, model: nn.Module, x: mx.array) -> mx.array:
        return model(x).square().mean()

    def counts(self, model: nn.Module, x: mx.array) -> mx.array:
        self.calls += 1
        return self.nothing(model, x)

    def counts_on_the_model(self, model: Any, x: mx.array) -> mx.array:
        model.calls += 1
        return self.nothing(model, x)

    def adds(self, model: nn.Module, x: mx.array) -> mx.array:
        self.total += 0.5
        return self.nothing(model, x)

    def appends(self, model: nn.Module, x: mx.array) -> mx.array:
        self.log.append(self.calls)
        return self.nothing(model, x)

    def stores(self, model: nn.Module, x: mx.array) -> mx.array:
        loss = self.nothing(model, x)
        self.last = {"loss": loss}
        self.pair = (self.pair[0] + 1, self.pair[1] + loss)
        return loss

    def reads_a_set(self, model: nn.Module, x: mx.array) -> mx.array:
        return self.nothing(model, x) * len(self.seen)

    def calls_a_compiled_one(self, model: nn.Module, x: mx.array) -> mx.array:
        return self.nothing(model, self.compiled(x))

    def by_a_made_name(self, model: nn.Module, x: mx.array) -> mx.array:
        return getattr(self, f"{'noth'}ing")(model, x)  # type: ignore[no-any-return]

    def another_each_time(self, model: nn.Module, x: mx.array) -> mx.array:
        return self.nothing(model, x) * (1.0 + self.calls)


LOSSES = [name for name, it in vars(Trainer).items() if callable(it) and name not in ("__init__", "scale")]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "native": lambda: optim.Adam(1e-3),
    "own": lambda: type("Own", (optim.SGD,), {})(1e-3),
    "object": Sgd,
}


@pytest.mark.filterwarnings("ignore:faststep. (options|this step):RuntimeWarning")  # an optimizer that leads to all
@pytest.mark.parametrize("calls", [0, 1, 2, 12])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("way", ["step", "fast_step"])
def test_a_trainer_at_which_its_step_hangs_is_freed(way: str, kind: str, optimizer: str, calls: int) -> None:
    trainer = Trainer(kind, OPTIMIZERS[optimizer](), way)
    for number in range(calls):
        if kind == "another_each_time":
            trainer.calls = number
        out = trainer.step(BATCH)
        mx.eval(out if way == "fast_step" else out.loss)
    gone = [weakref.ref(each) for each in (trainer, trainer.model, trainer.optimizer)]
    del trainer
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_a_model_is_freed_beside_an_optimizer_that_is_kept() -> None:
    model, kept = nn.Linear(4, 1), optim.Adam(1e-3)
    mx.eval(fast_step(model, kept, lambda model, x: model(x).square().mean(), BATCH))
    gone = weakref.ref(model)
    del model
    assert gone() is None


@pytest.mark.parametrize("way", ["step", "fast_step"])
def test_a_model_with_a_compiled_function_that_leads_back_is_freed(way: str) -> None:
    trainer = Trainer("nothing", optim.Adam(1e-3), way)
    trainer.model.compiled = trainer.compiled
    trainer.model.tags = {trainer}
    out = trainer.step(BATCH)
    mx.eval(out if way == "fast_step" else out.loss)
    gone = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_kept_is_in_no_tree_no_copy_and_no_file(optimizer: str) -> None:
    model, kept = nn.Linear(4, 1), OPTIMIZERS[optimizer]()

    def names() -> list[set[str]]:
        found = [{name for name, _ in tree_flatten(vars(each))} for each in (model, kept)]
        return [{name for name in each if not name.startswith("_state")} for each in found]

    def train(model: nn.Module, optimizer: Any) -> None:
        mx.eval(fast_step(model, optimizer, lambda model, x: model(x).square().mean(), BATCH))

    before = names()
    train(model, kept)
    assert names() == before
    assert optimizer != "object" or not vars(kept)
    for copied in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        if optimizer == "own" and copied not in (copy.copy, copy.deepcopy):
            continue  # no module has its class
        pair = copied(model), copied(kept)
        train(*pair)
        assert StepCache.at(*pair) is not StepCache.at(model, kept)
        gone = weakref.ref(StepCache.at(*pair))
        del pair
        gc.collect()
        assert gone() is None


def test_a_step_is_used_on_after_any_number_of_collections() -> None:
    trainer, plain = Trainer("counts", optim.SGD(0.1)), nn.Linear(4, 1)
    plain.update(trainer.model.parameters())
    optimizer, grad = optim.SGD(0.1), nn.value_and_grad(plain, lambda model, x: model(x).square().mean())
    for _ in range(12):
        loss = trainer.step(BATCH).loss
        gc.collect()
        expected, grads = grad(plain, BATCH)
        optimizer.update(plain, grads)
        assert mx.allclose(loss, expected)
    assert trainer.calls == 12


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compile": mx.compile,
    "checkpoint": mx.checkpoint,
    "custom_function": mx.custom_function,
    "vmap": lambda function: mx.vmap(lambda x: function(x[None])[0]),
    "value_and_grad": lambda function: lambda x: mx.value_and_grad(lambda x: function(x).sum())(x)[1],
}


@pytest.mark.filterwarnings("ignore:faststep. all gradients have been zero")  # once the model is what the teacher is
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_teacher_that_is_replaced_is_freed_at_the_next_call(wrapper: str, steps: int) -> None:
    holder = SimpleNamespace()

    def renew() -> weakref.ref[nn.Module]:
        teacher = nn.Linear(4, 1)
        holder.teacher = WRAPPERS[wrapper](lambda x: teacher(x))
        return weakref.ref(teacher)

    gone = [renew()]
    model = nn.Linear(4, 1)
    all_steps = [
        Step(model, optim.SGD(0.1), lambda model, x: (model(x) - holder.teacher(x).mean()).square().mean())
        for _ in range(steps)
    ]
    for _ in range(6):
        for _ in range(3):
            for step in all_steps:
                mx.eval(step(BATCH).loss)
        gone.append(renew())
        for step in [*all_steps, *all_steps]:
            mx.eval(step(BATCH).loss)
        gc.collect()
        first = wrapper != "checkpoint"  # else the trace that stands for all has the function it was made for
        assert [each() is None for each in gone] == [first, *[True] * (len(gone) - 2), False]


def test_classes_that_a_function_makes_are_freed() -> None:
    def run() -> weakref.ref[type]:
        table = mx.ones((4, 4))

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.numbers = nn.Linear(4, 1), iter([1, 2])

            def __call__(self, x: mx.array) -> mx.array:
                return self.layer(x @ table)  # type: ignore[no-any-return]

        step = Step(Net(), optim.SGD(0.1), lambda model, x: model(x).square().mean())
        for _ in range(3):
            mx.eval(step(BATCH).loss)
        return weakref.ref(Net)

    gone = [run() for _ in range(3)]
    gc.collect()
    assert [each() for each in gone] == [None] * 3
