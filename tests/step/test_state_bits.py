"""Moments in 8 bits and weights rounded by chance, beside the same codes in NumPy and steps with float32 moments."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.checkpoints import CheckpointError, Checkpoints
from mlx.utils import tree_flatten
from support.cuda import IS_CUDA
from support.helpers import SignedDescent

ROWS, BLOCK = 32, 256
CODES = {"m_codes", "m_scales", "v_codes", "v_scales"}
Array = np.ndarray[Any, np.dtype[np.float32]]


class Weight(nn.Module):
    """One matrix, a row of which is a block, whose gradient is the batch."""

    def __init__(self, dtype: mx.Dtype = mx.float32, value: float | None = None) -> None:
        super().__init__()
        shape = (ROWS, BLOCK)
        self.weight = (mx.random.normal(shape) if value is None else mx.full(shape, value)).astype(dtype)


def product(model: Weight, gradient: mx.array) -> mx.array:
    return (model.weight * gradient).sum()


def net(dtype: mx.Dtype = mx.float32) -> nn.Module:
    mx.random.seed(3)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 4))
    model.set_dtype(dtype)
    return model


def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return mx.square(model(x) - y).mean()


def batch(number: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((16, 32), key=mx.random.key(number))
    return x.astype(dtype), mx.sin(3 * x[:, :4]).astype(dtype)


def bits_of(tree: Any) -> dict[str, Array]:
    """Return copies of the arrays of a tree, by name."""
    return {name: np.array(leaf.astype(mx.float32)) for name, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)}


def assert_equal(left: dict[str, Array], right: dict[str, Array]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


def decoded(entry: dict[str, mx.array]) -> tuple[Array, Array]:
    root = np.array(entry["m_codes"]).astype(np.float32) * np.array(entry["m_scales"])
    m = root * np.abs(root) * np.square(root)
    root = np.array(entry["v_codes"]).astype(np.float32) * np.array(entry["v_scales"])
    return m, np.square(np.square(np.square(root)))


def check_codes(codes: mx.array, scales: mx.array, moment: Array, power: int, largest: int) -> None:
    """Codes are whole numbers beside the roots over the scale, which is the largest root over the largest code."""
    roots = np.abs(moment).astype(np.float64) ** (1 / power)
    scale = roots.max(axis=1, keepdims=True) / largest
    np.testing.assert_allclose(np.array(scales), scale, rtol=1e-6)
    wanted = np.divide(roots, scale, out=np.zeros_like(roots), where=scale > 0)
    found = np.array(codes).astype(np.float64)
    assert np.all((found == 0) | (np.sign(found) == np.sign(moment)))
    assert np.all(np.abs(np.abs(found) - wanted) < 1 + 1e-3)


OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "adam": lambda: optim.Adam(1e-2, betas=[0.8, 0.95]),
    "adam-corrected": lambda: optim.Adam(1e-2, bias_correction=True),
    "adamw": lambda: optim.AdamW(1e-2, weight_decay=0.1),
}


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_and_codes_are_those_of_numpy(name: str, size: float) -> None:
    mx.random.seed(0)
    model, optimizer = Weight(), OPTIMIZERS[name]()
    options: Any = vars(optimizer) | {"weight_decay": getattr(optimizer, "weight_decay", 0.0)}
    step = Step(model, optimizer, product, state_bits=8)
    (b1, b2), eps, rate = options["betas"], options["eps"], 1e-2
    m = v = np.zeros((ROWS, BLOCK), np.float32)
    for t in range(1, 13):
        rows = mx.random.uniform(shape=(ROWS, 1)) ** 4
        gradient = mx.random.normal((ROWS, BLOCK)) * rows * size * (t != 5)
        weight, g = np.array(model.weight), np.array(gradient)
        step(gradient)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * np.square(g)
        corrected = options["bias_correction"]
        first, second = (1 - b1**t, 1 - b2**t) if corrected else (1.0, 1.0)
        weight = weight * (1 - rate * options["weight_decay"])
        weight = weight - rate / first * m / (np.sqrt(v) / second**0.5 + eps)
        np.testing.assert_allclose(np.array(model.weight), weight, rtol=1e-5, atol=1e-6)
        entry = optimizer.state["weight"]
        assert entry.keys() == CODES
        assert (entry["m_codes"].dtype, entry["v_codes"].dtype) == (mx.int8, mx.uint8)
        check_codes(entry["m_codes"], entry["m_scales"], m, 4, 127)
        check_codes(entry["v_codes"], entry["v_scales"], v, 8, 255)
        assert np.all((np.array(entry["v_codes"]) > 0) == (v > 0))  # nothing is divided by a root that has become zero
        m, v = decoded(entry)


def test_gradients_of_many_sizes_in_one_block() -> None:
    model, optimizer = Weight(value=0.0), optim.AdamW(1e-3, weight_decay=0.0)
    step = Step(model, optimizer, product, state_bits=8)
    sizes = mx.array(10.0 ** np.linspace(-2, 3, BLOCK, dtype=np.float32))
    for _ in range(60):
        step(mx.broadcast_to(sizes, (ROWS, BLOCK)))
    moved = np.array(model.weight)  # all weights by about as much, as in float32
    reference, plain = Weight(value=0.0), optim.AdamW(1e-3, weight_decay=0.0)
    for _ in range(60):
        plain.update(reference, {"weight": mx.broadcast_to(sizes, (ROWS, BLOCK))})
    np.testing.assert_allclose(moved.mean(axis=0), np.array(reference.weight).mean(axis=0), rtol=0.1)


def test_a_second_moment_decays_as_it_should_for_ten_thousand_steps() -> None:
    mx.random.seed(1)
    model, optimizer = Weight(), optim.Adam(0.0)
    step = Step(model, optimizer, product, state_bits=8)
    gradient = np.array(mx.random.normal((ROWS, BLOCK)))
    gradient[:, 0] = 10
    gradient[0] /= 10  # a block in which nothing holds the scale up
    step(mx.array(gradient))
    _, begun = decoded(optimizer.state["weight"])
    lasting = np.zeros_like(gradient)
    lasting[1:, 0] = 10
    after = mx.array(lasting)
    for _ in range(10_000):
        step(after)
    m, v = decoded(optimizer.state["weight"])
    share = v / (begun * 0.999**10_000)
    assert share[0].mean() == pytest.approx(1, rel=0.01)
    assert 0.5 < share[1:, 1:].mean() < 2  # codes go down by chance, one more often than another
    assert v.min() > 0
    assert np.abs(m[1:, 1:]).max() < 1e-9


def test_moments_keep_their_mean() -> None:
    model, optimizer = Weight(value=0.0), optim.Adam(1e-3, betas=[0.5, 0.5])
    step = Step(model, optimizer, product, state_bits=8)
    gradient = np.full((ROWS, BLOCK), 0.3, np.float32)
    gradient[:, ::8] = 7
    for _ in range(40):
        step(mx.array(gradient))
    m, v = decoded(optimizer.state["weight"])
    small = np.arange(BLOCK) % 8 > 0
    assert m[:, small].mean() == pytest.approx(0.3, rel=0.02)
    assert v[:, small].mean() == pytest.approx(0.09, rel=0.02)
    assert np.unique(np.array(optimizer.state["weight"]["v_codes"])[:, small]).size > 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 0.1},
        {"max_grad_value": 0.01},
        {"accumulate": 2},
        {"compute_dtype": mx.bfloat16},
        {"ema_decay": 0.9},
        {"nonfinite": "allow"},
        {"compile": False},
        {"replay": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:replay")
def test_options_do_what_they_do_without(options: dict[str, Any]) -> None:
    def losses(bits: Any, updates: int) -> tuple[dict[str, Array], list[float]]:
        schedule = optim.cosine_decay(3e-3, 100)
        step = Step(net(), optim.AdamW(schedule, weight_decay=0.1), loss_fn, state_bits=bits, **options)
        found = [float(step(*batch(number % 4)).loss) for number in range(updates * step.accumulate)]
        return bits_of(step.model.parameters()), found

    first, expected = losses(8, 1)[0], losses(None, 1)[0]  # of zeros, both make the same
    for name, array in first.items():
        rounding = 2e-8 if IS_CUDA else 0  # another kernel there, whose products and sums are joined elsewhere
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=rounding, err_msg=name)
    (_, coded), (_, plain) = losses(8, 60), losses(None, 60)
    assert coded[-1] < 0.9 * coded[0]
    np.testing.assert_allclose(coded, plain, rtol=0.05, atol=0.01)


def test_a_loss_that_reads_values() -> None:
    def reads(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        loss = loss_fn(model, x, y)
        return loss * 2 if loss.item() > 1e9 else loss

    found = []
    for loss in (loss_fn, reads):
        step = Step(net(), optim.AdamW(1e-3), loss, state_bits=8)
        losses = [float(step(*batch(number)).loss) for number in range(4)]
        assert step.stats.mode == ("native" if loss is loss_fn else "called")
        assert step.optimizer.state["layers"][0]["weight"].keys() == CODES
        found.append(losses)
    np.testing.assert_allclose(*found, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 2])
def test_a_step_that_is_skipped_leaves_codes_as_they_were(window: int) -> None:
    step = Step(net(), optim.AdamW(1e-3), loss_fn, state_bits=8, accumulate=window)
    for number in range(4):
        step(*batch(number))
    before = bits_of([step.model.parameters(), step.optimizer.state])
    x, y = batch(9)
    for _ in range(window):
        out = step(x * mx.nan, y)
    assert out.skipped.item()
    assert_equal(bits_of([step.model.parameters(), step.optimizer.state]), before)


def test_numbers_that_are_none_are_not_forgotten() -> None:
    model, optimizer = Weight(), optim.Adam(1e-3)
    step = Step(model, optimizer, product, state_bits=8, nonfinite="allow")
    gradient = np.ones((ROWS, BLOCK), np.float32)
    gradient[3, 5] = np.nan
    step(mx.array(gradient))
    step(mx.ones((ROWS, BLOCK)))
    lost = np.isnan(np.array(model.weight))
    assert lost[3].all()
    assert not lost[:3].any()


def test_state_is_about_a_quarter() -> None:
    def active(bits: Any) -> tuple[int, int]:
        mx.random.seed(0)
        gc.collect()  # what earlier tests have left
        mx.synchronize()
        before = mx.get_active_memory()
        model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))
        step = Step(model, optim.AdamW(1e-3), lambda model, x: model(x).sum(), state_bits=bits)
        for _ in range(3):
            step(mx.ones((4, 512)))
        step.synchronize()
        return step.stats.bytes["optimizer"], mx.get_active_memory() - before

    (plain, held), (coded, held_coded) = active(None), active(8)
    assert coded < 0.27 * plain
    assert held - held_coded == pytest.approx(plain - coded, rel=0.05)


def test_small_and_odd_parameters_keep_float32() -> None:
    model = nn.Sequential(nn.Linear(63, 65), nn.Tanh(), nn.Linear(65, 192))  # 4,095, and 12,480 = 195 blocks of 64
    optimizer = optim.AdamW(1e-3)
    step = Step(model, optimizer, lambda model, x: model(x).sum(), state_bits=8)
    step(mx.ones((2, 63)))
    first, last = (optimizer.state["layers"][at]["weight"] for at in (0, 2))
    assert first.keys() == {"m", "v"}
    assert first["m"].dtype == mx.float32
    assert last["m_codes"].shape == (195, 64)
    assert last["v_scales"].shape == (195, 1)


def save(folder: Path, step: Step) -> None:
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(step, number=1)


def run_on(step: Step, numbers: range, dtype: mx.Dtype = mx.float32) -> list[float]:
    return [float(step(*batch(number, dtype)).loss) for number in numbers]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_resume_is_to_the_bit(tmp_path: Path, dtype: mx.Dtype) -> None:
    def new() -> Step:
        options = {"stochastic_rounding": dtype == mx.bfloat16, "state_bits": 8, "accumulate": 3}
        return Step(net(dtype), optim.AdamW(1e-3), loss_fn, max_grad_norm=1.0, **options)

    whole = new()
    run_on(whole, range(10), dtype)
    save(tmp_path, whole)
    run_on(whole, range(10, 20), dtype)
    resumed = new()
    Checkpoints(tmp_path).restore(resumed)
    run_on(resumed, range(10, 20), dtype)
    trees = [[step.model.parameters(), step.optimizer.state, step.state] for step in (whole, resumed)]
    assert_equal(*map(bits_of, trees))


@pytest.mark.parametrize(("saved", "taken"), [(None, 8), (8, None)])
def test_a_checkpoint_goes_on_in_the_other_form(tmp_path: Path, saved: Any, taken: Any) -> None:
    step = Step(net(), optim.AdamW(1e-3), loss_fn, state_bits=saved)
    run_on(step, range(20))
    save(tmp_path, step)
    other = Step(net(), optim.AdamW(1e-3), loss_fn, state_bits=taken)
    Checkpoints(tmp_path).restore(other)
    before, after = run_on(step, range(20, 40)), run_on(other, range(20, 40))
    entry = other.optimizer.state["layers"][0]["weight"]
    assert entry.keys() == (CODES if taken else {"m", "v"})
    np.testing.assert_allclose(after, before, rtol=0.02, atol=1e-3)


def test_a_state_of_another_size_is_refused(tmp_path: Path) -> None:
    step = Step(nn.Linear(64, 128), optim.AdamW(1e-3), lambda model, x: model(x).sum(), state_bits=8)
    step(mx.ones((2, 64)))
    save(tmp_path, step)
    other = nn.Linear(64, 64)
    with pytest.raises(CheckpointError, match="weight"):
        Checkpoints(tmp_path).restore(Step(other, optim.AdamW(1e-3), lambda model, x: model(x).sum(), state_bits=8))


def test_steps_of_both_forms_take_turns() -> None:
    model, optimizer = net(), optim.AdamW(1e-3)
    steps = [Step(model, optimizer, loss_fn, state_bits=bits) for bits in (8, None)]
    losses = []
    for number, step in zip(range(12), itertools.cycle(steps), strict=False):
        losses.append(float(step(*batch(0)).loss))
        coded = optimizer.state["layers"][0]["weight"].keys() == CODES
        assert coded == (number % 2 == 0)
    assert losses[-1] < losses[0]


def test_a_frozen_parameter_keeps_its_codes() -> None:
    model, optimizer = net(), optim.AdamW(1e-3)
    step = Step(model, optimizer, loss_fn, state_bits=8)
    run_on(step, range(3))
    model.layers[0].freeze()
    before = bits_of(optimizer.state["layers"][0])
    run_on(step, range(3))
    assert_equal(bits_of(optimizer.state["layers"][0]), before)
    model.layers[0].unfreeze()
    run_on(step, range(3))
    assert optimizer.state["layers"][0]["weight"].keys() == CODES
    assert not np.array_equal(bits_of(optimizer.state["layers"][0])["weight.m_codes"], before["weight.m_codes"])


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (lambda: optim.Lion(1e-3), {"state_bits": 8}, "state_bits: expected Adam or AdamW, got Lion"),
        (
            lambda: optim.SGD(1e-3),
            {"stochastic_rounding": True},
            "stochastic_rounding: expected Adam or AdamW, got SGD",
        ),
        (
            lambda: optim.MultiOptimizer(
                [optim.Muon(1e-3), optim.AdamW(1e-3)], [lambda name, weight: weight.ndim == 2]
            ),
            {"state_bits": 8},
            "state_bits: expected Adam or AdamW, got Muon",
        ),
        (lambda: SignedDescent(1e-3), {"state_bits": 8}, "state_bits.*none of MLX's own"),
        (lambda: optim.Adam(1e-3), {"state_bits": 4}, "state_bits: expected 8 or None, got 4"),
        (lambda: optim.Adam(1e-3), {"state_bits": 8, "transform": lambda _, g: g}, "a function transforms"),
        (lambda: optim.Adam(1e-3), {"stochastic_rounding": True}, "parameters in bfloat16, got none"),
        (
            lambda: optim.Adam(1e-3),
            {"stochastic_rounding": True, "compute_dtype": mx.bfloat16},
            "stochastic_rounding: expected false where compute_dtype",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(optimizer: Any, options: dict[str, Any], message: str) -> None:
    model = net()
    before = bits_of(model.parameters())
    with pytest.raises(ValueError, match=message):
        Step(model, optimizer(), loss_fn, **options)(*batch(0))
    assert_equal(bits_of(model.parameters()), before)


def test_several_adams_in_one() -> None:
    optimizer = optim.MultiOptimizer([optim.Adam(1e-3), optim.AdamW(1e-3)], [lambda name, weight: "0" in name])
    step = Step(net(), optimizer, loss_fn, state_bits=8)
    losses = [*run_on(step, range(4)), float(step(*batch(0)).loss)]
    assert losses[-1] < losses[0]
    names = [name for name, _ in tree_flatten(optimizer.state)]
    assert sum(name.endswith("m_codes") for name in names) == 2


@pytest.mark.parametrize("bits", [None, 8])
def test_small_updates_of_bfloat16_add_up(bits: Any) -> None:
    model = Weight(mx.bfloat16, value=1.0)
    step = Step(model, optim.Adam(1e-4, betas=[0.0, 0.0]), product, state_bits=bits, stochastic_rounding=True)
    for _ in range(200):
        step(mx.ones((ROWS, BLOCK), mx.bfloat16))
    weight = np.array(model.weight.astype(mx.float32))
    assert weight.mean() == pytest.approx(1 - 200 * 1e-4, abs=3e-4)  # nearest rounding leaves it at 1
    assert set(np.unique(weight)) <= {1 - step / 256 for step in range(40)}
    assert not step.stats.warnings


@pytest.mark.parametrize("value", [1.0, -1.0, 1.5, 3e-30, 0.0])
def test_a_weight_is_rounded_to_one_of_its_neighbours(value: float) -> None:
    model = Weight(mx.bfloat16, value=value)
    share = 0.3 / 128  # of the distance between neighbours above 1
    for sign in (1, -1):
        model.weight = mx.full((ROWS, BLOCK), value, mx.bfloat16)
        rate = abs(value) * share or 1e-3
        step = Step(model, optim.Adam(rate, betas=[0.0, 0.0], eps=0.0), product, stochastic_rounding=True)
        step(mx.full((ROWS, BLOCK), -float(sign), mx.bfloat16))
        weight = np.array(model.weight.astype(mx.float32)).astype(np.float64)
        wanted = value + sign * rate
        assert len(np.unique(weight)) <= 2
        assert weight.mean() == pytest.approx(wanted, rel=2e-4)


def test_bfloat16_by_chance_trains_as_float32_does() -> None:
    found = {}
    for dtype, chance in ((mx.float32, False), (mx.bfloat16, True), (mx.bfloat16, False)):
        step = Step(net(dtype), optim.AdamW(1e-4), loss_fn, stochastic_rounding=chance)
        for _ in range(150):
            run_on(step, range(2), dtype)
        found[dtype, chance] = float(loss_fn(step.model, *batch(0, dtype)))
    plain = found[mx.float32, False]
    assert abs(found[mx.bfloat16, True] - plain) < abs(found[mx.bfloat16, False] - plain)
