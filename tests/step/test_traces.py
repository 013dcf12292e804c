"""Traces: why they are made, which are kept, what they cost; and the caches of memory behind them."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from support.helpers import Row, Tree, assert_close, assert_same, flat, plain_step, snapshot, summed
from support.models import WIDTH, cross_entropy
from support.places import Child

ROW = Row("mlp", "adamw")
STATM = Path("/proc/self/statm")


def rows(count: int) -> mx.array:
    """Draw float32 [count, width], equal each time."""
    return mx.array(np.random.default_rng(count).standard_normal((count, WIDTH), dtype=np.float32))


@pytest.fixture
def calls() -> list[int]:
    return []


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def causes(step: Step) -> list[str]:
    return [trace.cause for trace in step.stats.traces]


def test_the_one_used_least_recently_goes_first(calls: list[int]) -> None:
    step = Step(*ROW.new(), summed, max_traces=3)
    for length in (1, 2, 3, 1, 4, 1, 3, 2, 1):
        before = step.stats.traced
        step(rows(length))
        calls += [length] * (step.stats.traced - before)
    assert calls == [1, 2, 3, 4, 2]
    assert (len(step.stats.traces), step.stats.traced) == (3, 5)


def test_a_window_needs_two_traces_and_does_with_them() -> None:
    with pytest.raises(ValueError, match="max_traces: expected a number from 2 on, got 1"):
        Step(*ROW.new(), summed, max_traces=1)
    few, many_kept = (Step(*ROW.new(), summed, max_traces=most, accumulate=2) for most in (2, 64))
    for length in (1, 1, 2, 2, 1, 2):
        few(rows(length))
        many_kept(rows(length))
    assert few.stats.updates == 3
    assert (len(few.stats.traces), len(many_kept.stats.traces)) == (2, 3)
    assert_close(snapshot(few.model, few.optimizer), snapshot(many_kept.model, many_kept.optimizer), 0)


def test_traces_that_were_dropped_are_made_again_and_right() -> None:
    reference, ours = ROW.new(), ROW.new()
    plain, step = plain_step(*reference, summed), Step(*ours, summed, max_traces=2)
    for length in (1, 2, 3, 1, 2, 3, 2, 1):
        np.testing.assert_allclose(step(rows(length)).loss, plain(rows(length))[0], rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert step.stats.traced == 7


LENGTHS = """
import gc, json, warnings
import mlx.core as mx
from faststep import Step
from support.helpers import Row, summed
from support.models import WIDTH

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

warnings.simplefilter("ignore")
step = Step(*Row("mlp", "adamw").new(), summed, max_traces=MAX_TRACES)
sizes = []
for length in range(400, 0, -1):  # downwards, so that no batch needs more memory than those before
    for _ in range(2):  # from the 33rd on the first call with a length runs uncompiled
        step(mx.zeros((length, WIDTH)))
    if length in (301, 1):
        step.synchronize()
        mx.clear_cache()
        gc.collect()
        sizes.append(resident())
print(json.dumps([sizes[1] - sizes[0], len(step.stats.traces), step.stats.traced]))
"""


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="CUDA keeps the kernels of a trace for others")
@pytest.mark.skipif(not STATM.exists(), reason="reads the resident size from /proc")
def test_what_is_dropped_gives_its_memory_back(child: Child) -> None:
    grown = {}
    for most in (8, 1000):
        grown[most], kept, traced = json.loads(child(f"MAX_TRACES = {most}\n" + LENGTHS).stdout)
        assert (kept, traced) == {8: (8, 401), 1000: (401, 401)}[most]
    assert grown[8] < 4 << 20
    assert grown[1000] > 16 << 20


def many(step: Step, lengths: range) -> list[warnings.WarningMessage]:
    """Take a step with each length, and return what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in lengths:
            step(rows(length))
    return caught


@pytest.mark.parametrize("max_traces", [8, 64])
def test_many_traces_are_warned_of_once(max_traces: int) -> None:
    step = Step(*ROW.new(), summed, max_traces=max_traces)
    assert many(step, range(1, 17)) == []
    (warning,) = many(step, range(17, 30))
    assert warning.category is RuntimeWarning
    assert "17 traces" in str(warning.message)
    assert "argument x: Float32 [16, 16] -> Float32 [17, 16]" in str(warning.message)
    assert warning.filename == __file__
    assert many(step, range(30, 60)) == []
    assert step.stats.traced == 32  # what comes once runs uncompiled from there on


