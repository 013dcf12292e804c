"""The chunked cross entropy against plain MLX and float64: values, gradients, memory, and what it is used inside."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.losses import linear_cross_entropy
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import Row, assert_close, plain_step, snapshot, to_numpy

Arrays = dict[str, Any]
Loss = Callable[..., mx.array]
IGNORED = -100
TOKENS, VOCABULARY = 128, 8192  # where memory is measured
LOGITS = 4 * TOKENS * VOCABULARY  # bytes
chunked = functools.partial(linear_cross_entropy, chunk_size=7)
FORMS: dict[str, Callable[[Loss], Loss]] = {"eager": lambda f: f, "compiled": mx.compile}


def draw(*lead: int, vocabulary: int = 29, size: int = 5, seed: int = 0, share: float = 0.3) -> Arrays:
    """Draw all arguments in numpy; so large a share of the targets is ignored."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(vocabulary, size=lead, dtype=np.int32)
    return {
        "hidden": rng.standard_normal((*lead, size), dtype=np.float32),
        "weight": rng.standard_normal((vocabulary, size), dtype=np.float32),
        "bias": rng.standard_normal(vocabulary, dtype=np.float32),
        "token_weights": rng.random(lead, dtype=np.float32) + 0.5,
        "targets": np.where(rng.random(lead) < share, IGNORED, targets),
    }


def on_device(arrays: Arrays, dtype: mx.Dtype = mx.float32) -> Arrays:
    """Copy to MLX, the floating-point ones in a dtype."""
    return {name: mx.array(a, dtype=dtype if a.dtype.kind == "f" else None) for name, a in arrays.items()}


def plain(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    bias: mx.array | None = None,
    token_weights: mx.array | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
) -> mx.array:
    """Compute the same with all logits."""
    logits = (hidden @ weight.T if bias is None else hidden @ weight.T + bias).astype(mx.float32)
    counts = (targets != ignore_index).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, mx.where(targets == ignore_index, 0, targets))
    if token_weights is not None:
        counts = counts * token_weights
    if reduction == "none":
        return losses * counts
    return (losses * counts).sum() / (mx.maximum(counts.sum(), 1e-9) if reduction == "mean" else 1)


def exact(arrays: Arrays, reduction: str, cotangent: np.ndarray) -> Arrays:
    """Compute loss and gradients in float64, from the formulas."""
    hidden, weight, targets = (arrays[name] for name in ("hidden", "weight", "targets"))
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    logits = hidden @ weight.T + arrays.get("bias", np.zeros(len(weight))).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    normalizer = np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = np.where(targets == IGNORED, 0, targets)
    losses = (normalizer - np.take_along_axis(logits, labels[..., None], -1))[..., 0]
    counts = (targets != IGNORED) * arrays.get("token_weights", np.ones(targets.shape)).astype(np.float64)
    share = counts / (counts.sum() or 1) if reduction == "mean" else counts
    errors = np.exp(logits - normalizer) - np.eye(len(weight))[labels]
    errors *= (share * cotangent)[..., None]
    loss = losses * share if reduction == "none" else (losses * share).sum()
    flat = errors.reshape(-1, len(weight))
    gradients = {
        "hidden": errors @ weight,
        "weight": flat.T @ hidden.reshape(-1, hidden.shape[-1]),
        "bias": flat.sum(0),
    }
    return {"loss": loss, **{name: value for name, value in gradients.items() if name in arrays}}


def results(loss_fn: Loss, arrays: Arrays, cotangent: mx.array, form: str = "eager", **options: Any) -> Arrays:
    """Return a loss, and the gradients of hidden, weight and bias with this cotangent."""
    names = [name for name in ("hidden", "weight", "bias") if name in arrays]

    def value(*parameters: mx.array) -> tuple[mx.array, mx.array]:
        loss = loss_fn(**{**arrays, **dict(zip(names, parameters, strict=True))}, **options)
        return (loss * cotangent).sum(), loss

    argnums = tuple(range(len(names)))
    (_, loss), gradients = FORMS[form](mx.value_and_grad(value, argnums))(*(arrays[name] for name in names))
    return {"loss": loss, **dict(zip(names, gradients, strict=True))}


