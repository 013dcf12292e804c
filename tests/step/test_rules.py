"""Optimizers whose tensors keep a state of their own shape, and several in one: beside plain MLX, beside a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import (
    OPTIMIZERS,
    Row,
    Tree,
    assert_close,
    compiled_step,
    flat,
    is_matrix,
    plain_step,
    run,
    save_and_load,
    snapshot,
    taking,
)
from support.models import cross_entropy

Pair = tuple[nn.Module, optim.Optimizer]
RULES = ["adafactor", "adafactor-fixed", "muon", "multi", "multi-flat"]
EVERY_MODEL = [Row(model, rule) for model in ("conv", "nested", "lstm", "lora", "frozen", "gpt") for rule in RULES]
HALVES = [Row(model, rule) for model in ("bf16", "mixed") for rule in RULES]


def is_bias(path: str, array: mx.array) -> bool:
    """Choose biases."""
    return array.ndim == 1 and "bias" in path


class TracedAdafactor(optim.Adafactor):
    """The same under another name, which no rule is native for."""


class TracedMuon(optim.Muon):
    """The same under another name."""


def of_children(multi: optim.Optimizer) -> list[optim.Optimizer]:
    """Return what a MultiOptimizer delegates to."""
    assert isinstance(multi, optim.MultiOptimizer)
    children: list[optim.Optimizer] = multi.optimizers
    return children


def beside(change: Callable[[Pair], object], optimizer: str = "multi", model: str = "mlp") -> Step:
    """Take two steps, make a change and take two more, ours beside the reference; then compare everything."""
    row = Row(model, optimizer)
    reference, ours = row.new(), row.new()
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    for number, batch in enumerate(row.case.batches(5)):
        if number == 2:
            for pair in (reference, ours):
                change(pair)
        mx.random.seed(number)
        loss, _ = take(*batch)
        mx.random.seed(number)
        np.testing.assert_allclose(step(*batch).loss, loss, rtol=2e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    return step


@pytest.mark.usefixtures("own_quantized_products")
@pytest.mark.parametrize("row", [*EVERY_MODEL, *HALVES], ids=str)
def test_every_bit_is_that_of_the_compiled_reference(row: Row) -> None:
    reference, ours = row.new(), row.new()
    wanted = run(row, reference, compiled_step(*reference, row.case.loss_fn), 4)
    on_gpu = 1e-3 if row in HALVES else 2e-6
    assert_close(run(row, ours, taking(Step(*ours, row.case.loss_fn)), 4), wanted, 0, on_gpu=on_gpu)


@pytest.mark.parametrize("row", EVERY_MODEL, ids=str)
def test_the_way_is_native(row: Row) -> None:
    pair = row.new()
    step = Step(*pair, row.case.loss_fn)
    for batch in row.case.batches(3):
        step(*batch)
    assert step.stats.mode == "native"


def test_tensors_of_one_rule_share_buffers() -> None:
    model, optimizer = (
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]),
        optim.MultiOptimizer([optim.Muon(1e-2), optim.SGD(1e-2, momentum=0.9)], [is_matrix]),
    )
    step = Step(model, optimizer, cross_entropy)
    step(mx.ones((2, 8)), mx.array([1, 2]))
    held = optimizer.state["states"]
    weight, bias = held[0]["layers"][0]["weight"]["v"], held[1]["layers"][0]["bias"]["v"]
    assert weight.shape == (8, 8)
    assert bias.shape == (8,)
    # step and rate of both, six matrices, six biases
    assert step.stats.bytes["optimizer"] == 2 * (8 + 4) + 6 * 4 * (64 + 8)


class Twins(nn.Module):
    """Several tensors of each shape: of one axis, of two and of three, tall and wide, and scalars."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mixes = [nn.Conv1d(width, width, 3, padding=1) for _ in range(2)]
        self.layers = [nn.Linear(width, width) for _ in range(3)]
        self.wide = [nn.Linear(width, 2 * width, bias=False) for _ in range(2)]
        self.back = [nn.Linear(2 * width, width, bias=False) for _ in range(2)]
        self.gains = [mx.array(1.0), mx.array(0.5)]

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 4, width] to logits [batch, width]."""
        for mix in self.mixes:
            x = nn.relu(mix(x))
        x = x.mean(axis=1)
        for layer in self.layers:
            x = x + nn.gelu(layer(x))
        for wide, back, gain in zip(self.wide, self.back, self.gains, strict=True):
            x = x + gain * back(nn.relu(wide(x)))
        return x


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", [*RULES, "adafactor-warmup", "muon-momentum"])
def test_tensors_of_one_shape_are_updated_as_each_alone(optimizer: str, dtype: mx.Dtype) -> None:
    pairs: list[Pair] = []
    for way in (compiled_step, Step):
        mx.random.seed(0)
        model, rule = Twins(), OPTIMIZERS[optimizer]()
        model.set_dtype(dtype)
        step = way(model, rule, cross_entropy)
        for number in range(6):
            if number == 3 and not isinstance(rule, optim.MultiOptimizer):  # whose `init` MLX has not for fewer tensors
                model.layers[0].freeze()
                step = way(model, rule, cross_entropy) if way is compiled_step else step
            x = mx.random.normal((3, 4, 8), key=mx.random.key(number)).astype(dtype)
            step(x, mx.array([0, 1, 2]))
        pairs.append((model, rule))
    assert_close(snapshot(*pairs[1]), snapshot(*pairs[0]), 0)


def another_filter(pair: Pair) -> None:
    assert isinstance(pair[1], optim.MultiOptimizer)
    pair[1].filters[0] = is_bias
    pair[1].init(pair[0].trainable_parameters())


def another_child(pair: Pair) -> None:
    children = of_children(pair[1])
    children[1] = optim.AdamW(5e-3)
    children[1].init(pair[0].trainable_parameters())


def swapped(pair: Pair) -> None:
    for child in of_children(pair[1]):
        child.state = copy.deepcopy(child.state)


def edited(pair: Pair) -> None:
    of_children(pair[1])[0].state["layers"][0]["weight"] = {"v": mx.full((32, 16), 0.1)}
    of_children(pair[1])[1].state["layers"][1]["bias"]["m"] = mx.full((4,), 0.1)


CHANGES: dict[str, Callable[[Pair], object]] = {
    "rate": lambda pair: setattr(pair[1], "learning_rate", 0.05),
    "rate-of-one": lambda pair: setattr(of_children(pair[1])[0], "learning_rate", 0.05),
    "option-of-one": lambda pair: setattr(of_children(pair[1])[1], "betas", [0.5, 0.6]),
    "iterations": lambda pair: setattr(of_children(pair[1])[0], "ns_steps", 2),
    "filter": another_filter,
    "child": another_child,
    "states": swapped,
    "part-of-state": edited,
    "step-of-one": lambda pair: of_children(pair[1])[1].state.update(step=mx.array(0, mx.uint64)),
    "freeze": lambda pair: pair[0].layers[0].freeze(),
    "freeze-all-of-one": lambda pair: pair[0].freeze(keys=["weight"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_among_several_is_seen(change: str) -> None:
    assert beside(CHANGES[change]).stats.mode == "native"


@pytest.mark.parametrize(
    ("optimizer", "name", "value"),
    [
        ("muon", "momentum", 0.5),
        ("muon", "nesterov", False),
        ("muon", "learning_rate", 0.05),
        ("adafactor", "weight_decay", 0.1),
        ("adafactor", "scale_parameter", False),
        ("adafactor", "clip_threshold", 0.1),
        ("adafactor-fixed", "learning_rate", 0.05),
        ("adafactor-fixed", "relative_step", True),
        ("adafactor-fixed", "beta_1", None),
    ],
)
def test_an_option_is_seen(optimizer: str, name: str, value: Tree) -> None:
    step = beside(lambda pair: setattr(pair[1], name, value), optimizer)
    assert step.stats.mode == "native"


def test_the_dicts_of_each_stay_current() -> None:
    reference, ours = Row("mlp", "multi").new(), Row("mlp", "multi").new()
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    batches = Row("mlp", "multi").case.batches(5)
    take(*batches[0])
    step(*batches[0])
    held, wanted = [[child.state for child in of_children(pair[1])] for pair in (ours, reference)]
    part, wanted_part = [states[0]["layers"][0]["weight"] for states in (held, wanted)]
    for batch in batches[1:]:
        take(*batch)
        step(*batch)
        for got, other in ((held, wanted), (part, wanted_part)):
            ours_now, theirs = flat(got), flat(other)
            assert ours_now.keys() == theirs.keys()
            for name, value in theirs.items():
                np.testing.assert_allclose(ours_now[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert [child.state for child in of_children(ours[1])] == held


def test_one_of_several_trains_another_model_too() -> None:
    def take(pair: Pair, make: Callable[..., Callable[..., object]]) -> dict[str, np.ndarray]:
        model, multi = pair
        child = of_children(multi)[1]
        other = nn.Linear(16, 4)
        other.update({"weight": mx.ones((4, 16)) / 8, "bias": mx.zeros((4,))})
        multi.init(model.trainable_parameters())
        child.init(other.trainable_parameters())
        both, alone = make(model, multi, cross_entropy), make(other, child, cross_entropy)
        for number, batch in enumerate(Row("mlp", "multi").case.batches(6)):
            (alone if number in (2, 3) else both)(*batch)
        return snapshot(*pair) | {"other." + name: np.array(a) for name, a in flat(other.parameters()).items()}

    got, wanted = take(Row("mlp", "multi").new(), Step), take(Row("mlp", "multi").new(), plain_step)
    assert_close(got, wanted, 2e-5)


@pytest.mark.parametrize("optimizer", RULES)
def test_a_run_goes_on_from_files(optimizer: str, tmp_path: Path) -> None:
    row = Row("mlp", optimizer)
    reference, ours = row.new(), row.new()
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    batches = row.case.batches(6)
    for batch in batches[:3]:
        take(*batch)
        step(*batch)
    ours[0].save_weights(str(tmp_path / "model.safetensors"))
    state = save_and_load(ours[1].state, str(tmp_path / "optimizer.safetensors"))
    resumed = row.new()
    resumed[0].load_weights(str(tmp_path / "model.safetensors"))
    resumed[1].state = state
    again = Step(*resumed, cross_entropy)
    for batch in batches[3:]:
        np.testing.assert_allclose(again(*batch).loss, take(*batch)[0], rtol=2e-5)
    assert_close(snapshot(*resumed), snapshot(*reference), 2e-5)
    assert again.stats.mode == "native"


TWINS: dict[str, tuple[Callable[[], optim.Optimizer], Callable[[], optim.Optimizer]]] = {
    "adafactor": (lambda: optim.Adafactor(beta_1=0.9), lambda: TracedAdafactor(beta_1=0.9)),
    "muon": (lambda: optim.Muon(1e-2), lambda: TracedMuon(1e-2)),
    "multi": (
        lambda: optim.MultiOptimizer([optim.Muon(1e-2), optim.AdamW(1e-2)], [is_matrix]),
        lambda: optim.MultiOptimizer([TracedMuon(1e-2), optim.AdamW(1e-2)], [is_matrix]),
    ),
}


@pytest.mark.parametrize("optimizer", TWINS)
@pytest.mark.parametrize("model", ["mlp", "bf16"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_windows_masters_and_average_are_those_of_a_trace(optimizer: str, model: str, dtype: mx.Dtype) -> None:
    row = Row(model, "adamw")
    taken = []
    for make in TWINS[optimizer]:
        pair = row.new()[0], make()
        step = Step(*pair, cross_entropy, accumulate=2, ema_decay=0.9, compute_dtype=dtype, max_grad_norm=1.0)
        for batch in row.case.batches(9):
            step(*batch)
        step.flush()
        taken.append((step.stats.mode, snapshot(*pair), {n: np.array(a) for n, a in flat(step.state).items()}))
    (way, state, kept), (other, wanted, wanted_kept) = taken
    assert (way, other) == ("native", "native")
    assert_close(state, wanted, 1e-2 if model == "bf16" else 2e-6)
    assert_close(kept, wanted_kept, 1e-3)
    assert [a.dtype for a in state.values()] == [a.dtype for a in wanted.values()]


@pytest.mark.parametrize("optimizer", RULES)
def test_a_bad_step_leaves_no_trace(optimizer: str) -> None:
    row = Row("mlp", optimizer)
    pair = row.new()
    step, batches = Step(*pair, cross_entropy, max_grad_norm=1.0), row.case.batches(3)
    step(*batches[0])
    before = snapshot(*pair)
    assert step(batches[1][0] * float("nan"), batches[1][1]).skipped
    assert_close(snapshot(*pair), before, 0)
    assert not step(*batches[2]).skipped


def test_one_in_another_is_native() -> None:
    def nested() -> optim.Optimizer:
        inner = optim.MultiOptimizer([optim.Lion(1e-3), optim.Adam(1e-2)], [is_bias])
        return optim.MultiOptimizer([optim.Muon(1e-2), inner], [is_matrix])

    row = Row("nested", "adamw")
    reference, ours = (row.new()[0], nested()), (row.new()[0], nested())
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    for batch in row.case.batches(3):
        take(*batch)
        step(*batch)
    assert step.stats.mode == "native"
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)


class Empty(nn.Module):
    """A layer, and a parameter that has no element yet."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.none = nn.Linear(8, 4), mx.zeros(shape)

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x) + self.none.sum()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "adamw"])
def test_a_parameter_of_size_zero(optimizer: str, shape: tuple[int, ...]) -> None:
    # on CUDA the plain loop divides by zero for Muon
    there = mx.cpu if optimizer == "muon" and mx.cuda.is_available() else mx.default_device()
    ends = []
    for fast in (False, True):
        with mx.stream(mx.default_device() if fast else there):
            mx.random.seed(1)
            model, rule = Empty(shape), OPTIMIZERS[optimizer]()
            step = Step(model, rule, square) if fast else plain_step(model, rule, square)
            for number in range(3):
                step(mx.random.normal((4, 8), key=mx.random.key(number)))
            ends.append(snapshot(model, rule))
    assert_close(ends[1], ends[0], 1e-5)


def square(model: nn.Module, x: mx.array) -> mx.array:
    return mx.square(model(x)).mean()
