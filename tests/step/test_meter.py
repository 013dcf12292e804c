"""Measurements from values that a step computes anyway: weights that do not move, and faults that last."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step, fast_step
from mlx.utils import tree_flatten
from support.helpers import Row
from support.models import cross_entropy


class Coarse(nn.Module):
    """Weights around 1, where bfloat16 has steps of 1/128, and one that never gets a gradient."""

    def __init__(self, dtype: mx.Dtype) -> None:
        super().__init__()
        self.weight = mx.ones((40, 40), dtype)
        self.unused = mx.ones((40,), dtype)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the mean of squares."""
        return mx.square(self.weight @ x).mean()


def unchanged(dtype: mx.Dtype, optimizer: optim.Optimizer, compute_dtype: mx.Dtype | None = None) -> float | None:
    step = Step(Coarse(dtype), optimizer, lambda model, x: model(x), compute_dtype=compute_dtype)
    assert step.stats.unchanged is None
    for _ in range(3):
        step(mx.ones((40,), dtype))
    return step.stats.unchanged


@pytest.mark.parametrize(
    "make", [lambda rate: optim.AdamW(rate, weight_decay=0.0), lambda rate: optim.SGD(rate, momentum=0.9)]
)
def test_half_precision_weights_that_do_not_move_are_counted(make: object) -> None:
    assert unchanged(mx.bfloat16, make(1e-4)) == 1.0  # type: ignore[operator]
    assert unchanged(mx.bfloat16, make(1e-1)) == 0.0  # type: ignore[operator]
    assert unchanged(mx.float32, make(1e-4)) == 0.0  # type: ignore[operator]
    assert unchanged(mx.bfloat16, make(1e-4), mx.bfloat16) == 0.0  # type: ignore[operator]


def test_a_step_that_is_skipped_is_no_reading() -> None:
    step = Step(Coarse(mx.float32), optim.AdamW(1e-3), lambda model, x: model(x))
    step(mx.ones((40,)))
    step(mx.full((40,), mx.nan))
    assert step.stats.skipped == 1
    assert step.stats.unchanged is None


def told(step: Callable[..., Any], batches: Iterable[Any], steps: int = 300) -> list[str]:
    """Take so many steps and return their warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in itertools.islice(itertools.cycle(batches), steps):
            step(*batch)
    assert all(each.category is RuntimeWarning and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def squares(model: nn.Module, x: mx.array) -> mx.array:
    return mx.square(model(x)).mean()


ONES, SPOILT = mx.ones((4, 8)), mx.full((4, 8), mx.nan)


def linear(**options: Any) -> Step:
    """Make a step on a model of two layers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return Step(model, optim.AdamW(1e-3), squares, **options)


def test_batches_that_are_all_skipped_are_told_once() -> None:
    first, message = told(linear(), [(SPOILT,)], 600)
    assert "the batch of step 1 was skipped, and trains nothing: its loss is NaN, and argument x has" in first
    assert "were all skipped" in message
    assert "model's arrays are finite" in message


def test_the_first_batch_that_is_skipped_is_told_at_once() -> None:
    step = linear()
    (message,) = told(step, [(ONES,), (ONES,), (SPOILT,)], 12)
    assert "the batch of step 3 was skipped" in message
    assert [f"faststep: {each}" for each in step.stats.warnings] == [message]
    assert "its loss is NaN, and argument x has NaN or infinite values" in message
    assert told(linear(), [(ONES,)], 600) == []