def assert_near(got: Arrays, wanted: Arrays, tolerance: float, floor: float = 1e-3) -> None:
    """Compare every array, relative to the largest value in it, or to `floor` where that is larger."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        reference = np.asarray(to_numpy(value) if isinstance(value, mx.array) else value)
        scale = np.abs(reference).max(initial=floor)
        np.testing.assert_allclose(to_numpy(got[name]) / scale, reference / scale, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("without", [(), ("bias",), ("token_weights",), ("bias", "token_weights")], ids=str)
@pytest.mark.parametrize("chunk_size", [7, 29, None])
def test_values_and_gradients(chunk_size: int | None, without: tuple[str, ...], reduction: str, form: str) -> None:
    drawn = {name: array for name, array in draw(4, 9).items() if name not in without}
    cotangent = np.random.default_rng(1).standard_normal((4, 9) if reduction == "none" else (), dtype=np.float32)
    arrays, given_cotangent = on_device(drawn), mx.array(cotangent)
    got = results(linear_cross_entropy, arrays, given_cotangent, form, reduction=reduction, chunk_size=chunk_size)
    assert_near(got, results(plain, arrays, given_cotangent, reduction=reduction), 2e-6)
    assert_near(got, exact(drawn, reduction, cotangent), 2e-6)


@settings(max_examples=40, deadline=None)
@given(
    lead=st.lists(st.integers(1, 6), max_size=3),
    vocabulary=st.integers(1, 40),
    size=st.integers(1, 9),
    chunk_size=st.one_of(st.none(), st.integers(1, 45)),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    reduction=st.sampled_from(["mean", "sum"]),
    seed=st.integers(0, 99),
)
def test_any_shape(
    lead: list[int], vocabulary: int, size: int, chunk_size: int | None, share: float, reduction: str, seed: int
) -> None:
    drawn = draw(*lead, vocabulary=vocabulary, size=size, share=share, seed=seed)
    one = mx.array(1.0)
    got = results(linear_cross_entropy, on_device(drawn), one, reduction=reduction, chunk_size=chunk_size)
    wanted = exact(drawn, reduction, np.ones(()))
    assert_near(got, wanted, 2e-6, floor=1)
    assert {name: a.shape for name, a in got.items()} == {name: np.shape(a) for name, a in wanted.items()}


@pytest.mark.parametrize(
    ("dtype", "of_loss", "of_gradients"),
    [
        (mx.bfloat16, 1e-6, 2**-8),
        (mx.float16, 1e-6, 2**-11),
        (mx.float64, 1e-8, 1e-7),
    ],  # the last is how far the exp of MLX is from exact
    ids=str,
)
def test_sums_are_float32_or_better(dtype: mx.Dtype, of_loss: float, of_gradients: float) -> None:
    arrays = on_device(draw(64, size=32, vocabulary=200), dtype)
    rounded = {name: np.array(a.astype(mx.float64) if name != "targets" else a) for name, a in arrays.items()}
    got = results(linear_cross_entropy, arrays, mx.array(1.0), chunk_size=64)
    wanted = exact(rounded, "mean", np.ones(()))
    assert got["loss"].dtype == (mx.float64 if dtype == mx.float64 else mx.float32)
    assert got.pop("loss").item() == pytest.approx(wanted.pop("loss"), rel=of_loss)
    assert {a.dtype for a in got.values()} == {dtype}
    assert_near(got, wanted, of_gradients)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("lead", [(6,), (0,), (2, 0)])
def test_no_token_that_counts(lead: tuple[int, ...], reduction: str) -> None:
    arrays = on_device(draw(*lead, share=1.0))
    got = results(linear_cross_entropy, arrays, mx.array(1.0), reduction=reduction, chunk_size=7)
    assert got["loss"].shape == (lead if reduction == "none" else ())
    assert not any(np.array(a).any() for a in got.values())
    none = {**arrays, "targets": mx.zeros(lead, mx.int32), "token_weights": mx.zeros(lead)}
    assert not any(np.array(a).any() for a in results(linear_cross_entropy, none, mx.array(1.0)).values())


def test_weights_of_tokens_have_a_gradient() -> None:
    arrays = on_device(draw(4, 9))

    def gradient(loss_fn: Loss) -> mx.array:
        return mx.grad(lambda each: loss_fn(**{**arrays, "token_weights": each}))(arrays["token_weights"])

    assert_near({"": gradient(linear_cross_entropy)}, {"": gradient(plain)}, 2e-6)


def test_targets_out_of_the_vocabulary() -> None:
    arrays = on_device(draw(5))
    for outside in (-1, 29, 2**31 - 1):
        arrays["targets"] = mx.array([1, outside, 2, IGNORED, 28])
        losses = np.array(linear_cross_entropy(**arrays, reduction="none"))
        assert np.isnan(losses).tolist() == [False, True, False, False, False]
        assert np.isnan(linear_cross_entropy(**arrays).item())


@pytest.mark.parametrize("dtype", [mx.int32, mx.int64, mx.uint32, mx.uint8, mx.int16])
def test_any_integers_and_any_ignored_index(dtype: mx.Dtype) -> None:
    arrays = on_device(draw(40, share=0))
    wanted = plain(**arrays, ignore_index=3)
    arrays["targets"] = arrays["targets"].astype(dtype)
    assert linear_cross_entropy(**arrays, ignore_index=3).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_large_logits() -> None:
    drawn = draw(6, share=0)
    drawn["weight"] *= 1e3
    drawn["bias"][4] = -np.inf
    drawn["targets"] = np.arange(5, 11, dtype=np.int32)
    got = results(linear_cross_entropy, on_device(drawn), mx.array(1.0), chunk_size=4)
    assert_near(got, exact(drawn, "mean", np.ones(())), 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_inside_a_checkpoint(form: str) -> None:
    arrays = on_device(draw(4, 9))

    def squashed(hidden: mx.array, **named: mx.array) -> mx.array:
        return chunked(mx.tanh(hidden), **named)

    got = results(mx.checkpoint(squashed), arrays, mx.array(1.0), form)
    assert_near(got, results(squashed, arrays, mx.array(1.0)), 1e-6)


def test_the_same_targets_twice_in_one_trace() -> None:
    arrays = on_device(draw(4, 9))

    def loss(loss_fn: Loss, hidden: mx.array) -> mx.array:
        return loss_fn(**{**arrays, "hidden": hidden}) + loss_fn(**{**arrays, "hidden": hidden * hidden})

    wanted = mx.grad(lambda hidden: loss(plain, hidden))(arrays["hidden"])
    got = mx.compile(mx.grad(lambda hidden: loss(chunked, hidden)))(arrays["hidden"])
    assert_near({"": got}, {"": wanted}, 5e-6)


def test_second_derivatives() -> None:
    arrays = on_device(draw(4, 9))

    def penalized(loss_fn: Loss, hidden: mx.array) -> mx.array:
        of_weight = mx.value_and_grad(lambda weight: loss_fn(**{**arrays, "hidden": hidden, "weight": weight}))
        loss, gradient = of_weight(arrays["weight"])
        return 3 * loss + mx.square(gradient).sum()

    got, wanted = (mx.grad(lambda hidden, f=f: penalized(f, hidden))(arrays["hidden"]) for f in (chunked, plain))
    assert_near({"": got}, {"": wanted}, 5e-6)


@pytest.mark.parametrize("chunk_size", [7, 29])
def test_forward_mode_is_refused(chunk_size: int) -> None:
    arrays = on_device(draw(6))
    hidden = arrays.pop("hidden")
    loss = functools.partial(linear_cross_entropy, chunk_size=chunk_size, **arrays)
    with pytest.raises(ValueError, match=r"jvp|vmap"):
        mx.jvp(loss, [hidden], [hidden])
    with pytest.raises(ValueError, match=r"jvp|vmap"):
        mx.vmap(loss)(mx.stack([hidden, hidden]))


def products(*outputs: mx.array) -> int:
    """Count the matrix products that these arrays need."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    return sum(graph.getvalue().count(name) for name in ('label ="Matmul"', 'label ="AddMM"'))