@pytest.mark.parametrize("accumulate", [2, 16, 17, 18])
def test_many_traces_of_windows_are_warned_of_once(accumulate: int) -> None:
    step = Step(*ROW.new(), summed, accumulate=accumulate)
    assert len(many(step, range(1, 41))) == 1


def test_fast_step_warns_at_the_line_of_the_call() -> None:
    pair = ROW.new()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in range(1, 20):
            fast_step(*pair, summed, rows(length))
    assert [warning.filename for warning in caught] == [__file__]


def changed(step: Step, tag: str) -> set[str]:
    """Take a step, whether or not it raises a warning, and return the names of what it changed."""
    pair = step.model, step.optimizer
    before = snapshot(*pair)
    with contextlib.suppress(RuntimeWarning):
        step(rows(8), tag)
    return {name for name, value in snapshot(*pair).items() if not np.array_equal(value, before[name])}


def test_a_warning_that_is_an_error_leaves_a_whole_step_or_none() -> None:
    step = Step(*Row("conv", "adamw").new(), summed)
    for number in range(16):
        step(rows(8), str(number))
    with_warning, without = changed(step, "16"), changed(step, "17")
    assert with_warning in (set(), without)
    assert step.stats.steps == (18 if with_warning else 17)
    assert step.stats.updates == int(step.optimizer.state["step"])


def labelled(model: nn.Module, x: mx.array, y: mx.array, *, smooth: float = 0.0) -> mx.array:
    return nn.losses.cross_entropy(model(x), y, label_smoothing=smooth, reduction="mean")


def test_every_trace_says_what_made_it_necessary() -> None:
    model, optimizer = ROW.new()
    step = Step(model, optimizer, labelled)
    (x, y), wanted = ROW.case.batches(1)[0], []

    def take(cause: str, *batch: mx.array, **named: Any) -> None:
        step(*batch, **named)
        wanted.append(cause)

    take("first call", x, y)
    take("argument x: Float32 [8, 16] -> Float32 [4, 16]", x[:4], y[:4])
    take("argument x: Float32 [4, 16] -> Float16 [8, 16]", x.astype(mx.float16), y)
    take("argument y: Int32 [8] -> Uint32 [8]", x.astype(mx.float16), y.astype(mx.uint32))
    take(
        "arguments: a static value or the structure has changed", x.astype(mx.float16), y.astype(mx.uint32), smooth=0.1
    )
    model.eval()
    step(x, y)  # in which nothing depends on the mode
    model.scale = 2.0
    take("model: a mode, a number, or an array's shape has changed", x, y)
    optimizer.betas = [0.5, 0.6]  # type: ignore[attr-defined]
    take("optimizer: an option has changed", x, y)
    step.loss_fn = lambda model, x, y: 2 * cross_entropy(model, x, y)
    take("the loss: it computes something else", x, y)
    assert causes(step) == wanted
    step.gradients(x, y)
    step.accumulate = 2
    step(x, y)
    step(x, y)
    assert causes(step)[-3:] == ["first call of gradients()", "first batch of a window", "first update by a window"]
    assert step.stats.traced == len(step.stats.traces) == len(wanted) + 3


def test_a_window_says_nothing_of_the_optimizer_when_it_is_opened() -> None:
    step = Step(*ROW.new(), summed)
    step(rows(8))
    step.accumulate = 2
    step(rows(8))
    step(rows(8))
    step.accumulate = 1
    step(rows(8))
    assert not [cause for cause in causes(step) if cause.startswith("optimizer")]


def test_traces_are_counted_though_they_are_gone(quiet: None) -> None:
    step = Step(*ROW.new(), summed, max_traces=4)
    for length in (*range(1, 21), 20, 19):
        step(rows(length))
    stats = step.stats
    assert (stats.traced, len(stats.traces), stats.steps) == (20, 4, 22)
    assert causes(step)[-1] == "argument x: Float32 [19, 16] -> Float32 [20, 16]"
    assert all(trace.seconds > 0 for trace in stats.traces)


def test_an_error_in_a_trace_makes_none() -> None:
    step = Step(*ROW.new(), summed)
    step(rows(8))
    with pytest.raises(ValueError, match=r"shape|dimension"):
        step(mx.zeros((8, WIDTH + 1)))
    assert (len(step.stats.traces), step.stats.traced) == (1, 1)


