"""The peak of a step on the CPU: at most the compiled plain loop's memory, and twice what shares buffers."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from conftest import Child
from plans import ADAMW, GPT24

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's buffers are laid out otherwise")

OWN_BYTES = 128 << 10  # tensors of so many bytes share none, see layout.rs

# Run in a child of its own: the peak of one way, in the steady state, and the bytes of what shares buffers.
MEASURE = """
    import functools, json
    import faststep, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    from mlx.utils import tree_flatten
    from plans import *

    mx.random.seed(0)
    model, batch = {model}
    optimizer = {optimizer}
    mx.eval(model.parameters(), batch)
    shared = sum(p.nbytes for _, p in tree_flatten(model.trainable_parameters()) if p.nbytes < {own_bytes})

    def plain(*batch):
        loss, grads = nn.value_and_grad(model, cross_entropy)(model, *batch)
        if {max_grad_norm} is not None:
            grads, _ = optim.clip_grad_norm(grads, {max_grad_norm})
        optimizer.update(model, grads)
        return loss

    if {ours}:
        step = faststep.Step(model, optimizer, cross_entropy, max_grad_norm={max_grad_norm}, in_flight={in_flight})
    else:
        optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state, mx.random.state]
        compiled = functools.partial(mx.compile, inputs=state, outputs=state)(plain)

        def step(*batch):
            mx.eval(compiled(*batch), state)

    def take(steps):
        for _ in range(steps):
            step(*batch)
        mx.synchronize()

    take(4)
    mx.reset_peak_memory()
    take(12)
    print(json.dumps([mx.get_peak_memory(), shared]))
"""
# model and batch, and the steps that may be under way: small ones overlap, and hold the activations of two then
CASES = {
    "gpt-24x64": (GPT24, 2),
    "gpt-4x128": ("transformer(256, 128, 4, (4, 64))", 2),
    "mlp-4x128": ("mlp(128, 128, 64)", 1),
    "mlp-4x512": ("mlp(512, 512, 64)", 2),
}


@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["", "clip"])
@pytest.mark.parametrize("name", CASES)
def test_peak_is_the_compiled_loop_s_and_two_shared_buffers(
    name: str, max_grad_norm: float | None, child: Child
) -> None:
    """What is joined for the update costs no more than the joined gradients and one copy of them."""
    model, in_flight = CASES[name]
    options = {"optimizer": ADAMW, "max_grad_norm": max_grad_norm, "in_flight": in_flight, "own_bytes": OWN_BYTES}
    runs = [child(MEASURE.format(model=model, ours=ours, **options)).stdout for ours in (False, True)]
    (compiled, shared), (ours, _) = map(json.loads, runs)
    assert ours <= compiled + 2 * shared, f"{ours=} {compiled=} {shared=}"
