"""A loss that exchanges arrays with other processes: what each rank would decide alone is an error."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import pytest
from support.ring import run

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not mx.distributed.is_available("ring"), reason="this MLX has no ring of processes"
)

HEAD = """
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np
from faststep import Step
from support.helpers import plain_step

group = mx.distributed.init(backend="ring", strict=RANKS > 1)
assert group.size() == RANKS
WIDTH = 8

def new():
    mx.random.seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    mx.eval(model.parameters())
    return model, optim.AdamW(1e-2)

def batch(number):
    return mx.random.normal((4, WIDTH), key=mx.random.key(10 * number + group.rank()))

def summed(model, x):
    return mx.distributed.all_sum(mx.square(model(x)).mean(), group=group) / group.size()

def with_norms(model, x):
    hidden = model(x)
    return mx.square(hidden).mean(), mx.distributed.all_gather(hidden.sum()[None], group=group)

def sharded():
    model, optimizer = new()
    model.layers[0] = nn.layers.distributed.shard_linear(model.layers[0], "all-to-sharded", group=group)
    model.layers[2] = nn.layers.distributed.shard_linear(model.layers[2], "sharded-to-all", group=group)
    return model, optimizer

def mean(model, x):
    return mx.square(model(x)).mean()
"""
REFUSED = """
KINDS = [(new, summed), (new, with_norms)][: None if RANKS > 1 else 1]
OPTIONS = [{}, {"nonfinite": "raise"}, {"max_loss": 1.0}, {"nonfinite": "allow", "max_grad_norm": 1.0},
           {"compute_dtype": mx.float16}, {"accumulate": 2}, {"compile": False}][: None if RANKS > 1 else 1]
for make, loss_fn in KINDS:
    for options in OPTIONS:
        model, optimizer = make()
        step = Step(model, optimizer, loss_fn, **options)
        try:
            step(batch(0))
        except ValueError as error:
            assert RANKS > 1 and "2 ranks" in str(error) and "nonfinite" in str(error), error
            assert step.stats.steps == 0
        else:
            assert RANKS == 1, (loss_fn, options)
        step.gradients(batch(0))
"""
ALLOWED = """
for make, loss_fn in [(new, summed), (new, with_norms), (sharded, mean)]:
    ours, reference = make(), make()
    step = Step(*ours, loss_fn, nonfinite="allow", max_grad_value=0.1)
    plain = plain_step(*reference, loss_fn, max_grad_value=0.1)
    for number in range(4):
        x = batch(number) if make is new else mx.random.normal((4, WIDTH), key=mx.random.key(number))
        loss, out = plain(x)[0], step(x)
        loss = loss[0] if isinstance(loss, tuple) else loss
        np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
    assert step.stats.mode != "plain", step.stats.reason
    for got, wanted in zip(ours[0].layers, reference[0].layers, strict=True):
        if "weight" in got:
            np.testing.assert_allclose(got.weight, wanted.weight, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("code", [REFUSED, ALLOWED], ids=["refused", "allowed"])
def test_ranks(code: str, ranks: int, tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(f"RANKS = {ranks}\n{HEAD}{code}")
    run(ranks, tmp_path, program)