@pytest.mark.parametrize("options", [{}, {"in_flight": 0}, {"accumulate": 2}, {"nonfinite": "raise"}], ids=str)
def test_the_seconds_add_up_to_the_time_of_the_calls(options: dict[str, Any]) -> None:
    step = Step(*ROW.new(), summed, **options)
    assert set(step.stats.seconds.values()) == {0.0}
    spent, x = 0.0, rows(2048)
    for _ in range(12):
        started = time.perf_counter()
        step(x)
        spent += time.perf_counter() - started
    seconds = step.stats.seconds
    assert seconds.keys() == {"look", "call", "trace", "build", "evaluate", "wait", "show"}
    assert all(value > 0 for name, value in seconds.items() if name != "wait")
    parts = sum(value for name, value in seconds.items() if name != "trace")
    assert parts <= spent
    assert seconds["trace"] == pytest.approx(sum({trace.seconds for trace in step.stats.traces}))


def size_of(tree: Tree) -> int:
    return sum(array.nbytes for array in flat(tree).values())


@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
@pytest.mark.parametrize("name", ["conv", "lora", "bf16", "tied"])
def test_the_bytes_are_those_of_the_arrays(name: str, optimizer: str) -> None:
    row = Row(name, optimizer)
    model, opt = row.new()
    step = Step(model, opt, row.case.loss_fn, compute_dtype=mx.bfloat16, ema_decay=0.9, accumulate=2)
    assert step.stats.bytes == {"parameters": 0, "optimizer": 0, "step": 0, "model": 0, "replay": 0}
    for batch in row.case.batches(3):
        step(*batch)
    sizes, trained = step.stats.bytes, model.trainable_parameters()
    others = {path: array for path, array in flat(model.parameters()).items() if path not in flat(trained)}
    assert sizes["parameters"] == size_of(trained)
    assert sizes["optimizer"] == size_of(opt.state)
    assert sizes["model"] == sum(array.nbytes for array in others.values())
    kept = {name: value for name, value in step.state.items() if name in ("masters", "ema", "window", "weight")}
    assert sizes["step"] == size_of(kept)


@pytest.fixture
def cache() -> Iterator[None]:
    """Begin with an empty cache, and put its limit back."""
    mx.clear_cache()
    limit = mx.set_cache_limit(1 << 30)
    yield
    mx.set_cache_limit(limit)
    mx.clear_cache()


def cached(**options: Any) -> list[int]:
    """Return the bytes of freed memory that MLX keeps after each of seven steps."""
    step = Step(*ROW.new(), summed, in_flight=0, **options)
    x = rows(2048)
    sizes = []
    for _ in range(7):
        step(x)
        sizes.append(mx.get_cache_memory())
    return sizes


ON_CPU = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU frees memory later")


@ON_CPU
def test_freed_memory_is_kept_up_to_its_limit(cache: None) -> None:
    assert min(cached()) > 400_000  # the hidden layer's activations take 256 KB
    mx.clear_cache()
    assert max(cached(cache_limit=100_000)) <= 100_000
    assert mx.set_cache_limit(1 << 30) == 100_000


def test_no_limit_is_set_where_none_is_given(cache: None) -> None:
    mx.set_cache_limit(12_345_678)
    Step(*ROW.new(), summed)
    assert mx.set_cache_limit(1 << 30) == 12_345_678


@ON_CPU
def test_freed_memory_is_given_back_every_so_many_steps(cache: None) -> None:
    small = [size < 50_000 for size in cached(clear_cache_every=3)]
    assert small == [False, False, True, False, False, True, False]
    assert max(cached(clear_cache_every=1)) < 50_000


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("accumulate", 0),
    ("accumulate", -2),
    ("in_flight", -1),
    ("max_traces", 0),
    ("max_traces", -1),
    ("cache_limit", -1),
    ("clear_cache_every", -1),
    ("check_ranks", -1),
    ("sync", "scatter"),
    ("ema_decay", 1.0),
    ("ema_decay", -0.1),
    ("ema_decay", float("nan")),
    ("max_grad_norm", -1.0),
    ("max_grad_norm", float("nan")),
    ("max_grad_value", -1.0),
    ("max_grad_value", float("nan")),
    ("max_loss", float("nan")),
    ("compute_dtype", mx.int8),
]
OF_WRONG_TYPE: list[tuple[str, Any]] = [
    ("accumulate", 1.5),
    ("accumulate", "2"),
    ("accumulate", None),
    ("in_flight", 1.5),
    ("max_traces", "8"),
    ("cache_limit", "1G"),
    ("cache_limit", 1.5),
    ("clear_cache_every", None),
    ("check_ranks", 1.5),
    ("ema_decay", "0.9"),
    ("max_grad_norm", "1"),
    ("max_grad_value", [1.0]),
    ("max_loss", "1"),
    ("weighted", "yes"),
    ("compile", "no"),
    ("nonfinite", None),
    ("compute_dtype", "bfloat16"),
]
ONLY_OF_A_STEP = ("cache_limit",)


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_an_option_out_of_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected"):
        Step(*ROW.new(), summed, **{name: value})
    if name not in ONLY_OF_A_STEP:
        with pytest.raises(ValueError, match=f"{name}: expected"):
            fast_step(*ROW.new(), summed, rows(8), **{name: value})


