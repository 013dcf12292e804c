"""A norm that the user sets, files, and plain steps between the calls: what goes on is the plain loop's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from faststep import Step, fast_step
from faststep._step._user_optimizer import StepCache
from support.helpers import (
    Row,
    Tree,
    assert_close,
    assert_same,
    plain_step,
    save_and_load,
    snapshot,
)
from support.models import cross_entropy


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("nonfinite", ["skip", "allow"])
@pytest.mark.parametrize("way", ["fast_step", "Step", "uncompiled"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "user-adam"])
def test_a_norm_that_is_another_at_each_step_takes_no_traces(
    optimizer: str, way: str, nonfinite: Literal["skip", "allow"], accumulate: int
) -> None:
    """As AutoClip sets it, by a percentile of the norms so far; a step of the same model keeps a norm of its own."""
    row, fixed = Row("mlp", optimizer), 0.02
    reference, ours = row.new(), row.new()
    step = Step(*ours, cross_entropy, max_grad_norm=fixed, nonfinite=nonfinite, compile=way != "uncompiled")
    step.accumulate = accumulate
    beside = Step(*ours, cross_entropy, max_grad_norm=fixed, accumulate=accumulate)
    batches = row.case.batches(24 * accumulate)
    norm, made = fixed, 0
    for number in range(24):
        is_fixed = number % 5 == 4
        norm = norm if is_fixed else 0.01 * (1 + number * 7 % 23)
        take = plain_step(*reference, cross_entropy, max_grad_norm=fixed if is_fixed else norm, accumulate=accumulate)
        for batch in batches[number * accumulate : (number + 1) * accumulate]:
            if is_fixed:
                loss = beside(*batch).loss
            elif way == "fast_step":
                options: dict[str, Any] = {"nonfinite": nonfinite, "accumulate": accumulate}
                loss = fast_step(*ours, cross_entropy, *batch, max_grad_norm=norm, **options)
            else:
                step.max_grad_norm = norm
                loss = step(*batch).loss
            assert_same(loss.item(), take(*batch)[0].item(), 2e-5)
        made = len(step.stats.traces) if number == 11 else made
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    assert len(step.stats.traces) == made
    assert step.max_grad_norm == (fixed if way == "fast_step" else norm)
    hung = StepCache.at(*ours)
    assert (0 if hung is None else len(hung.programs)) == (way == "fast_step")


@pytest.mark.parametrize(
    ("made_with", "value", "error", "message"),
    [
        (1.0, None, ValueError, r"expected a number in a step that was made with one .*, got None"),
        (None, 1.0, ValueError, r"expected None in a step that was made with None .*, got 1.0"),
        (1.0, -1.0, ValueError, "expected a number from 0 on or None, got -1"),
        (1.0, "much", TypeError, "expected a number or None, got str"),
    ],
)
def test_a_norm_that_is_none_is_refused(
    made_with: float | None, value: Tree, error: type[Exception], message: str
) -> None:
    step = Step(*Row("mlp", "sgd").new(), cross_entropy, max_grad_norm=made_with)
    with pytest.raises(error, match=f"max_grad_norm: {message}"):
        step.max_grad_norm = value
    assert step.max_grad_norm == step.options.max_grad_norm == made_with


@pytest.mark.parametrize("optimizer", ["adamw-joined", "sgd-nesterov", "user-adam"])
def test_a_run_goes_on_from_files(optimizer: str, tmp_path: Path) -> None:
    row = Row("conv", optimizer, 0.1)
    reference, ours = row.new(), row.new()
    take, step = plain_step(*reference, cross_entropy, 0.1), Step(*ours, cross_entropy, max_grad_norm=0.1)
    batches = row.case.batches(6)
    mx.random.seed(1)
    for batch in batches[:3]:
        step(*batch)
    ours[0].save_weights(str(tmp_path / "model.safetensors"))
    state = save_and_load(ours[1].state, str(tmp_path / "optimizer.safetensors"))
    mx.random.seed(1)
    for batch in batches[:3]:
        take(*batch)
    resumed = row.new()
    resumed[0].load_weights(str(tmp_path / "model.safetensors"))
    resumed[1].state = state
    again = Step(*resumed, cross_entropy, max_grad_norm=0.1)
    mx.random.seed(2)
    losses = [float(take(*batch)[0]) for batch in batches[3:]]
    mx.random.seed(2)
    np.testing.assert_allclose([float(again(*batch).loss) for batch in batches[3:]], losses, rtol=2e-5)
    assert_close(snapshot(*resumed), snapshot(*reference), 2e-5)


def test_plain_steps_between_ours() -> None:
    row = Row("conv", "adamw")
    reference, ours = row.new(), row.new()
    take, between, step = (
        plain_step(*reference, cross_entropy),
        plain_step(*ours, cross_entropy),
        Step(*ours, cross_entropy),
    )
    batches = row.case.batches(6)
    mx.random.seed(1)
    losses = [float(take(*batch)[0]) for batch in batches]
    mx.random.seed(1)
    got = [float(between(*b)[0] if number % 3 == 1 else step(*b).loss) for number, b in enumerate(batches)]
    np.testing.assert_allclose(got, losses, rtol=2e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