class Root(nn.Module):
    """A layer whose gauge has an infinite gradient where it is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gauge = nn.Linear(8, 4), mx.zeros((4,))

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x) * mx.sqrt(mx.abs(self.gauge))


NAMED = "and the gradient of model.gauge is not finite: look for a square root"
SKIPPED: dict[str, Any] = {
    "a gradient": (squares, {}, NAMED),
    "in half precision": (squares, {"compute_dtype": mx.bfloat16}, NAMED),
    "in a window": (squares, {"accumulate": 3}, NAMED),
    "uncompiled": (squares, {"compile": False}, "and a gradient is not finite"),
    "the loss": (lambda model, x: 0 * mx.log(0 * x).sum() + model.layer(x).sum(), {}, "finite: look for log(0)"),
    "a large loss": (lambda model, x: model.layer(1e3 * x).square().mean(), {"max_loss": 9.0}, ", above max_loss"),
    "a large norm": (lambda model, x: 1e25 * model.layer(x).mean(), {}, "the norm of its gradients overflows float32"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_what_was_not_finite_is_named(case: str) -> None:
    loss, options, text = SKIPPED[case]
    (message,) = told(Step(Root(), optim.SGD(1e-3), loss, **options), [(ONES,)], 9)
    assert "the batch of step 1 was skipped" in message
    assert text in message


def test_float16_that_overflows_at_first_is_no_warning() -> None:
    step = linear(compute_dtype=mx.float16)
    step.loss_fn = lambda model, x: 1e3 * squares(model, x)
    assert told(step, [(ONES,)], 30) == []
    assert 0 < step.stats.skipped < 20


def classes(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


def masked(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    mask = y >= 0
    return (nn.losses.cross_entropy(model(x), mx.where(mask, y, 0)) * mask).mean()


def rows(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return mx.square(model.layers[0].weight[y[:, 1:]]).mean()


@pytest.mark.parametrize(
    ("loss", "labels", "text"),
    [
        (classes, [0, 1, 2, 4], "argument y has labels from 0 to 4, and there are 4 classes"),
        (classes, [0, 1, -100, 2], "argument y has labels from -100 to 2, and there are 4 classes"),
        (rows, [[9, 0, 8]], "argument y asks for rows 0 to 8, and there are 8"),
    ],
)
def test_numbers_out_of_range_are_told_before_they_are_used(loss: Any, labels: list[Any], text: str) -> None:
    step = linear()
    step.loss_fn = loss
    before = dict(tree_flatten(step.model.parameters()))
    with pytest.raises(RuntimeWarning, match=text):  # warnings are errors here: nothing is read or written
        step(ONES, mx.array(labels))
    assert all(mx.array_equal(each, before[name]) for name, each in tree_flatten(step.model.parameters()))
    assert text in step.stats.warnings[0]


def test_numbers_out_of_range_of_a_later_batch_are_told() -> None:
    step, good = linear(), (ONES, mx.array([0, 1, 2, 3]))
    step.loss_fn = classes
    (message,) = told(step, [good, (ONES, mx.array([0, 1, -1, 3])), good], 9)  # -1 is the last class to MLX
    assert "argument y of step 2 has labels from -1 to 3, and there are 4 classes" in message
    step.loss_fn = masked
    assert told(step, [good, (ONES, mx.array([0, 1, -100, 3]))], 9) == []


@pytest.mark.parametrize("options", [{}, {"nonfinite": "allow"}, {"nonfinite": "allow", "max_grad_norm": 1.0}])
def test_weights_that_are_no_numbers_are_named(options: dict[str, Any]) -> None:
    step = linear(**options)
    step.model.layers[2].weight = mx.full((4, 8), mx.nan)
    *_, message = told(step, [(ONES,)], 600)
    assert "model.layers.2.weight" in message
    assert ("were all skipped" in message) == (not options)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_that_are_all_zero_are_told_once(accumulate: int) -> None:
    step = linear(accumulate=accumulate)
    step.loss_fn = lambda model, x: (model(x) * x[:, :4]).mean()
    (message,) = told(step, [(mx.zeros((4, 8)),)], 40 * accumulate)
    assert "all gradients have been zero" in message
    assert told(step, [(mx.zeros((4, 8)),)], 300 * accumulate) == []
    alternating = linear()
    alternating.loss_fn = step.loss_fn
    assert told(alternating, [(mx.zeros((4, 8)),)] * 9 + [(ONES,)], 600) == []


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"compile": False}, {"compute_dtype": mx.bfloat16}])
def test_parameters_without_a_gradient_are_named(options: dict[str, Any]) -> None:
    model = Coarse(mx.float32)
    step = Step(model, optim.AdamW(1e-3), lambda model, x: model(x), **options)
    assert told(step, [(mx.ones((40,)),)], 15) == []
    (message,) = told(step, [(mx.ones((40,)),)], 15)
    assert "does not depend on model.unused:" in message
    model.freeze(keys="unused")
    assert told(Step(model, optim.AdamW(1e-3), lambda model, x: model(x)), [(mx.ones((40,)),)]) == []


def test_parameters_that_another_step_trains_are_not_named() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    model.critic = nn.Linear(4, 1)
    actor = Step(model, optim.Adam(1e-3), lambda model, x: mx.square(model(x)).mean())
    critic = Step(model, optim.Adam(1e-3), lambda model, x: mx.square(model.critic(model.layers[0](x))).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(130):
            actor(ONES)
            critic(ONES)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes = nn.Linear(4, 2), nn.Embedding(3, 2)

    def __call__(self, x: mx.array) -> mx.array:
        z = self.encode(x)
        nearest = mx.argmin(mx.square(z[:, None] - self.codes.weight).sum(-1), axis=1)
        mean = mx.stop_gradient(z).mean(axis=0)
        self.codes.weight = mx.stop_gradient(0.9 * self.codes.weight + 0.1 * mean)
        return mx.square(z - mx.stop_gradient(self.codes(nearest))).mean()


@pytest.mark.parametrize("options", [{}, {"compile": False}])
def test_a_codebook_that_the_loss_sets_itself_needs_no_gradient(options: dict[str, Any]) -> None:
    step = Step(Codebook(), optim.Adam(1e-3), lambda model, x: model(x), **options)
    before = step.model.codes.weight
    assert told(step, [(mx.random.normal((8, 4)),)], 200) == []
    assert not mx.array_equal(step.model.codes.weight, before)


def test_a_layer_that_stands_in_the_model_twice_has_its_gradient_in_the_last_place() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer)
    step = Step(model, optim.AdamW(1e-3), lambda model, x: mx.square(model(x)).mean())
    assert told(step, [(mx.ones((2, 4)),)], 200) == []
    assert step.stats.mode == "native"


def test_a_loss_that_depends_on_nothing_is_told_once() -> None:
    step = linear()
    step.loss_fn = lambda model, x: mx.stop_gradient(model(x)).mean()
    (message,) = told(step, [(ONES,)])
    assert "model.layers.0.weight, model.layers.0.bias, model.layers.2.weight, model.layers.2.bias" in message


def test_losses_that_share_the_parameters_out_are_no_reason_to_tell() -> None:
    model, optimizer = Coarse(mx.float32), optim.AdamW(1e-3)
    losses = [lambda model, x: model(x), lambda model, x: mx.square(model.unused - x).mean()]
    turns = itertools.cycle(losses)
    assert told(lambda x: fast_step(model, optimizer, next(turns), x), [(mx.ones((40,)),)]) == []


def test_zero_gradients_are_not_called_too_small() -> None:
    model = nn.Linear(8, 4)
    step = Step(model, optim.SGD(1e-3), lambda model, x: (model(x) * 0).mean())
    (message,) = told(step, [(ONES,)], 600)
    assert "all gradients have been zero" in message


def test_updates_that_round_away_are_told_once() -> None:
    def coarse(optimizer: optim.Optimizer, dtype: mx.Dtype = mx.bfloat16, **options: Any) -> list[str]:
        model = Coarse(dtype)
        model.freeze(keys="unused")
        step = Step(model, optimizer, lambda model, x: model(x), **options)
        return told(step, [(mx.ones((40,), dtype),)])

    for optimizer in (optim.AdamW(1e-4, weight_decay=0.0), optim.Lion(1e-4), optim.Muon(1e-4)):
        (message,) = coarse(optimizer)
        assert "rounded to nothing" in message
        assert "compute_dtype" in message
    warm = optim.linear_schedule(0.0, 1e-2, 10_000)
    assert coarse(optim.AdamW(warm)) == coarse(optim.AdamW(0.0)) == coarse(optim.AdamW(1e-1)) == []
    assert coarse(optim.AdamW(optim.cosine_decay(1e-2, 100, 1e-6))) == []
    assert coarse(optim.AdamW(1e-4), mx.float32) == coarse(optim.AdamW(1e-4), compute_dtype=mx.bfloat16) == []


SMALL: dict[str, Callable[[float], optim.Optimizer]] = {
    "SGD": optim.SGD,
    "momentum": lambda rate: optim.SGD(rate, momentum=0.9),
    "RMSprop": optim.RMSprop,
    "Adagrad": optim.Adagrad,
    "AdaDelta": lambda rate: optim.AdaDelta(1e-3 * rate),
    "Adafactor": lambda rate: optim.Adafactor(rate, relative_step=False, scale_parameter=False),
    "Adam": optim.Adam,
}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("optimizer", SMALL)
def test_an_update_of_any_rule_that_moves_no_weight_is_told_once(optimizer: str, dtype: mx.Dtype) -> None:
    def train(rate: float) -> list[str]:
        model = Coarse(dtype)
        model.freeze(keys="unused")
        step = Step(model, SMALL[optimizer](rate), lambda model, x: model(x))
        return told(step, [(mx.ones((40,), dtype),)])

    (message,) = train(1e-6 if dtype == mx.bfloat16 else 1e-12)
    assert "rounded to nothing" in message
    assert ("compute_dtype" in message) == (dtype == mx.bfloat16)
    assert train(0.0) == []


@pytest.mark.parametrize("model", ["frozen", "lora", "tied", "conv", "bf16"])
def test_a_healthy_model_is_told_nothing(model: str) -> None:
    row = Row(model, "adamw")
    assert told(Step(*row.new(), row.case.loss_fn), row.case.batches(3)) == []


def test_rows_that_nobody_reads_and_dead_units_are_healthy() -> None:
    model = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    model.layers[1].bias = mx.where(mx.arange(32) < 24, -100.0, 0.0)  # most units are dead
    model.set_dtype(mx.bfloat16)
    batch = mx.array([[1, 2, 3]]), mx.array([[0, 1, 2]])
    assert told(Step(model, optim.AdamW(1e-2), cross_entropy), [batch]) == []
