"""What CUDA computes by kernels of the package's own in place of MLX's: as near to float64. Needs an NVIDIA GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, profile
from mlx.utils import tree_flatten
from support.cuda import NEEDS_CUDA

pytestmark = [NEEDS_CUDA, pytest.mark.timeout(300)]  # a first kernel of each kind costs seconds of CUDA's compiler
STEPS = 2
VOCABULARY = 72


class Model(nn.Module):
    """Embedding, encoder and output layer."""

    def __init__(self, width: int, heads: int, layers: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(seq, width)
        # no ReLU: one that a rounding error switches changes gradients by a position's whole share
        self.blocks = nn.TransformerEncoder(layers, width, num_heads=heads, activation=nn.gelu)
        self.head = nn.Linear(width, VOCABULARY)

    def __call__(self, tokens: mx.array, mask: str | mx.array | None) -> mx.array:
        """Map tokens, [batch, seq], to logits."""
        x = self.tokens(tokens) + self.positions(mx.arange(tokens.shape[1]))
        return self.head(self.blocks(x, mask))


@dataclass(frozen=True)
class Case:
    """A model, its batch, and which operations of MLX are no longer there: name, dtype and shape."""

    width: int
    heads: int
    batch: int
    seq: int
    gone: tuple[str, ...]
    mask: str | None = "causal"
    dtype: mx.Dtype = mx.float32
    layers: int = 2


ARRAY = "array"  # an additive one
NORMED = "LayerNormVJP "
ROW_SUMS = r"Sum float32 \((\d+,){3}1\)"  # of the softmax's gradient
SOFTMAX = (r"Softmax float32 \((\d+,){3}", ROW_SUMS)
PRODUCTS = r"Matmul float32 \((\d+,){3}"
COLUMNS = r"Sum \w+ \((1,)+\d\d+\)"  # over what is no longer there: the gradients of biases
CASES = {
    "long": Case(64, 4, 4, 64, (*SOFTMAX, PRODUCTS, NORMED, COLUMNS)),
    "longer": Case(384, 6, 2, 256, (*SOFTMAX, PRODUCTS, NORMED, COLUMNS)),
    "longer than a warp keeps": Case(32, 2, 1, 1100, (*SOFTMAX, PRODUCTS, NORMED, COLUMNS), layers=1),
    "odd": Case(96, 2, 3, 45, (*SOFTMAX, PRODUCTS, NORMED, COLUMNS)),
    "wide": Case(768, 12, 2, 40, (*SOFTMAX, PRODUCTS, NORMED, COLUMNS)),
    "wider than a warp keeps": Case(1056, 4, 2, 40, (*SOFTMAX, COLUMNS)),
    "few positions": Case(64, 4, 2, 20, (*SOFTMAX, NORMED, PRODUCTS)),
    "one head": Case(32, 1, 2, 12, (*SOFTMAX, NORMED, PRODUCTS)),
    "mask in an array": Case(64, 4, 2, 72, (*SOFTMAX, PRODUCTS, NORMED, COLUMNS), mask=ARRAY),
    "mask in an array, bfloat16": Case(64, 2, 2, 128, (NORMED, COLUMNS), mask=ARRAY, dtype=mx.bfloat16),
    "no mask": Case(64, 4, 4, 40, (*SOFTMAX, PRODUCTS, NORMED, COLUMNS), mask=None),
    "bfloat16": Case(64, 2, 2, 128, (NORMED, COLUMNS), dtype=mx.bfloat16),
}


def new_model(case: Case) -> Model:
    """Build the model of a case, equal each time."""
    mx.random.seed(3)
    model = Model(case.width, case.heads, case.layers, case.seq)
    model.set_dtype(case.dtype)
    mx.eval(model.parameters())
    return model


def loss_of(case: Case) -> Callable[[nn.Module, mx.array, mx.array], mx.array]:
    """Return the mean cross entropy in nats, in float32 at least."""

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        mask: str | mx.array | None = case.mask
        if mask == ARRAY:
            made = nn.MultiHeadAttention.create_additive_causal_mask(x.shape[1])
            mask = made.astype(model.head.weight.dtype)
        logits = model(x, mask)
        wide = logits if logits.dtype == mx.float64 else logits.astype(mx.float32)
        return nn.losses.cross_entropy(wide, y, reduction="mean")

    return loss_fn


# SGD, whose parameters move by the gradients: Adam divides the error of a small one by its size
def sgd() -> optim.Optimizer:
    """Return the optimizer."""
    return optim.SGD(0.1, momentum=0.9)


def trained(case: Case, model: Model, batches: list[tuple[mx.array, mx.array]]) -> list[list[float]]:
    """Train as plain MLX does; return loss and norm of each step."""
    optimizer, found = sgd(), []
    for x, y in batches:
        loss, grads = nn.value_and_grad(model, loss_of(case))(model, x, y)
        grads, norm = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        found.append([loss.item(), norm.item()])
    return found


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the parameters by name, as float64."""
    with mx.stream(mx.cpu):
        return {name: np.array(value.astype(mx.float64)) for name, value in tree_flatten(model.parameters())}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_is_as_near_to_float64_as_plain_mlx(case: Case) -> None:
    rng = np.random.default_rng(5)
    tokens = mx.array(rng.integers(VOCABULARY, size=(STEPS, case.batch, case.seq + 1), dtype=np.int32))
    batches = [(tokens[i, :, :-1], tokens[i, :, 1:]) for i in range(STEPS)]
    mx.eval(batches)
    exact = new_model(case)
    with mx.stream(mx.cpu):
        exact.set_dtype(mx.float64)
        wanted = np.array(trained(case, exact, batches))
    plain, ours = new_model(case), new_model(case)
    near = np.abs(np.array(trained(case, plain, batches)) / wanted - 1)
    step = Step(ours, sgd(), loss_of(case), max_grad_norm=1.0)
    got = [(out.loss.item(), out.grad_norm.item()) for out in (step(*batch) for batch in batches)]  # type: ignore[union-attr]
    off = np.abs(np.array(got) / wanted - 1)
    half = case.dtype != mx.float32
    # of two numbers plain MLX's may be near by luck, of all elements below it is not
    luck = 1e-3 if half else 1e-4 if os.environ.get("MLX_ENABLE_TF32") != "0" else 1e-6
    assert (off <= 3 * near.max(axis=0) + luck).all(), (off, near)
    ends = {name: arrays(model) for name, model in {"exact": exact, "plain": plain, "ours": ours}.items()}
    for name, value in ends["exact"].items():
        rounding = np.abs(value).max() * (2**-8 if half else 2**-23)
        allowed = 3 * np.abs(ends["plain"][name] - value).max() + rounding
        assert np.abs(ends["ours"][name] - value).max() <= allowed, name
    with profile(step) as found:
        pass
    found.measure(*batches[0])
    shown = [f"{each.name} {each.output}" for each in found.operations]
    assert any(each.startswith("faststep_") for each in shown)
    gone = [*case.gone]
    if PRODUCTS in gone or case.mask == ARRAY:
        gone.append(rf".* \((\d+,){{2}}{case.seq},{case.seq}\)")  # scores, masks
    assert not [each for each in shown for pattern in gone if re.match(pattern, each)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("replay", [False, True], ids=["evaluated", "replayed"])
def test_relu_and_the_bias_before_it(replay: bool, dtype: mx.Dtype) -> None:
    def new_model() -> nn.Module:
        mx.random.seed(5)
        model = nn.Sequential(nn.Linear(96, 128), nn.relu, nn.Linear(128, 128), nn.relu, nn.Linear(128, 8))
        model.set_dtype(dtype)
        mx.eval(model.parameters())
        return model

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.mean(mx.square(model(x) - 1).astype(mx.float32))

    x = mx.random.normal((3, 70, 96), key=mx.random.key(2)).astype(dtype)
    plain, ours, optimizer = new_model(), new_model(), sgd()
    step = Step(ours, sgd(), loss_fn, replay=replay)
    for _ in range(4):
        loss, grads = nn.value_and_grad(plain, loss_fn)(plain, x)
        optimizer.update(plain, grads)
        mx.eval(plain.parameters(), optimizer.state)
        out = step(x)
        assert abs(out.loss.item() - loss.item()) <= (1e-2 if dtype == mx.bfloat16 else 1e-4) * loss.item()  # type: ignore[union-attr]
    near = 2**-6 if dtype == mx.bfloat16 else 1e-4
    wanted = arrays(plain)
    for name, value in arrays(ours).items():
        assert np.abs(value - wanted[name]).max() <= near * np.abs(wanted[name]).max(), name
    if not replay:
        with profile(step) as found:
            pass
        found.measure(x)
        shown = [f"{each.name} {each.output}" for each in found.operations]
        assert not [each for each in shown if re.match(r"Sum \w+ \((1,)*128\)", each)], shown
    else:
        assert "not replayed" not in str([trace.replay for trace in step.stats.traces])


def test_the_same_where_products_are_in_tf32() -> None:
    environment = os.environ | {"MLX_ENABLE_TF32": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", __file__]
    run = subprocess.run(
        [*command, "-k", "long or wide or mask"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:]