def test_only_gradients_that_are_needed_are_computed() -> None:
    arrays = on_device({name: array for name, array in draw(6).items() if name != "bias"})
    hidden, weight = arrays.pop("hidden"), arrays.pop("weight")
    loss = functools.partial(chunked, **arrays)
    chunks = math.ceil(29 / 7)
    assert products(loss(hidden, weight)) == chunks
    value, gradient = mx.value_and_grad(loss)(hidden, weight)
    assert products(value, gradient) == 3 * chunks
    value, gradients = mx.value_and_grad(loss, (0, 1))(hidden, weight)
    assert products(value, *gradients) == 4 * chunks


def peak(function: Callable[..., Any], *inputs: mx.array) -> int:
    """Return how many bytes of memory a call takes at most, above those that its inputs have."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function(*inputs))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("form", FORMS)
def test_memory_is_bounded(form: str) -> None:
    arrays = on_device(draw(TOKENS, vocabulary=VOCABULARY, size=8))
    hidden, weight, targets = (arrays[name] for name in ("hidden", "weight", "targets"))
    small = functools.partial(linear_cross_entropy, chunk_size=64)
    for argnums in (0, (0, 1)):

        def gradients(loss_fn: Loss, argnums: int | tuple[int, ...] = argnums) -> Callable[..., Any]:
            return FORMS[form](mx.value_and_grad(lambda h, w: loss_fn(h, w, targets), argnums))

        assert peak(gradients(small), hidden, weight) < LOGITS / 2
        assert peak(gradients(plain), hidden, weight) > 2 * LOGITS
    assert peak(FORMS[form](small), hidden, weight, targets) < LOGITS / 2


def tied_loss(loss_fn: Loss, model: nn.Module, tokens: mx.array, targets: mx.array) -> mx.array:
    """Return the loss of a language model whose embedding is its output too."""
    return loss_fn(model.mix(model.embedding(tokens)), model.embedding.weight, targets)


def test_a_step_with_tied_embeddings() -> None:
    row = Row("tied", "adamw", 1.0)
    reference, ours = row.new(), row.new()
    plainly = plain_step(*reference, functools.partial(tied_loss, plain), 1.0)
    step = Step(*ours, functools.partial(tied_loss, chunked), max_grad_norm=1.0)
    for batch in row.case.batches(4):
        wanted, norm = plainly(*batch)
        out = step(*batch)
        assert out.loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        assert out.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    assert step.stats.mode == "called"  # for the gradient is of a function of its own
    assert [trace.cause for trace in step.stats.traces] == [step.stats.traces[0].cause]
    assert_close(snapshot(*ours), snapshot(*reference), 1e-4)


class Wide(nn.Module):
    """A layer, and a wide one whose output is never there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, VOCABULARY)


