"""Attention in a step on a CPU, by blocks of rows, as close to float64 as MLX's operations, for each form of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, profile
from support.places import Child
from support.replays import NEEDS_CPU

pytestmark = NEEDS_CPU


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention; `shared` heads of queries read one of keys and values."""

    batch: int = 2
    heads: int = 3
    shared: int = 1
    queries: int = 212
    keys: int = 212
    width: int = 16
    value_width: int = 16


INNER = 12


class Three(nn.Module):
    """Queries, keys and values by linear layers, and a number for each head and key."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        rng = np.random.default_rng(7)
        heads = sizes.heads * sizes.shared

        def normal(*shape: int) -> mx.array:
            return mx.array(rng.standard_normal(shape).astype(np.float32))

        self.of_q = normal(INNER, heads, sizes.width) / 3
        self.of_k = normal(INNER, sizes.heads, sizes.width) / 3
        self.of_v = normal(INNER, sizes.heads, sizes.value_width) / 3
        self.bias = normal(heads, 1, sizes.keys)
        self.inputs = normal(sizes.batch, max(sizes.queries, sizes.keys), INNER)
        self.sizes = sizes
        self.freeze(keys=["inputs"], recurse=False)

    def by_heads(self) -> tuple[mx.array, mx.array, mx.array]:
        """Return the three as [batch, heads, positions, width]."""

        def heads(weight: mx.array, positions: int) -> mx.array:
            x = self.inputs[:, :positions]
            y = x @ weight.reshape(INNER, -1)
            return y.reshape(*x.shape[:2], *weight.shape[1:]).transpose(0, 2, 1, 3)

        keys = self.sizes.keys
        return heads(self.of_q, self.sizes.queries), heads(self.of_k, keys), heads(self.of_v, keys)


Attention = Callable[[Three], mx.array]


def of_mlx(mask: Callable[[Three], mx.array | str | None], scale: float = 0.3) -> Attention:
    """Return MLX's function with a mask."""

    def attention(model: Three) -> mx.array:
        q, k, v = model.by_heads()
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask(model))

    return attention


def hidden_ends(model: Three) -> mx.array:
    """Return a mask that hides the last positions of each sequence, and all of the last one."""
    batch, keys = model.sizes.batch, model.sizes.keys
    lengths = mx.array([keys - 3] * (batch - 1) + [0])
    return (mx.arange(keys) < lengths[:, None])[:, None, None, :]


def added(model: Three) -> mx.array:
    """Return numbers that are added to scores, some of them without end."""
    queries, keys = mx.arange(model.sizes.queries), mx.arange(model.sizes.keys)
    numbers = mx.sin(queries[:, None] * 0.7 + keys)
    return mx.where(keys % 7 == 3, -mx.inf, numbers).astype(model.inputs.dtype)


def by_hand(scaled: Callable[[mx.array], mx.array]) -> Attention:
    """Return an attention as programs write it; `scaled` scales and masks the scores."""

    def attention(model: Three) -> mx.array:
        q, k, v = model.by_heads()
        return mx.softmax(scaled(q @ k.swapaxes(-1, -2)), axis=-1) @ v

    return attention


def added_row(scores: mx.array) -> mx.array:
    """Return a number for each column of scores."""
    return 1e-3 * mx.arange(scores.shape[-1], dtype=scores.dtype)


def in_one_row(model: Three) -> mx.array:
    """Attend with all heads in one axis."""
    q, k, v = (a.reshape(-1, *a.shape[2:]) for a in model.by_heads())
    return mx.softmax(mx.matmul(q * 0.3, k.transpose(0, 2, 1)), axis=-1) @ v


def of_one_head(model: Three) -> mx.array:
    """Attend with matrices."""
    q, k, v = (a[0, 0] for a in model.by_heads())
    return mx.softmax(q @ k.T / math.sqrt(3), axis=-1) @ v


def every_second(model: Three) -> mx.array:
    """Attend with numbers that do not lie side by side."""
    q, k, v = (a[..., ::2] for a in model.by_heads())
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal")


