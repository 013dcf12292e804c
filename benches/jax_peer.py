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
    """Map [batch, width] to logits, [batch, 10]: ``MLP`` of ``models.py``."""
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
    """Map tokens, int32 [batch, seq], to logits, [batch, seq, vocab]: ``GPT`` of ``models.py``."""
    x = p["tokens.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
    for i in range(layers):
        name = f"blocks.layers.{i}"
        x = x + attention(p, f"{name}.attention", layer_norm(p, f"{name}.ln1", x), heads)
        hidden = jax.nn.relu(linear(p, f"{name}.linear1", layer_norm(p, f"{name}.ln2", x)))
        x = x + linear(p, f"{name}.linear2", hidden)
    return linear(p, "head", layer_norm(p, "blocks.ln", x))


def rms_norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Scale the last axis, as ``mlx.nn.RMSNorm`` does."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"]


def block(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Map [batch, width] to the same: ``Block`` of ``models.py``."""
    hidden = jax.nn.silu(linear(p, f"{name}.up", rms_norm(p, f"{name}.norm", x)))
    return linear(p, f"{name}.down", hidden)


def checkpointed(p: Params, x: jax.Array, layers: int, **_: int) -> jax.Array:
    """Map [batch, width] to logits, [batch, 10]: ``Checkpointed`` of ``models.py``."""
    for i in range(layers):
        x = jax.checkpoint(block, static_argnums=1)(p, f"blocks.{i}", x)
    return linear(p, "head", x)


def convolution(p: Params, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    """Map [batch, height, width, in] to as many or half the pixels, with batch norm; put new statistics into `p`."""
    places = ("NHWC", "OHWI", "NHWC")
    x = jax.lax.conv_general_dilated(
        x, p[f"{name}.conv.weight"], (stride, stride), [(1, 1)] * 2, dimension_numbers=places
    )
    mean, var, norm = x.mean((0, 1, 2)), x.var((0, 1, 2)), f"{name}.norm"
    unbiased = var * (x[..., 0].size / (x[..., 0].size - 1))
    for key, new in (("mean", mean), ("var", unbiased)):
        p[f"{norm}.running_{key}"] = 0.9 * p[f"{norm}.running_{key}"] + 0.1 * new
    return p[f"{norm}.weight"] * ((x - mean) * jax.lax.rsqrt(var + 1e-5)) + p[f"{norm}.bias"]


def resnet(p: Params, x: jax.Array, blocks: int, width: int) -> jax.Array:
    """Map [batch, 32, 32, 3] to logits, [batch, 10]: ``ResNet`` of ``models.py``."""
    x = jax.nn.relu(convolution(p, "stem", x))
    for i in range(3 * blocks):
        channels = width << (i // blocks)
        stride = channels // x.shape[-1]
        y = jax.nn.relu(convolution(p, f"blocks.{i}.first", x, stride))
        y = convolution(p, f"blocks.{i}.second", y)
        x = jnp.pad(x[:, ::stride, ::stride], [(0, 0)] * 3 + [(0, channels - x.shape[-1])])
        x = jax.nn.relu(x + y)
    return linear(p, "head", x.mean((1, 2)))


def lstm(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Map [batch, seq, width] to the same: ``mlx.nn.LSTM``."""

    def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, kept = carry
        i, f, g, o = jnp.split(x + hidden @ p[f"{name}.Wh"].T, 4, -1)
        kept = jax.nn.sigmoid(f) * kept + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(kept)
        return (hidden, kept), hidden

    zeros = jnp.zeros_like(x[:, 0])
    _, y = jax.lax.scan(cell, (zeros, zeros), (x @ p[f"{name}.Wx"].T + p[f"{name}.bias"]).swapaxes(0, 1))
    return y.swapaxes(0, 1)


def recurrent(p: Params, tokens: jax.Array, layers: int, **_: int) -> jax.Array:
    """Map tokens, int32 [batch, seq], to logits, [batch, seq, vocab]: ``Recurrent`` of ``models.py``."""
    x = p["tokens.weight"][tokens]
    for i in range(layers):
        x = lstm(p, f"layers.{i}", x)
    return linear(p, "head", x)


def rope(x: jax.Array) -> jax.Array:
    """Rotate [batch, seq, heads, size] by position, as ``mlx.nn.RoPE`` does."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def grouped_attention(p: Params, name: str, x: jax.Array, size: int) -> jax.Array:
    """Map [batch, seq, width] to the same: ``Attention`` of ``models.py``, with heads of so many channels."""
    q, k, v = (linear(p, f"{name}.{part}", x).reshape(*x.shape[:2], -1, size) for part in ("query", "key", "value"))
    y = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
    return linear(p, f"{name}.out", y.reshape(x.shape))


def swiglu(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Map [..., width] to the same: ``SwiGLU`` of ``models.py``."""
    return linear(p, f"{name}.down", jax.nn.silu(linear(p, f"{name}.gate", x)) * linear(p, f"{name}.up", x))


def mixture(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Map [batch, seq, width] to the same: ``Experts`` of ``models.py``.

    All experts see all tokens: on a CPU that is faster than ``jax.lax.ragged_dot`` over sorted ones.
    """
    gate, up, down = (p[f"{name}.{part}"] for part in ("gate", "up", "down"))
    scores = jax.nn.softmax(linear(p, f"{name}.router", x))
    weights, chosen = jax.lax.top_k(scores, 2)
    shares = (jax.nn.one_hot(chosen, len(gate)) * weights[..., None]).sum(-2)
    y = jax.nn.silu(jnp.einsum("bsd,ehd->ebsh", x, gate)) * jnp.einsum("bsd,ehd->ebsh", x, up)
    return jnp.einsum("ebsh,bse,edh->bsd", y, shares, down)


def llama(p: Params, tokens: jax.Array, layers: int, width: int, heads: int, experts: int = 0, **_: int) -> jax.Array:
    """Map tokens, int32 [batch, seq], to logits, [batch, seq, vocab]: ``Llama`` of ``models.py``."""
    feed_forward = mixture if experts else swiglu
    x = p["tokens.weight"][tokens]
    for i in range(layers):
        name = f"layers.{i}"
        x = x + grouped_attention(p, f"{name}.attention", rms_norm(p, f"{name}.before_attention", x), width // heads)
        x = x + feed_forward(p, f"{name}.mlp", rms_norm(p, f"{name}.before_mlp", x))
    return rms_norm(p, "norm", x) @ p["tokens.weight"].T


MODELS = {
    "MLP": mlp,
    "GPT": gpt,
    "Checkpointed": checkpointed,
    "ResNet": resnet,
    "Recurrent": recurrent,
    "Llama": llama,
}


class Training:
    """A jitted step whose arguments are donated: gradients, clipping and AdamW without bias correction."""

    def __init__(self, model: Logits, params: Params, max_grad_norm: float) -> None:
        def loss_fn(params: Params, running: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Params]:
            p = {**params, **running}
            logits = model(p, x).astype(jnp.float32)
            picked = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
            return (jax.nn.logsumexp(logits, -1) - picked).mean(), {name: p[name] for name in running}

        def step(params: Params, running: Params, m: Params, v: Params, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
            (loss, running), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, running, x, y)
            norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))
            scale = jnp.minimum(max_grad_norm / (norm + 1e-6), 1.0)
            grads = jax.tree.map(lambda g: g * scale, grads)
            m = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, m, grads)
            v = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, v, grads)
            params = jax.tree.map(
                lambda p, m, v: p * (1 - RATE * DECAY) - RATE * m / (jnp.sqrt(v) + EPSILON), params, m, v
            )
            return loss, params, running, m, v

        self.step = jax.jit(step, donate_argnums=(0, 1, 2, 3))
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        running = {name: params.pop(name) for name in list(params) if "running_" in name}
        self.state = params, running, zeros(params), zeros(params)

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
    model = functools.partial(MODELS[case["model"]], **case["shape"])
    step = Training(model, params, case["max_grad_norm"])
    losses = [float(step(*batch)) for batch in batches]
    print(json.dumps({"framework": "JAX", "version": jax.__version__, "ways": {WAY: {"losses": losses}}}), flush=True)
    for line in sys.stdin:
        _, count = json.loads(line)
        print(json.dumps(run_block(step, batches, count)), flush=True)


if __name__ == "__main__":
    main()
