"""Mixed precision: the loss in another dtype, the update in float32, beside the same written out in plain MLX."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from mlx.utils import tree_flatten, tree_map
from support.helpers import Row, Tree, assert_close, assert_same, copy_tree, flat, plain_step, snapshot, to_numpy
from support.mixed import DTYPES, MixedLoop, compare, masters, pairs
from support.models import CLASSES, MLP, cross_entropy

OPTIMIZERS = ["adamw", "sgd-momentum", "lion", "user"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("shown", "compute"),
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ],
)
def test_steps_are_those_of_the_loop(
    shown: str, compute: str, optimizer: str, norm: float | None, accumulate: int
) -> None:
    reference, ours, batches = pairs("mlp", optimizer, shown)
    loop = MixedLoop(*reference, cross_entropy, DTYPES[compute], norm)
    step = Step(*ours, cross_entropy, compute_dtype=DTYPES[compute], max_grad_norm=norm, accumulate=accumulate)
    for first in range(0, (1 if norm else 3) * accumulate, accumulate):
        window = batches[first : first + accumulate]
        loss = loop(*window)
        out = [step(*batch) for batch in window][-1]
        assert out.updated
        assert not out.skipped
        assert_same(out.loss, loss, 1e-6, on_gpu=1e-3)
    compare(step, ours, loop, 1e-6 if norm else 0)
    if norm is None:  # one update comes before the first call that may be left out
        assert step.stats.mode == Row("mlp", optimizer).way


@pytest.mark.parametrize(
    ("shown", "compute"), [("bfloat16", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16")]
)
@pytest.mark.parametrize("optimizer", ["adamw", "user"])
def test_a_model_in_half_precision_may_be_computed_in_another_dtype(optimizer: str, shown: str, compute: str) -> None:
    reference, ours, batches = pairs("mlp", optimizer, shown)
    loop = MixedLoop(*reference, cross_entropy, DTYPES[compute])
    step = Step(*ours, cross_entropy, compute_dtype=DTYPES[compute])
    for batch in batches[:3]:
        assert_same(step(*batch).loss, loop(batch), on_gpu=1e-3)
    compare(step, ours, loop)


@pytest.mark.parametrize("optimizer", ["adamw", "user"])
@pytest.mark.parametrize(
    ("name", "shown"), [("nested", "float32"), ("nested", "bfloat16"), ("mixed", "float32"), ("tied", "bfloat16")]
)
def test_tensors_that_share_a_buffer(name: str, shown: str, optimizer: str) -> None:
    reference, ours, batches = pairs(name, optimizer, shown)
    loss_fn = Row(name, optimizer).case.loss_fn
    loop, step = MixedLoop(*reference, loss_fn, mx.bfloat16), Step(*ours, loss_fn, compute_dtype=mx.bfloat16)
    for batch in batches[:3]:
        assert_same(step(*batch).loss, loop(batch), on_gpu=1e-3)
    compare(step, ours, loop)


@pytest.mark.parametrize("shown", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "user"])
def test_tensors_with_buffers_of_their_own(optimizer: str, shown: str) -> None:
    _, ours, _ = pairs("mlp", optimizer, shown)
    _, reference, _ = pairs("mlp", optimizer, shown)
    for model, _ in (ours, reference):
        mx.random.seed(1)
        model.layers = MLP(512).layers  # 512 x 1024 elements: 1 MiB in half precision
        model.set_dtype(DTYPES[shown])
    x, y = mx.random.normal((4, 512)), mx.array([0, 1, 2, 3])
    loop, step = (
        MixedLoop(*reference, cross_entropy, mx.bfloat16),
        Step(*ours, cross_entropy, compute_dtype=mx.bfloat16),
    )
    for _ in range(2):
        np.testing.assert_array_equal(step(x, y).loss, loop((x, y)))
    compare(step, ours, loop)


@pytest.mark.parametrize("optimizer", ["adamw", "user"])
@pytest.mark.parametrize("shown", ["float32", "bfloat16"])
def test_buffers_stay_float32_and_are_the_loops(shown: str, optimizer: str) -> None:
    reference, ours, batches = pairs("conv", optimizer, shown)
    loop = MixedLoop(*reference, cross_entropy, mx.bfloat16)
    step = Step(*ours, cross_entropy, compute_dtype=mx.bfloat16)
    for seed, batch in enumerate(batches[:3]):
        mx.random.seed(seed)
        loss = loop(batch)
        mx.random.seed(seed)
        np.testing.assert_allclose(step(*batch).loss, loss, rtol=1e-6)
    compare(step, ours, loop)
    assert ours[0].norm.running_mean.dtype == ours[0].norm.running_var.dtype == mx.float32
    assert mx.abs(ours[0].norm.running_mean).sum() > 0


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_a_step_that_is_not_compiled_is_the_loop(compute: str) -> None:
    reference, ours, batches = pairs("conv", "adamw", "bfloat16" if compute == "bfloat16" else "float32")
    loop = MixedLoop(*reference, cross_entropy, DTYPES[compute])
    step = Step(*ours, cross_entropy, compute_dtype=DTYPES[compute], compile=False)
    for seed, batch in enumerate(batches[:3]):
        mx.random.seed(seed)
        loss = loop(batch)
        mx.random.seed(seed)
        assert_same(step(*batch).loss, loss, 1e-6, on_gpu=1e-3)
    compare(step, ours, loop)
    assert step.stats.mode == "plain"


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "user-adam", "multi"])
def test_the_optimizers_state_is_float32_under_its_own_names(optimizer: str) -> None:
    reference, ours, batches = pairs("mlp", optimizer, "bfloat16")
    reference[0].set_dtype(mx.float32)
    reference[1].init(reference[0].trainable_parameters())
    step = Step(*ours, cross_entropy, compute_dtype=mx.bfloat16)
    for batch in batches[:2]:
        step(*batch)
    wanted = {name: (array.dtype, array.shape) for name, array in flat(reference[1].state).items()}
    assert {name: (array.dtype, array.shape) for name, array in flat(ours[1].state).items()} == wanted
    assert {array.dtype for array in flat(ours[0].parameters()).values()} == {mx.bfloat16}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "user"])
def test_moments_in_half_precision_become_float32(optimizer: str) -> None:
    reference, ours, batches = pairs("mlp", optimizer, "bfloat16")
    plain, first = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    for batch in batches[:2]:
        plain(*batch)
        first(*batch)
    ours[0].update(copy_tree(reference[0].parameters()))
    halves = [name for name, array in flat(ours[1].state).items() if array.dtype == mx.bfloat16]
    ours[1].state = copy_tree(reference[1].state)
    reference[1].state = tree_map(lambda a: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a, reference[1].state)
    loop, step = (
        MixedLoop(*reference, cross_entropy, mx.bfloat16),
        Step(*ours, cross_entropy, compute_dtype=mx.bfloat16),
    )
    for batch in batches[2:5]:
        loop(batch)
        step(*batch)
    compare(step, ours, loop, 1e-5)
    assert halves
    assert {flat(ours[1].state)[name].dtype for name in halves} == {mx.float32}


def pull(model: nn.Module, x: mx.array) -> mx.array:
    """Return a loss whose gradient is the same at every weight."""
    return mx.sum(model(x))


def pulled(shown: mx.Dtype, compute: mx.Dtype | None) -> tuple[mx.array, Step]:
    """Return a weight of 1.0 after 200 steps of AdamW at 1e-4."""
    model = nn.Linear(4, 4, bias=False)
    model.weight = mx.ones((4, 4), shown)
    step = Step(model, optim.AdamW(1e-4), pull, compute_dtype=compute)
    for _ in range(200):
        step(mx.ones((2, 4), shown))
    assert model.weight.dtype == shown
    return model.weight, step


def test_small_updates_of_a_weight_in_half_precision_are_not_lost() -> None:
    exact, _ = pulled(mx.float32, None)
    assert (exact < 0.985).all()
    with pytest.warns(RuntimeWarning, match="updates have been rounded to nothing"):
        stuck, _ = pulled(mx.bfloat16, None)
    np.testing.assert_array_equal(to_numpy(stuck), 1.0)
    weight, step = pulled(mx.bfloat16, mx.bfloat16)
    np.testing.assert_allclose(masters(step)["weight"], exact, rtol=1e-6)
    np.testing.assert_array_equal(to_numpy(weight), to_numpy(exact.astype(mx.bfloat16)))


@pytest.mark.parametrize("shown", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "user"])
def test_weights_that_are_loaded_become_the_masters(optimizer: str, shown: str) -> None:
    reference, ours, batches = pairs("nested", optimizer, shown)
    loop = MixedLoop(*reference, cross_entropy, mx.bfloat16)
    step = Step(*ours, cross_entropy, compute_dtype=mx.bfloat16)
    loaded = mx.array(np.random.default_rng(2).standard_normal((CLASSES, 16))).astype(DTYPES[shown])
    for number, batch in enumerate(batches[:6]):
        for model, _ in (reference, ours):
            if number == 2:
                model.load_weights([("parts.out.weight", loaded)], strict=False)
            if number == 4:
                model.update({"parts": {"in": [{"bias": loaded[0]}]}})
        if number == 2:
            loop.masters["parts"]["out"]["weight"] = loaded.astype(mx.float32)
        if number == 4:
            loop.masters["parts"]["in"][0]["bias"] = loaded[0].astype(mx.float32)
        np.testing.assert_array_equal(step(*batch).loss, loop(batch))
    compare(step, ours, loop)


@pytest.mark.parametrize(("shown", "optimizer"), [("float32", "adamw"), ("float32", "user"), ("bfloat16", "sgd")])
def test_a_plain_step_in_between_is_taken_up(shown: str, optimizer: str) -> None:
    reference, ours, batches = pairs("nested", optimizer, shown)
    loop = MixedLoop(*reference, cross_entropy, mx.bfloat16)
    for number, batch in enumerate(batches[:6]):
        if number % 3 == 2:
            loss = plain_step(*reference, cross_entropy)(*batch)[0]
            loop = MixedLoop(*reference, cross_entropy, mx.bfloat16)
            np.testing.assert_allclose(fast_step(*ours, cross_entropy, *batch), loss, rtol=1e-6)
        else:
            loss = loop(batch)
            got = fast_step(*ours, cross_entropy, *batch, compute_dtype=mx.bfloat16)
            np.testing.assert_allclose(got, loss, rtol=1e-6)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-6)


def test_gradients_of_a_batch_leave_the_masters_alone() -> None:
    reference, ours, batches = pairs("mlp", "adamw", "bfloat16")
    loop = MixedLoop(*reference, cross_entropy, mx.bfloat16)
    step = Step(*ours, cross_entropy, compute_dtype=mx.bfloat16)
    for batch in batches[:4]:
        loop(batch)
        step(*batch)
        step.gradients(*batch)
    compare(step, ours, loop)


seen: dict[str, mx.Dtype] = {}


def spying(model: nn.Module, batch: Tree, *, weight: mx.array) -> mx.array:
    """Note the dtypes of what the loss is given."""
    x, other = batch["inputs"]
    seen.update(frozen=model.layers[0].weight.dtype, trained=model.layers[1].weight.dtype, x=x.dtype)
    seen.update(other=other.dtype, y=batch["y"].dtype, weight=weight.dtype)
    losses = nn.losses.cross_entropy(model(x) + other.sum(), batch["y"])
    return (losses * weight).mean()


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_what_is_cast_and_what_is_not(compute: str) -> None:
    seen.clear()
    _, ours, batches = pairs("frozen", "adamw", "float32")
    before = {name: (array.dtype, array.shape) for name, array in flat(ours[0].parameters()).items()}
    frozen = np.array(ours[0].layers[0].weight)
    step = Step(*ours, spying, compute_dtype=DTYPES[compute])
    x, y = batches[0]
    step({"inputs": (x, mx.ones((2,), mx.float16)), "y": y}, weight=mx.ones((8,)))
    cast = DTYPES[compute]
    assert seen == {
        "frozen": mx.float32,
        "trained": cast,
        "x": cast,
        "other": mx.float16,
        "y": mx.int32,
        "weight": cast,
    }
    assert {name: (array.dtype, array.shape) for name, array in flat(ours[0].parameters()).items()} == before
    np.testing.assert_array_equal(ours[0].layers[0].weight, frozen)


def with_aux(model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
    logits = model(x)
    return nn.losses.cross_entropy(logits, y, reduction="mean"), logits


@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float32"])
def test_loss_and_aux_keep_their_dtypes(compute: str) -> None:
    _, ours, batches = pairs("mlp", "adamw", "float32")
    step = Step(*ours, with_aux, compute_dtype=DTYPES[compute])
    wanted = float(with_aux(ours[0], *batches[0])[0])
    out = step(*batches[0])
    assert (out.loss.dtype, out.loss.shape) == (DTYPES[compute], ())
    assert out.aux[0].dtype == DTYPES[compute]
    np.testing.assert_allclose(float(out.loss), wanted, rtol=2e-2)
    assert out.grad_norm is not None
    assert out.grad_norm.dtype == mx.float32


@pytest.mark.parametrize("shown", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float32"])
def test_gradients_are_unscaled_and_in_the_parameters_dtypes(compute: str, shown: str) -> None:
    reference, ours, batches = pairs("mlp", "adamw", shown)
    reference[0].set_dtype(mx.float32)
    step = Step(*ours, cross_entropy, compute_dtype=DTYPES[compute])
    loss, gradients = step.gradients(*batches[0])
    wanted_loss, wanted = nn.value_and_grad(reference[0], cross_entropy)(reference[0], *batches[0])
    np.testing.assert_allclose(float(loss), float(wanted_loss), rtol=1e-2)
    assert flat(gradients).keys() == flat(wanted).keys()
    for name, gradient in flat(gradients).items():
        assert gradient.dtype == DTYPES[shown]
        np.testing.assert_allclose(np.array(gradient.astype(mx.float32)), flat(wanted)[name], atol=1e-2)
    out = step(*batches[0])
    assert out.grad_norm is not None
    norm = np.sqrt(sum(float(mx.square(gradient).sum()) for gradient in flat(wanted).values()))
    np.testing.assert_allclose(float(out.grad_norm), norm, rtol=2e-2)


@pytest.mark.parametrize("given", [mx.int32, mx.float64, mx.bool_])
def test_other_dtypes_are_refused(given: mx.Dtype) -> None:
    with pytest.raises(ValueError, match=r"compute_dtype: expected mx\.bfloat16"):
        Step(*Row("mlp", "adamw").new(), cross_entropy, compute_dtype=given)


def rescaling(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Assign to a trainable parameter, as a constraint on weights does; here it is within its limits."""
    model.gains[0] = mx.clip(model.gains[0], 0.5, 2.0)
    return cross_entropy(model, x, y)


