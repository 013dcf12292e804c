"""JAX's side of ``step.py``: the same models, optimizer and clipping, run by the Python that has JAX.

``step.py --jax`` starts it with one argument, the folder in which ``frameworks.py`` has put the case (``case.json``)
and MLX's initial weights and batches (``arrays.npz``). It prints what it has built, a line of JSON, and then takes a
block of steps for every line ``["way", steps]`` that it reads, and prints its milliseconds a step.
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return, no-untyped-call"
# JAX is not in the environment that MLX is in, and where it is missing everything in it is of type Any.

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]
Logits = Callable[[Params, jax.Array], jax.Array]
WAY = "JAX, jit"
RATE, DECAY, BETAS, EPSILON = 1e-3, 0.1, (0.9, 0.999), 1e-8  # MLX's AdamW in ``cases.py``


def linear(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Map [..., in] to [..., out] by a weight [out, in], and a bias where there is one."""
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def mlp(p: Params, x: jax.Array, layers: int, **_: int) -> jax.Array:
    """Map [batch, width] to logits, [batch, 10]: the MLP of ``cases.py``."""
    for i in range(layers - 1):
        x = jax.nn.relu(linear(p, f"layers.{i}", x))
    return linear(p, "head", x)


def layer_norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Normalize the last axis, as ``mlx.nn.LayerNorm`` does."""
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def attention(p: Params, name: str, x: jax.Array, heads: int) -> jax.Array:
    """Map [batch, seq, width] to the same: ``mlx.nn.MultiHeadAttention``, causal."""
    batch, seq, width = x.shape
    q, k, v = (
        linear(p, f"{name}.{part}_proj", x).reshape(batch, seq, heads, width // heads)
        for part in ("query", "key", "value")
    )
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(p, f"{name}.out_proj", y.reshape(batch, seq, width))


def gpt(p: Params, tokens: jax.Array, layers: int, heads: int, **_: int) -> jax.Array:
    """Map tokens, int32 [batch, seq], to logits, [batch, seq, vocab]: the GPT of ``cases.py``."""
    x = p["tokens.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
    for i in range(layers):
        name = f"blocks.layers.{i}"
        x = x + attention(p, f"{name}.attention", layer_norm(p, f"{name}.ln1", x), heads)
        hidden = jax.nn.relu(linear(p, f"{name}.linear1", layer_norm(p, f"{name}.ln2", x)))
        x = x + linear(p, f"{name}.linear2", hidden)
    return linear(p, "head", layer_norm(p, "blocks.ln", x))


class Training:
    """A jitted step whose arguments are donated: gradients, clipping and AdamW without bias correction."""

    def __init__(self, model: Logits, params: Params, max_grad_norm: float) -> None:
        def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
            logits = model(params, x).astype(jnp.float32)
            picked = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
            return (jax.nn.logsumexp(logits, -1) - picked).mean()

        def step(params: Params, m: Params, v: Params, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))
            scale = jnp.minimum(max_grad_norm / (norm + 1e-6), 1.0)
            grads = jax.tree.map(lambda g: g * scale, grads)
            m = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, m, grads)
            v = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, v, grads)
            params = jax.tree.map(
                lambda p, m, v: p * (1 - RATE * DECAY) - RATE * m / (jnp.sqrt(v) + EPSILON), params, m, v
            )
            return loss, params, m, v

        self.step = jax.jit(step, donate_argnums=(0, 1, 2))
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        self.state = params, zeros(params), zeros(params)

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Take a step; return the loss."""
        loss, *state = self.step(*self.state, x, y)
        self.state = tuple(state)
        return loss


def run_block(step: Training, batches: list[tuple[jax.Array, jax.Array]], count: int) -> float:
    """Do what ``timing.run_block`` does."""
    jax.block_until_ready((step(*batches[0]), step.state))
    start = time.perf_counter()
    for i in range(count):
        step(*batches[i % len(batches)])
    jax.block_until_ready(step.state)
    return 1e3 * (time.perf_counter() - start) / count


def main() -> None:
    """Build, say what was built, and take blocks of steps as asked."""
    folder = Path(sys.argv[1])
    case = json.loads((folder / "case.json").read_text())
    arrays = dict(np.load(folder / "arrays.npz").items())
    xs, ys = (arrays.pop(name) for name in ("x", "y"))
    batches = [(jnp.asarray(x), jnp.asarray(y)) for x, y in zip(xs, ys, strict=True)]
    params = {name[2:]: jnp.asarray(array) for name, array in arrays.items()}
    model = functools.partial({"MLP": mlp, "GPT": gpt}[case["model"]], **case["shape"])
    step = Training(model, params, case["max_grad_norm"])
    losses = [float(step(*batch)) for batch in batches]
    print(json.dumps({"framework": "JAX", "version": jax.__version__, "ways": {WAY: {"losses": losses}}}), flush=True)
    for line in sys.stdin:
        _, count = json.loads(line)
        print(json.dumps(run_block(step, batches, count)), flush=True)


if __name__ == "__main__":
    main()