def in_checkpoint(model: Three) -> mx.array:
    """Attend in a checkpoint, whose backward pass does so again."""

    def inner(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.square(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal"))

    return mx.checkpoint(inner)(*model.by_heads())


def as_a_checkpoint(model: Three) -> mx.array:
    """Attend in a checkpoint of nothing else, whose backward pass computes no output again."""
    inner = mx.checkpoint(lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3))
    return inner(*model.by_heads())


def causal_by_mlx(model: Three) -> mx.array:
    """Return the mask that MLX's transformers add."""
    return nn.MultiHeadAttention.create_additive_causal_mask(model.sizes.queries, model.inputs.dtype)


def causal_by_hand(scores: mx.array) -> mx.array:
    """Scale and mask as nanoGPT does."""
    shown = mx.tril(mx.ones(scores.shape[-2:], dtype=mx.bool_))
    return mx.where(shown, scores * 0.3, -mx.inf)


USUAL = Sizes()
CASES: dict[str, tuple[Attention, Sizes]] = {
    "no mask": (of_mlx(lambda _: None), USUAL),
    "causal": (of_mlx(lambda _: "causal"), USUAL),
    "causal, more keys": (of_mlx(lambda _: "causal"), replace(USUAL, queries=190, keys=233)),
    "causal, one query": (of_mlx(lambda _: "causal"), replace(USUAL, queries=1, keys=44_000)),
    "causal, many rows": (of_mlx(lambda _: "causal"), Sizes(1, 2, 1, 370, 370, 8, 8)),
    "many columns": (of_mlx(lambda _: None), Sizes(1, 1, 1, 110, 2500, 4, 4)),
    "causal, shared keys": (of_mlx(lambda _: "causal"), replace(USUAL, shared=4)),
    "other width of values": (of_mlx(lambda _: "causal"), replace(USUAL, value_width=5)),
    "odd sizes": (of_mlx(lambda _: None), Sizes(1, 1, 1, 517, 509, 3, 1)),
    "one batch, one head": (of_mlx(lambda _: "causal"), Sizes(1, 1, 1, 520, 520, 16, 16)),
    "MLX's causal mask": (of_mlx(causal_by_mlx), USUAL),
    "hidden ends": (of_mlx(hidden_ends), USUAL),
    "hidden ends, shared keys": (of_mlx(hidden_ends), replace(USUAL, shared=2)),
    "added": (of_mlx(added), USUAL),
    "scale 1": (of_mlx(lambda _: "causal", scale=1.0), USUAL),
    "by hand": (by_hand(lambda scores: scores / 4), USUAL),
    "by hand, without a scale": (by_hand(lambda scores: scores), USUAL),
    "by hand, causal": (by_hand(causal_by_hand), USUAL),
    "by hand, added": (by_hand(lambda scores: scores * 0.3 + added_row(scores)), USUAL),
    "three axes": (in_one_row, USUAL),
    "two axes": (of_one_head, Sizes(1, 1, 1, 520, 520)),
    "every second": (every_second, USUAL),
    "in a checkpoint": (in_checkpoint, USUAL),
}


def with_probabilities(model: Three) -> mx.array:
    """Attend, and use the probabilities otherwise, too."""
    q, k, v = model.by_heads()
    probabilities = mx.softmax(q @ k.swapaxes(-1, -2), axis=-1)
    return probabilities @ v + probabilities.max()


def dropped_out(model: Three) -> mx.array:
    """Attend with some of the probabilities."""
    q, k, v = model.by_heads()
    kept = mx.where(mx.arange(model.sizes.keys) % 3 == 0, 0.0, 1.5).astype(q.dtype)
    return (mx.softmax(q @ k.swapaxes(-1, -2), axis=-1) * kept) @ v


def learned_scale(model: Three) -> mx.array:
    """Attend with scores times a number that is trained."""
    q, k, v = model.by_heads()
    return mx.softmax(model.bias[0, 0, 0] * (q @ k.swapaxes(-1, -2)), axis=-1) @ v


# What is left to MLX's operations, its gradient at least.
OTHERS: dict[str, tuple[Attention, Sizes]] = {
    "a checkpoint": (as_a_checkpoint, USUAL),
    "small": (of_mlx(lambda _: "causal"), replace(USUAL, queries=64, keys=64)),
    "a learned bias": (of_mlx(lambda model: model.bias), USUAL),
    "a learned scale": (learned_scale, USUAL),
    "probabilities are seen": (with_probabilities, USUAL),
    "dropped out": (dropped_out, USUAL),
}
NAMES = ["of_q", "of_k", "of_v"]


def gradients(attention: Attention, model: Three) -> list[np.ndarray]:
    """Return the output's gradients by queries, keys and values, by MLX."""

    def loss(model: Three) -> mx.array:
        return of_output(attention(model))

    found = nn.value_and_grad(model, loss)(model)[1]
    return [np.array(found[name]) for name in NAMES]


def of_output(out: mx.array) -> mx.array:
    """Return a number with another gradient for each element."""
    weights = mx.cos(mx.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    return (out * weights).sum()


def by_step(attention: Attention, sizes: Sizes) -> tuple[mx.array, list[np.ndarray], Step[Three, mx.array]]:
    """Return output and gradients of a first step, and the step."""
    optimizer = optim.SGD(0.0, momentum=0.5)  # its first momentum is the gradient
    step = Step(Three(sizes), optimizer, lambda model: (of_output(y := attention(model)), y))
    out = step()
    return out.aux[0], [np.array(optimizer.state[name]["v"]) for name in NAMES], step


def in_float64(attention: Attention, sizes: Sizes) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return output and gradients in float64."""
    model = Three(sizes)
    model.set_dtype(mx.float64)
    return np.array(attention(model)), gradients(attention, model)


def farthest(got: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """Return how far numbers are from float64, as a share of the largest one of each array."""
    pairs = zip(got, exact, strict=True)
    return max(float(np.abs(a.astype(np.float64) - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)


def names(step: Step[Three, mx.array]) -> list[str]:
    """Return the names of a step's operations."""
    with profile(step) as found:
        step()
    found.measure()
    return [each.name for each in found.operations]


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_results_are_as_close_to_float64_as_mlx_s(name: str) -> None:
    attention, sizes = (CASES | OTHERS)[name]
    with mx.stream(mx.cpu):
        exact, exact_gradients = in_float64(attention, sizes)
    out, found, step = by_step(attention, sizes)
    model = Three(sizes)
    theirs = farthest([np.array(attention(model)), *gradients(attention, model)], [exact, *exact_gradients])
    assert farthest([np.array(out), *found], [exact, *exact_gradients]) < max(2 * theirs, 2e-6)
    operations = names(step)
    assert operations.count("Attention") == {"in a checkpoint": 2, "a checkpoint": 1}.get(name, name in CASES)
    assert operations.count("AttentionVJP") == (name in CASES)
    assert ("Softmax" in operations) == (name in OTHERS)


SAME = """
from engine.test_attention import CASES, by_step, names, gradients, Three
import mlx.core as mx
import numpy as np
for attention, sizes in CASES.values():
    out, found, step = by_step(attention, sizes)
    model = Three(sizes)
    np.testing.assert_array_equal(out, attention(model))
    for got, wanted in zip(found, gradients(attention, model), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    assert "Attention" not in names(step)
"""


def test_without_own_kernels_it_is_mlx_s(child: Child) -> None:
    child(SAME, FASTSTEP_KERNELS="0")


def test_scores_are_never_there_as_a_whole() -> None:
    sizes = Sizes(1, 4, 1, 2000, 2000, 8, 8)
    model, optimizer = Three(sizes), optim.SGD(0.1)
    attention = of_mlx(lambda _: "causal")
    step = Step(model, optimizer, lambda model: of_output(attention(model)))
    for _ in range(2):
        mx.eval(step().loss)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(step().loss)
    scores = 4 * sizes.heads * sizes.queries * sizes.keys
    assert mx.get_peak_memory() - before < scores / 8


@pytest.mark.parametrize("name", ["causal, many rows", "causal, shared keys", "hidden ends"])
def test_a_captured_step_has_the_bits_of_one_that_mlx_evaluates(name: str) -> None:
    attention, sizes = CASES[name]
    left = []
    for replay in (True, False):
        model = Three(sizes)
        model.freeze(keys=["bias"])
        step = Step(model, optim.AdamW(1e-2), lambda model: of_output(attention(model)), replay=replay)
        losses = [float(step().loss) for _ in range(20)]
        assert any((trace.replay or "").startswith("captured") for trace in step.stats.traces) == replay
        left.append([losses, *(np.array(model[each]).tobytes() for each in NAMES)])
    assert left[0] == left[1]
