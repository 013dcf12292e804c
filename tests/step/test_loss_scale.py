"""The loss scale of float16: overflows, growth, bounds; and what bad batches do in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep import Step
from support.helpers import Row, SignedDescent, Tree, assert_close, flat, snapshot
from support.mixed import SCALE, MixedLoop, Pair, compare, masters, pairs
from support.models import cross_entropy


def times(model: nn.Module, x: mx.array, y: mx.array, factor: mx.array) -> mx.array:
    return cross_entropy(model, x, y) * factor.astype(mx.float32)


def float16_step(
    optimizer: str = "adamw", shown: str = "float32", **options: Any
) -> tuple[Pair, Step, Callable[..., Any]]:
    """Make a step in float16, and a function that calls it with the loss multiplied."""
    _, ours, batches = pairs("mlp", optimizer, shown)
    step = Step(*ours, times, compute_dtype=mx.float16, **options)
    return ours, step, lambda factor, batch=0: step(*batches[batch], mx.array(factor))


def scale_of(step: Step) -> tuple[float, int]:
    state = step.state
    assert (state["loss_scale"].dtype, state["loss_scale"].shape) == (mx.float32, ())
    assert (state["good_steps"].dtype, state["good_steps"].shape) == (mx.int32, ())
    return float(state["loss_scale"]), int(state["good_steps"])


def set_scale(step: Step, scale: float, good_steps: int) -> None:
    step.load_state({**step.state, "loss_scale": mx.array(scale), "good_steps": mx.array(good_steps)})


@pytest.mark.parametrize("optimizer", ["adamw", "user"])
@pytest.mark.parametrize("shown", ["float32", "float16"])
def test_an_overflow_halves_the_scale_and_changes_nothing_else(shown: str, optimizer: str) -> None:
    ours, step, take = float16_step(optimizer, shown, ema_decay=0.9)
    assert not take(1.0).skipped
    assert scale_of(step) == (SCALE, 1)
    before, kept = snapshot(*ours), step.state
    out = take(100.0)  # 100 * 65536 is beyond float16, 100 is not
    assert out.skipped
    assert not out.updated
    assert np.isfinite(float(out.loss))
    assert scale_of(step) == (SCALE / 2, 0)
    assert_close(snapshot(*ours), before, 0)
    now = step.state
    for group in ("ema", "masters"):
        for name, array in flat(kept.get(group, {})).items():
            np.testing.assert_array_equal(flat(now[group])[name], array, err_msg=name)
    skipped = [bool(take(100.0).skipped) for _ in range(8)]
    assert not all(skipped)
    assert step.stats.skipped == 1 + sum(skipped)
    assert scale_of(step)[0] == SCALE / 2 ** (1 + sum(skipped))


def test_an_error_in_an_update_counts_no_good_step() -> None:
    class Failing(SignedDescent):
        """Fails at its third update."""

        updates = 0

        def apply_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
            """Count, and fail."""
            self.updates += 1
            if self.updates == 3:
                raise KeyError("third")
            return super().apply_gradients(gradients, parameters)

    model, batches = Row("mlp", "adamw").new()[0], Row("mlp", "adamw").case.batches(3)
    step = Step(model, Failing(1e-3), cross_entropy, compute_dtype=mx.float16)
    for batch in batches[:2]:
        step(*batch)
    with pytest.raises(KeyError, match="third"):
        step(*batches[2])
    assert scale_of(step) == (SCALE, 2)


def test_an_overflow_within_a_window_is_left_out_of_it() -> None:
    reference, ours, batches = pairs("mlp", "adamw", "float32")
    loop = MixedLoop(*reference, cross_entropy, mx.float16)
    step = Step(*ours, times, compute_dtype=mx.float16, accumulate=3)
    loop(batches[0], batches[2])
    outs = [step(*batch, mx.array(factor)) for batch, factor in zip(batches[:3], (1.0, 1e4, 1.0), strict=True)]
    assert [bool(out.skipped) for out in outs] == [False, True, False]
    assert [bool(out.updated) for out in outs] == [False, False, True]
    assert scale_of(step) == (SCALE / 2, 1)
    compare(step, ours, loop, 1e-5)  # half the scale: small gradients are rounded otherwise


def test_2000_good_steps_double_the_scale() -> None:
    _, step, take = float16_step()
    take(1e-3)
    set_scale(step, SCALE, 1998)
    assert not take(1e-3).skipped
    assert scale_of(step) == (SCALE, 1999)
    assert not take(1e-3).skipped
    assert scale_of(step) == (2 * SCALE, 0)
    set_scale(step, SCALE, 1999)
    assert take(1e4).skipped
    assert scale_of(step) == (SCALE / 2, 0)


def test_the_scale_stays_within_its_bounds() -> None:
    _, step, take = float16_step()
    take(1e-3)
    set_scale(step, 2.0**-10, 5)
    assert take(float("nan")).skipped
    assert scale_of(step) == (2.0**-10, 0)
    set_scale(step, 2.0**24, 1999)
    assert not take(1e-6).skipped
    assert scale_of(step) == (2.0**24, 0)


def test_an_overflow_of_float16_is_one_batch_of_a_bfloat16_step_as_well() -> None:
    _, ours, batches = pairs("mlp", "adamw", "float32")
    step = Step(*ours, times, compute_dtype=mx.bfloat16)
    assert not step(*batches[0], mx.array(1e4)).skipped
    assert "loss_scale" not in step.state


@pytest.mark.parametrize("nonfinite", ["raise", "allow"])
def test_float16_needs_to_skip(nonfinite: Any) -> None:
    with pytest.raises(ValueError, match=r"nonfinite.*float16"):
        Step(*Row("mlp", "adamw").new(), cross_entropy, compute_dtype=mx.float16, nonfinite=nonfinite)


@pytest.mark.parametrize("nonfinite", ["raise", "allow"])
def test_bfloat16_does_what_it_is_told_about_bad_batches(nonfinite: Any) -> None:
    _, ours, batches = pairs("mlp", "adamw", "bfloat16")
    step = Step(*ours, times, compute_dtype=mx.bfloat16, nonfinite=nonfinite)
    step(*batches[0], mx.array(1.0))
    before = snapshot(*ours), masters(step)
    if nonfinite == "allow":
        step(*batches[0], mx.array(float("nan")))
        assert all(np.isnan(master).any() for master in masters(step).values())
        return
    with pytest.raises(FloatingPointError):
        step(*batches[0], mx.array(float("nan")))
    assert_close(snapshot(*ours), before[0], 0)
    assert_close(masters(step), before[1], 0)