@pytest.mark.parametrize(("name", "value"), OF_WRONG_TYPE)
def test_an_option_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        Step(*ROW.new(), summed, **{name: value})
    if name not in ONLY_OF_A_STEP:
        with pytest.raises(TypeError, match=name):
            fast_step(*ROW.new(), summed, rows(8), **{name: value})


def test_a_change_of_accumulate_is_checked() -> None:
    step = Step(*ROW.new(), summed)
    with pytest.raises(ValueError, match="accumulate: expected"):
        step.accumulate = 0
    assert step.accumulate == 1
    step(rows(8))


def test_an_option_that_was_refused_has_changed_nothing(cache: None) -> None:
    mx.set_cache_limit(12_345_678)
    with pytest.raises(ValueError, match="accumulate"):
        Step(*ROW.new(), summed, cache_limit=1000, accumulate=0)
    with pytest.raises(ValueError, match="max_traces"):
        Step(*ROW.new(), summed, cache_limit=1000, max_traces=0)
    assert mx.set_cache_limit(1 << 30) == 12_345_678


@pytest.mark.parametrize("limit", [float("inf"), 1e39])
def test_no_limit_makes_an_infinite_loss_good(limit: float) -> None:
    def plus(model: nn.Module, x: mx.array, more: mx.array) -> mx.array:
        return summed(model, x) + more

    step = Step(*ROW.new(), plus, max_loss=limit)
    assert step(rows(8), mx.array(float("inf"))).skipped
    assert not step(rows(8), mx.array(1.0)).skipped


@pytest.mark.filterwarnings("ignore:faststep. 17 traces have been made")
def test_kinds_of_batches_that_come_once_are_not_traced_without_end() -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x) - 1).mean()

    def run(fast: bool) -> tuple[list[float], Step | None]:
        mx.random.seed(3)
        model, optimizer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), optim.Adam(1e-2)
        step = Step(model, optimizer, loss_fn) if fast else None
        take = plain_step(model, optimizer, loss_fn)
        lengths = [*range(1, 61), *[60] * 3, *[3] * 3, *range(61, 80)]
        batches = [mx.random.normal((length, 4)) for length in lengths]
        return [(step(x).loss if step else take(x)[0]).item() for x in batches], step

    losses, step = run(fast=True)
    assert_same(losses, run(fast=False)[0], 1e-6)
    assert step is not None
    assert len(step.stats.traces) == 33  # that of the length that came back, too
    step(mx.ones((60, 4)))
    assert step.stats.mode != "plain"
    step(mx.ones((99, 4)))
    assert (step.stats.mode, step.stats.reason) == (
        "plain",
        "many graphs have been made, and this is the first call with its own",
    )
    step(mx.ones((99, 4)))
    assert step.stats.mode == "called"
    assert "the first calls with arguments of this form" in step.stats.reason


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["adafactor", "text", "several", "schedule", "host schedule"])
def test_options_that_are_set_before_each_step_are_not_traced_without_end(kind: str, accumulate: int) -> None:
    def run(fast: bool) -> tuple[list[float], Tree, Step | None]:
        mx.random.seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        adafactor, sgd = optim.Adafactor(1e-2, relative_step=False), optim.SGD(1e-2, momentum=0.5)
        several = optim.MultiOptimizer([adafactor, sgd], [lambda path, value: value.ndim == 2])
        optimizer = {"adafactor": adafactor, "several": several}.get(kind, sgd)
        step = Step(model, optimizer, summed, accumulate=accumulate) if fast else None
        take = plain_step(model, optimizer, summed, accumulate=accumulate)
        losses = []
        for number in range(40):
            adafactor.eps = (1e-8 * (1 + min(number, 30)), 1e-3)
            sgd.phase = f"phase {min(number, 30)}"
            if kind == "schedule" and number <= 30:
                sgd._maybe_schedule("learning_rate", optim.cosine_decay(1e-2, 100 + number))
            if kind == "host schedule" and number <= 30:
                sgd._maybe_schedule("learning_rate", lambda step, rate=1e-2 / (number + 1): mx.array(rate))
            x = mx.random.normal((6, 4))
            losses.append((step(x).loss if step else take(x)[0]).item())
            if step and number == 29:
                assert (step.stats.mode, step.stats.reason) == (
                    ("plain", "options of the optimizer have changed again and again")
                    if kind == "schedule"
                    else ("native", None)
                )
        return losses, model.parameters(), step

    (losses, parameters, step), (wanted, reference, _) = run(fast=True), run(fast=False)
    assert_same(losses, wanted, 1e-5)
    got, expected = flat(parameters), flat(reference)
    assert_close(
        {path: np.array(got[path]) for path in got}, {path: np.array(expected[path]) for path in expected}, 1e-5
    )
    assert step is not None
    assert step.stats.mode == "native"
    assert step.stats.traced < 45
    if kind != "schedule":
        assert len([trace for trace in step.stats.traces if "option" in trace.cause]) <= 5