def test_an_assignment_in_the_loss_rounds_no_other_master() -> None:
    ends = []
    for loss_fn in (cross_entropy, rescaling):
        _, (model, optimizer), batches = pairs("nested", "adamw", "bfloat16")
        optimizer.learning_rate = 1e-5
        step = Step(model, optimizer, loss_fn, compute_dtype=mx.bfloat16)
        for batch in batches[:4]:
            step(*batch)
        ends.append(masters(step))
    wanted, got = ends
    assert wanted.pop("gains.0").shape == got.pop("gains.0").shape == wanted["parts.in.0.bias"].shape  # one buffer
    assert_close(got, wanted, 0)


def test_one_tensor_loaded_within_a_window_rounds_no_other_master() -> None:
    ends = []
    for loads in (False, True):
        _, (model, optimizer), batches = pairs("nested", "adamw", "bfloat16")
        step = Step(model, optimizer, cross_entropy, compute_dtype=mx.bfloat16, accumulate=3)
        for number, batch in enumerate(batches[:6]):
            if loads and number == 4:
                model.parts["out"].weight = mx.array(model.parts["out"].weight)
            step(*batch)
        ends.append(masters(step))
    wanted, got = ends
    wanted.pop("parts.out.weight")
    got.pop("parts.out.weight")
    assert_close(got, wanted, 0)


def test_buffers_that_become_float32_cost_one_more_trace() -> None:
    """BatchNorm's of a model in half precision, at its first float32 batch."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 8, bias=False), nn.BatchNorm(8), nn.Linear(8, 1)

        def __call__(self, x: mx.array) -> mx.array:
            return self.last(self.norm(self.first(x)))

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x) - 1).mean()

    def new() -> tuple[nn.Module, optim.Optimizer]:
        mx.random.seed(3)
        model = Normed()
        model.set_dtype(mx.bfloat16)
        return model, optim.AdamW(1e-2)

    (model, optimizer), ours = new(), new()
    batches = [mx.random.normal((16, 6)) for _ in range(4)]
    step = Step(*ours, loss_fn, nonfinite="allow")
    for batch in batches:
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, batch)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)
        assert_same(step(batch).loss, loss, on_gpu=1e-3)
    assert (step.stats.mode, len(step.stats.traces)) == ("native", 2)
    compared = zip(tree_flatten(model.parameters()), tree_flatten(ours[0].parameters()), strict=True)
    for (name, wanted), (_, found) in compared:
        assert wanted.dtype == found.dtype, name
        assert_close({name: to_numpy(found)}, {name: to_numpy(wanted)}, 0, on_gpu=1e-3)
