"""Updates that write over the old parameters and moments: what they take of memory, and that nobody notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import OPTIMIZERS, Tree, assert_close, copy_tree, flat, is_matrix, snapshot
from support.models import cross_entropy
from support.places import Child

# Run in a child: what a way keeps, and the peak of its steps, in bytes. A gradient is what is in its
# tensor and a half, and the loss takes no memory.
PEAK = """
    import json
    import faststep, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    from support.helpers import OPTIMIZERS, compiled_step

    @mx.custom_function
    def loss(parts, x):
        return x.mean()

    @loss.vjp
    def loss_vjp(primals, cotangent, output):
        parts, x = primals
        return [part + 0.5 * cotangent for part in parts], x

    def loss_fn(model, x):
        return loss(model.parts, x)

    model = nn.Module()
    model.parts = [mx.random.normal((512, 512)) for _ in range(100)]
    optimizer = OPTIMIZERS[{optimizer!r}]()
    x = mx.ones(4)
    mx.eval(model.parameters(), x)
    if {fast}:
        step = faststep.Step(model, optimizer, loss_fn, max_grad_norm=1.0, replay=False)
    else:
        step = compiled_step(model, optimizer, loss_fn, 1.0)
    for _ in range(3):
        step(x)
    mx.synchronize()
    kept = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(5):
        step(x)
        mx.synchronize()
    print(json.dumps([kept, mx.get_peak_memory()]))
"""


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU's graph keeps what it reads until it is done")
@pytest.mark.parametrize("optimizer", ["adamw", "adam-bias-correction", "sgd-nesterov", "user"])
def test_an_update_takes_no_memory(child: Child, optimizer: str) -> None:
    """The gradients are all that comes to what is kept, and what the CPU has yet to do."""
    gradients = 100 * 4 * 512**2
    kept, peak = json.loads(child(PEAK.format(optimizer=optimizer, fast=True)).stdout)
    assert peak - kept <= 1.6 * gradients
    _, compiled = json.loads(child(PEAK.format(optimizer=optimizer, fast=False)).stdout)
    assert peak < compiled


def large(dtype: mx.Dtype) -> tuple[nn.Module, list[tuple[mx.array, mx.array]]]:
    """Make a model with tensors in buffers of their own and a shared one, and batches."""
    mx.random.seed(3)
    model = nn.Sequential(nn.Linear(16, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 4))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model, [(mx.random.normal((8, 16)).astype(dtype), mx.random.randint(0, 4, (8,))) for _ in range(6)]


def multi() -> optim.Optimizer:
    """Make one rule for matrices and another for the rest."""
    return optim.MultiOptimizer([optim.AdamW(1e-2), optim.SGD(1e-2, momentum=0.9)], [is_matrix])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5, "max_grad_value": 0.1},
    "averaged": {"ema_decay": 0.9},
    "masters": {"compute_dtype": mx.bfloat16},
    "masters-averaged": {"compute_dtype": mx.bfloat16, "ema_decay": 0.9},
    "accumulated": {"accumulate": 2, "ema_decay": 0.9},
    "raise": {"nonfinite": "raise"},
    "uncompiled": {"compile": False},
}


def train(optimizer: str, dtype: mx.Dtype, options: dict[str, Any], holds: bool) -> Tree:
    """Take steps, one of them bad; where everything is held, check at the end that it has kept its values."""
    model, batches = large(dtype)
    rule = multi() if optimizer == "multi" else OPTIMIZERS[optimizer]()
    step = Step(model, rule, cross_entropy, **options)
    held = []
    if options.get("nonfinite", "skip") == "skip":
        batches.insert(3, (float("nan") * batches[0][0], batches[0][1]))
    for batch in batches:
        if holds:
            now = [dict(flat(tree)) for tree in (model.parameters(), rule.state, step.state)]
            held.append((now, copy_tree(now)))
        step(*batch)
    for now, copies in held:
        for name, value in flat(copies).items():
            assert mx.array_equal(flat(now)[name], value, equal_nan=True), name
    return snapshot(model, rule, step.state)


@pytest.mark.parametrize(
    "optimizer", ["adamw", "adamw-bias-correction", "lion", "adafactor-fixed", "multi", "user-adam"]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_what_somebody_holds_makes_no_difference(options: str, optimizer: str) -> None:
    """All arrays are held, so that none can be written over: every bit is the same, and what is held stays."""
    dtype = mx.bfloat16 if "masters" in options else mx.float32
    wanted, got = (train(optimizer, dtype, OPTIONS[options], holds) for holds in (True, False))
    assert_close(got, wanted, 0)


# Moments that have faded away, of rows that no token reads: two steps of each optimizer.
FADED = """
import sys
import faststep, mlx.core as mx, mlx.nn as nn, numpy as np
from support.helpers import OPTIMIZERS, compiled_step, snapshot
from mlx.utils import tree_map
from support.models import cross_entropy

for name in {optimizers}:
    mx.random.seed(0)
    model, optimizer = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 4)), OPTIMIZERS[name]()
    optimizer.init(model.trainable_parameters())
    for layer in optimizer.state["layers"]:
        layer.update(tree_map(lambda x: mx.full(x.shape, 1e-40), layer))
    mx.eval(model.parameters(), optimizer.state)
    step = {step}(model, optimizer, cross_entropy)
    for _ in range(2):
        step(mx.array([1, 2, 3]), mx.array([0, 1, 2]))
    np.savez(sys.argv[1] + name, **snapshot(model, optimizer))
    assert (mx.array([1e-40]) * 0.5).item() > 0  # for all else numbers are what they were
"""
TINY = float(np.finfo(np.float32).tiny)
FADING = ["sgd-momentum", "adamw", "adamax", "rmsprop", "adadelta", "lion"]


def test_moments_that_fade_away_become_zero_when_asked(child: Child, tmp_path: Path) -> None:
    """Asked, the update knows no denormals, and the weights are the same; not asked, every bit is MLX's."""
    if mx.default_device().type == mx.gpu:
        pytest.skip("denormals cost a GPU nothing")
    ours = "faststep.Step"
    for name, step, flush in [("mlx", "compiled_step", "1"), ("bits", ours, "0"), ("zero", ours, "1")]:
        code = f"import sys; sys.argv = ['', {str(tmp_path / name)!r}]" + FADED.format(optimizers=FADING, step=step)
        child(code, FASTSTEP_FLUSH_DENORMALS=flush)
    for optimizer in FADING:
        mlx, bits, zero = (dict(np.load(tmp_path / f"{name}{optimizer}.npz")) for name in ("mlx", "bits", "zero"))
        assert_close(bits, mlx, 0)
        moments = [name for name in mlx if name.startswith("optimizer.layers.0")]
        assert moments
        for name in moments:
            assert ((0 < abs(mlx[name])) & (abs(mlx[name]) < TINY)).any(), name
            assert not ((0 < abs(zero[name])) & (abs(zero[name]) < TINY)).any(), name
        if optimizer != "lion":  # it takes the sign of what has faded for a direction
            weights = [name for name in mlx if name.startswith("model")]
            assert_close({name: zero[name] for name in weights}, {name: mlx[name] for name in weights}, 0)