def wide_loss(loss_fn: Loss, model: Wide, x: mx.array, targets: mx.array) -> mx.array:
    return loss_fn(model.layer(x), model.head.weight, targets, bias=model.head.bias)


@pytest.mark.parametrize("frozen", [False, True])
def test_memory_of_a_step(frozen: bool) -> None:
    peaks = {}
    for name, loss_fn in {"plain": plain, "ours": functools.partial(linear_cross_entropy, chunk_size=64)}.items():
        model = Wide()
        if frozen:
            model.head.freeze()
        step = Step(model, optim.AdamW(1e-3), functools.partial(wide_loss, loss_fn))
        x, targets = mx.random.normal((TOKENS, 8)), mx.random.randint(0, VOCABULARY, (TOKENS,))
        mx.eval(model.parameters(), x, targets)
        for _ in range(2):
            step(x, targets)
        peaks[name] = peak(lambda x, t, step=step: step(x, t).loss, x, targets)
    assert peaks["plain"] > 1.9 * LOGITS
    assert peaks["ours"] < LOGITS / 2


def test_few_tokens_take_no_second_gradient_of_the_weight() -> None:
    vocabulary, size, tokens = 72_000, 512, 32  # of which 8 MiB are 65,536 rows of logits
    head = nn.Linear(size, vocabulary, bias=False)
    x, targets = mx.random.normal((tokens, size)), mx.random.randint(0, vocabulary, (tokens,))
    mx.eval(head.parameters(), x, targets)

    def gradient(weight: mx.array, x: mx.array) -> mx.array:
        return mx.grad(lambda weight: linear_cross_entropy(x, weight, targets))(weight)

    assert peak(gradient, head.weight, x) < 1.5 * head.weight.nbytes


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight": mx.zeros((5,))}, r"weight: expected \[vocabulary, hidden size\], got \[5\]"),
        ({"weight": mx.zeros((0, 5))}, r"weight: .* got \[0, 5\]"),
        ({"weight": mx.zeros((29, 4))}, r"hidden: expected \[\.\.\., 4\].* got \[2, 3, 5\]"),
        ({"hidden": mx.array(1.0)}, "hidden: expected"),
        ({"targets": mx.zeros((2, 4), mx.int32)}, r"targets: expected \[2, 3\], got \[2, 4\]"),
        ({"bias": mx.zeros((28,))}, r"bias: expected \[29\], got \[28\]"),
        ({"token_weights": mx.zeros((3,))}, r"token_weights: expected \[2, 3\], got \[3\]"),
        ({"weight": mx.zeros((29, 5), mx.uint32)}, r"weight: expected a floating-point dtype, got mlx\.core\.uint32"),
        ({"targets": mx.zeros((2, 3))}, "targets: expected an integer dtype, got mlx.core.float32"),
        ({"targets": mx.zeros((2, 3), mx.bool_)}, "targets: expected an integer dtype"),
        ({"reduction": "avg"}, "reduction: expected one of none, mean, sum, got 'avg'"),
        ({"chunk_size": 0}, "chunk_size: expected a positive number of rows of weight, or None, got 0"),
        ({"chunk_size": 2.0}, "chunk_size: .* got 2.0"),
        ({"chunk_size": True}, "chunk_size: .* got True"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(change: Arrays, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        linear_cross_entropy(**{**on_device(draw(2, 3)), **change})


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_in_few_bits_are_taken_a_chunk_at_a_time(bits: int) -> None:
    mx.random.seed(1)
    head = nn.QuantizedLinear.from_linear(nn.Linear(64, 600), 32, bits)
    hidden, targets = mx.random.normal((2, 9, 64)), mx.random.randint(0, 600, (2, 9))

    def plain(hidden: mx.array, bias: mx.array) -> mx.array:
        weight = mx.dequantize(head.weight, head.scales, head.biases, 32, bits)
        return nn.losses.cross_entropy(hidden @ weight.T + bias, targets, reduction="mean")

    def chunked(hidden: mx.array, bias: mx.array) -> mx.array:
        return linear_cross_entropy(hidden, head, targets, bias=bias, chunk_size=250)

    for function in (lambda x: x, mx.compile):
        (expected, wanted), (found, gradients) = (
            function(mx.value_and_grad(each, argnums=(0, 1)))(hidden, head.bias) for each in (plain, chunked)
        )
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        assert all(
            mx.allclose(mine, other, rtol=1e-4, atol=1e-6) for mine, other in zip(gradients, wanted, strict=True)
        )
    embedding = nn.QuantizedEmbedding.from_embedding(nn.Embedding(600, 64), 32, bits)
    expected = nn.losses.cross_entropy(embedding.as_linear(hidden), targets, reduction="mean")
    assert linear_cross_entropy(hidden, embedding, targets).item() == pytest.approx(expected.item(), rel=1e-4)
    with pytest.raises(ValueError, match=r"hidden: expected \[..., 64\]"):
        linear_cross_entropy(hidden[..., :32], head, targets)
