"""fast_step() keeps one step for each model, optimizer, loss and options, and keeps none of them alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep import Step, fast_step
from faststep._step._user_optimizer import StepCache
from support.helpers import Pair, Row, assert_close, plain_step, snapshot
from support.models import cross_entropy
from support.places import Child

ROW = Row("mlp", "adamw")


def counted(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Show how often Python runs the loss; one that prints is called at each step."""
    print("called")
    return cross_entropy(model, x, y)


def calls(capsys: pytest.CaptureFixture[str]) -> int:
    """Return how often it has run since the last time."""
    return capsys.readouterr().out.count("called")


def traced(pair: Pair) -> int:
    """Return how many traces have been made for a model and an optimizer."""
    cache = StepCache.at(*pair)
    return sum(program.core.stats()[5] for _, _, program, _ in cache.programs.values()) if cache is not None else 0


@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
@pytest.mark.parametrize("calls", [1, 3])
def test_a_model_that_is_dropped_is_freed(optimizer: str, calls: int) -> None:
    row = Row("conv", optimizer)
    model, opt = row.new()
    for batch in row.case.batches(calls):
        fast_step(model, opt, lambda model, x, y: cross_entropy(model, x, y), *batch, max_grad_norm=1.0)
    gone: list[weakref.ref[object]] = [weakref.ref(model), weakref.ref(opt), weakref.ref(model.head)]
    del model, opt
    gc.collect()
    assert [each() for each in gone] == [None, None, None]


def test_a_step_that_is_dropped_is_freed() -> None:
    model, optimizer = ROW.new()
    step = Step(model, optimizer, cross_entropy)
    step(*ROW.case.batches(1)[0])
    gone: list[weakref.ref[object]] = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer, step
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.filterwarnings("ignore:faststep. 16 models in turn:RuntimeWarning")
def test_memory_comes_back_from_models_that_were_dropped() -> None:
    def train() -> None:
        model, optimizer = ROW.new()
        for batch in ROW.case.batches(2):
            fast_step(model, optimizer, cross_entropy, *batch)

    def settled() -> int:
        gc.collect()
        mx.synchronize()
        return mx.get_active_memory()

    train()
    before = settled()
    for _ in range(20):
        train()
    assert settled() - before < 16 << 10


def test_a_function_that_stays_is_traced_once(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ROW.new()
    for batch in ROW.case.batches(4):
        fast_step(*pair, counted, *batch)
    assert (traced(pair), calls(capsys)) == (1, 4)


def test_an_inline_lambda_is_not_a_new_loss(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ROW.new()
    for batch in ROW.case.batches(4):
        fast_step(*pair, lambda model, x, y: counted(model, x, y), *batch)
    assert (traced(pair), calls(capsys)) == (1, 4)


def scaled(factor: float, default: int = 0) -> Callable[..., mx.array]:
    """Return a loss with a closure and a default."""

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array, offset: int = default) -> mx.array:
        return factor * counted(model, x, y) + offset

    return loss_fn


def test_closures_and_defaults_of_equal_contents_are_one_loss(capsys: pytest.CaptureFixture[str]) -> None:
    reference, ours = ROW.new(), ROW.new()
    choices = [(2.0, 0), (2.0, 0), (3.0, 0), (2.0, 1), (3.0, 0), (2.0, 0)]
    losses = []
    for choice, batch in zip(choices, ROW.case.batches(6), strict=True):
        losses.append(float(fast_step(*ours, scaled(*choice), *batch)))
    wanted = [
        float(plain_step(*reference, scaled(*choice))(*batch)[0])
        for choice, batch in zip(choices, ROW.case.batches(6), strict=True)
    ]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    calls(capsys)
    made = traced(ours)
    for choice, batch in zip(choices, ROW.case.batches(6), strict=True):
        fast_step(*ours, scaled(*choice), *batch)
    assert (traced(ours), calls(capsys)) == (made, 6)


def test_a_variable_of_the_closure_that_changes_is_seen() -> None:
    reference, ours = ROW.new(), ROW.new()
    factor = 1.0

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return factor * cross_entropy(model, x, y)

    plain = plain_step(*reference, loss_fn)
    for number, batch in enumerate(ROW.case.batches(4)):
        factor = 1.0 if number < 2 else 5.0
        np.testing.assert_allclose(fast_step(*ours, loss_fn, *batch), plain(*batch)[0], rtol=1e-5)


def test_an_object_that_is_called_and_a_bound_method_are_losses(capsys: pytest.CaptureFixture[str]) -> None:
    class Loss:
        def __call__(self, model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
            return counted(model, x, y)

        def method(self, model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
            return 2 * counted(model, x, y)

    loss = Loss()
    pair = ROW.new()
    for batch in ROW.case.batches(3):
        one = float(fast_step(*pair, loss, *batch))
        two = float(fast_step(*pair, loss.method, *batch))
        assert one > 0
        assert two > 0
        assert (traced(pair), calls(capsys)) == (2, 2)


def test_losses_and_options_in_turns_train_one_model() -> None:
    def other(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return 0.5 * cross_entropy(model, x, y) + mx.square(model.layers[0].weight).mean()

    reference, ours = ROW.new(), ROW.new()
    calls = [(cross_entropy, None), (other, None), (cross_entropy, 0.05), (other, 0.05)] * 2
    for (loss_fn, norm), batch in zip(calls, ROW.case.batches(8), strict=True):
        loss, _ = plain_step(*reference, loss_fn, norm)(*batch)
        np.testing.assert_allclose(fast_step(*ours, loss_fn, *batch, max_grad_norm=norm), loss, rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)


def test_a_new_optimizer_for_the_same_model() -> None:
    reference, ours = ROW.new(), ROW.new()
    for optimizer in ("adamw", "sgd-momentum", "user-adam", "adamw"):
        pairs = [(model, Row("mlp", optimizer).new()[1]) for model in (reference[0], ours[0])]
        plain = plain_step(*pairs[0], cross_entropy)
        for batch in ROW.case.batches(2):
            np.testing.assert_allclose(fast_step(*pairs[1], cross_entropy, *batch), plain(*batch)[0], rtol=1e-5)
    assert_close(snapshot(ours[0]), snapshot(reference[0]), 2e-5)


EXIT = """
import mlx.core as mx
from support.helpers import Row
from faststep import Step, fast_step

row = Row("conv", OPTIMIZER)
model, optimizer = row.new()
batches = row.case.batches(3)
step = Step(*row.new(), row.case.loss_fn)
for batch in batches:
    out = step(*batch)
    loss = fast_step(model, optimizer, lambda model, x, y: row.case.loss_fn(model, x, y), *batch)
print("done")
"""


@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
def test_the_interpreter_exits_cleanly_with_steps_alive(child: Child, optimizer: str) -> None:
    done = child(f"OPTIMIZER = {optimizer!r}\n" + EXIT)
    assert done.stdout == "done\n"
    assert done.stderr == ""