@pytest.mark.parametrize("accumulate", [1, 2])
def test_numbers_of_the_model_that_are_set_before_each_step_are_inputs(accumulate: int) -> None:
    """A temperature, a rate of dropout, a counter; the mode, the depth and what is frozen change now and then."""

    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.dropout, self.temperature = (
                nn.Linear(4, 8),
                nn.Linear(8, 2),
                nn.Dropout(0.1),
                1.0,
            )
            self.depth, self.seen, self.inner = 1, 0, [nn.Linear(8, 8)]

        def __call__(self, x: mx.array) -> mx.array:
            hidden = self.dropout(mx.softmax(self.first(x) / self.temperature, axis=-1))
            for _ in range(self.depth):
                hidden = self.inner[0](hidden)
            return self.last(hidden * mx.random.bernoulli(self.temperature))

    def run(fast: bool) -> tuple[list[float], dict[str, np.ndarray], Step | None]:
        mx.random.seed(3)
        model, optimizer = Annealed(), optim.AdamW(1e-2)
        step = Step(model, optimizer, summed, accumulate=accumulate) if fast else None
        take = plain_step(model, optimizer, summed, accumulate=accumulate)
        losses = []
        for number in range(60):
            model.temperature = 1 - 0.02 * min(number, 30)
            model.dropout._p_1 = 0.9 - 0.005 * number
            model.seen, model.depth = number, 1 + number // 50
            model.train(number % 7 != 6)
            if number == 32:
                model.inner[0].freeze()
            if number == 46:
                model.unfreeze()
            x = mx.random.normal((6, 4))
            losses.append((step(x).loss if step else take(x)[0]).item())
        return losses, {path: np.array(array) for path, array in flat(model.parameters()).items()}, step

    wanted, reference, _ = run(fast=False)
    losses, parameters, step = run(fast=True)
    assert_same(losses, wanted, 1e-5, on_gpu=1e-4)
    assert_close(parameters, reference, 1e-5)
    assert step is not None
    assert step.stats.mode == "called"
    assert len(step.stats.traces) <= 12


def test_texts_of_the_model_that_are_set_before_each_step_make_no_trace_by_themselves() -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x)).mean() * len(model.label)

    def run(take: Any, model: nn.Module) -> list[float]:
        losses = []
        for number in range(40):
            model.label = f"label {number}"
            loss = take(mx.ones((2, 3)))
            losses.append((loss.loss if isinstance(take, Step) else loss[0]).item())
        return losses

    ours, reference = nn.Linear(3, 1), nn.Linear(3, 1)
    reference.update(ours.parameters())
    wanted = run(plain_step(reference, optim.Adam(1e-2), loss_fn), reference)
    step = Step(ours, optim.Adam(1e-2), loss_fn)
    assert_same(run(step, ours), wanted, 1e-5, on_gpu=1e-4)
    assert step.stats.mode == "called"
    assert len(step.stats.traces) == 2  # the text has become longer once
