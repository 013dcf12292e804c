"""The memory plan against the peaks that MLX measures, and that making one changes nothing."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from conftest import Child
from faststep import MemoryPlan, Step
from helpers import SignedDescent, random_key, snapshot
from models import MODELS

TOLERANCE = 0.15

# Run in a child: a plan, then the peaks of the first update and of those after it.
MEASURE = """
    import json
    import faststep, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    from test_memory_plan import *

    mx.random.seed(0)
    model, batch = {model}
    optimizer = {optimizer}
    mx.eval(model.parameters(), batch)
    step = faststep.Step(model, optimizer, {loss}, {options})
    plan = step.memory_plan(*batch)

    def peak(steps):
        mx.reset_peak_memory()
        for _ in range(steps):
            step(*batch)
        step.synchronize()
        mx.synchronize()
        return mx.get_peak_memory()

    first = peak(step.accumulate)
    print(json.dumps([plan.first_peak, plan.steady_peak, first, peak(12)]))
"""


def mlp(width: int, hidden: int, batch: int, dtype: mx.Dtype = mx.float32) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make an MLP with three hidden layers and a batch for it."""
    sizes = [width, hidden, hidden, hidden, 16]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    model.set_dtype(dtype)
    return model, (mx.random.normal((batch, width)).astype(dtype), mx.random.randint(0, 16, (batch,)))


class Convolutions(nn.Module):
    """Convolutions with batch norm and strides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = [3, channels, 2 * channels, 4 * channels]
        self.convolutions = [
            nn.Conv2d(*pair, kernel_size=3, stride=1 + (pair[0] > 3), padding=1, bias=False)
            for pair in itertools.pairwise(sizes)
        ]
        self.norms = [nn.BatchNorm(size) for size in sizes[1:]]
        self.head = nn.Linear(sizes[-1], 16)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, height, width, 3] to logits [batch, 16]."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.relu(norm(convolution(x)))
        return self.head(x.mean(axis=(1, 2)))


def convolutions(channels: int, batch: int, size: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a network of convolutions and a batch for it."""
    return Convolutions(channels), (mx.random.normal((batch, size, size, 3)), mx.random.randint(0, 16, (batch,)))


class Transformer(nn.Module):
    """A masked encoder over tokens, whose output is its embedding where no head is asked for."""

    def __init__(self, vocabulary: int, dims: int, layers: int, head: bool, dropout: float, checkpoint: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dims)
        self.blocks = nn.TransformerEncoder(
            layers, dims, 4, mlp_dims=4 * dims, dropout=dropout, norm_first=True, checkpoint=checkpoint
        )
        self.head = nn.Linear(dims, vocabulary, bias=False) if head else None

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens [batch, seq] to logits [batch, seq, vocabulary]."""
        x = self.embedding(tokens)
        mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens.shape[1], x.dtype)
        x = self.blocks(x, mask)
        return self.head(x) if self.head else self.embedding.as_linear(x)


def transformer(
    vocabulary: int,
    dims: int,
    layers: int,
    batch: tuple[int, int],
    *,
    head: bool = True,
    dropout: float = 0.0,
    checkpoint: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a transformer and a batch for it."""
    model = Transformer(vocabulary, dims, layers, head, dropout, checkpoint)
    model.set_dtype(dtype)
    return model, (mx.random.randint(0, vocabulary, batch), mx.random.randint(0, vocabulary, batch))


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down, self.up = mx.random.normal((width, 8)), mx.zeros((8, width))
        self.base.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to [batch, width]."""
        return nn.relu(self.base(x) + (x @ self.down) @ self.up)


def adapted(width: int, layers: int, batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a frozen network with adapters and a batch for it."""
    model = nn.Sequential(*(Adapted(width) for _ in range(layers)))
    return model, (mx.random.normal((batch, width)), mx.random.randint(0, width, (batch,)))


def many(layers: int, width: int, batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a network of many small tensors and a batch for it."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, (mx.random.normal((batch, width)), mx.random.randint(0, width, (batch,)))


def cross_entropy(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return the mean loss."""
    return nn.losses.cross_entropy(model(x).astype(mx.float32), y, reduction="mean")


def checkpointed(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Compute the model's activations once more for the gradient."""
    return nn.losses.cross_entropy(nn.utils.checkpoint(model)(x), y, reduction="mean")


CASES: dict[str, tuple[str, str, str, str]] = {  # model and batch, optimizer, loss, options
    "mlp-sgd": ("mlp(256, 1024, 512)", "optim.SGD(1e-2)", "cross_entropy", ""),
    "mlp-batch-adam-clip": ("mlp(128, 256, 8192)", "optim.Adam(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "mlp-momentum-clip": ("mlp(256, 1024, 256)", "optim.SGD(1e-2, momentum=0.9)", "cross_entropy", "max_grad_norm=1.0"),
    "mlp-lion-all": ("mlp(512, 1024, 128)", "optim.Lion(1e-4)", "cross_entropy", "nonfinite='allow'"),
    "mlp-adamw-own": ("mlp(2048, 2304, 64)", "optim.AdamW(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "mlp-sgd-own": ("mlp(2048, 2304, 64)", "optim.SGD(1e-2)", "cross_entropy", ""),
    "mlp-bfloat16": ("mlp(256, 512, 512, mx.bfloat16)", "optim.AdamW(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "mlp-adafactor": ("mlp(512, 1024, 1024)", "optim.Adafactor()", "cross_entropy", ""),
    "mlp-plain": ("mlp(512, 1024, 1024)", "optim.AdamW(1e-3)", "cross_entropy", "compile=False"),
    "mlp-checkpoint": ("mlp(128, 256, 8192)", "optim.AdamW(1e-3)", "checkpointed", ""),
    "mlp-accumulate": ("mlp(256, 1024, 512)", "optim.AdamW(1e-3)", "cross_entropy", "accumulate=3, max_grad_norm=1.0"),
    "mlp-accumulate-muon": ("mlp(256, 1024, 512)", "optim.Muon(1e-3)", "cross_entropy", "accumulate=2"),
    "mlp-traced": ("mlp(256, 1024, 512)", "SignedDescent(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "mlp-average": ("mlp(512, 1024, 256)", "optim.SGD(1e-2)", "cross_entropy", "ema_decay=0.99"),
    "mlp-mixed": ("mlp(256, 512, 512)", "optim.Adam(1e-3)", "cross_entropy", "compute_dtype=mx.bfloat16"),
    "mlp-masters": (
        "mlp(256, 512, 512, mx.float16)",
        "optim.AdamW(1e-3)",
        "cross_entropy",
        "compute_dtype=mx.float16, accumulate=2, ema_decay=0.9",
    ),
    "convolutions": ("convolutions(16, 16, 32)", "optim.Adam(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "transformer-narrow": ("transformer(128, 64, 6, (2, 32))", "optim.AdamW(1e-3)", "cross_entropy", ""),
    "transformer-batch": ("transformer(256, 128, 2, (16, 128))", "optim.SGD(1e-2)", "cross_entropy", ""),
    "transformer-wide": (
        "transformer(512, 384, 2, (2, 64))",
        "optim.AdamW(1e-3)",
        "cross_entropy",
        "max_grad_norm=1.0",
    ),
    "transformer-dropout": ("transformer(256, 128, 2, (16, 64), dropout=0.1)", "optim.Adam(1e-3)", "cross_entropy", ""),
    "transformer-checkpoint": (
        "transformer(256, 128, 3, (16, 128), checkpoint=True)",
        "optim.AdamW(1e-3)",
        "cross_entropy",
        "",
    ),
    "transformer-bfloat16": (
        "transformer(256, 128, 2, (16, 64), dtype=mx.bfloat16)",
        "optim.AdamW(1e-3)",
        "cross_entropy",
        "",
    ),
    "tied-vocabulary": ("transformer(16000, 128, 1, (2, 64), head=False)", "optim.Lion(1e-4)", "cross_entropy", ""),
    "lora": ("adapted(1024, 4, 256)", "optim.AdamW(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "many-small": ("many(200, 64, 64)", "optim.AdamW(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
}


@pytest.mark.parametrize("name", CASES)
def test_plan_is_near_the_measured_peak(name: str, child: Child) -> None:
    """The peak is known before the first step."""
    model, optimizer, loss, options = CASES[name]
    done = child(MEASURE.format(model=model, optimizer=optimizer, loss=loss, options=options))
    first_planned, steady_planned, first, steady = json.loads(done.stdout)
    planned, measured = max(first_planned, steady_planned), max(first, steady)
    assert abs(planned - measured) < TOLERANCE * measured, (first_planned, steady_planned, first, steady)


def pair(optimizer: optim.Optimizer | None = None) -> tuple[Step, tuple[mx.array, ...]]:
    """Make a step that is ready to be planned, with its batch."""
    model, batch = mlp(32, 64, 8)
    mx.eval(model.parameters(), batch)
    return Step(model, optimizer or optim.AdamW(1e-2), cross_entropy), batch


@pytest.mark.parametrize("name", ["mlp", "conv", "gpt", "decorated", "lora", "lstm"])
@pytest.mark.parametrize("make", [lambda: optim.AdamW(1e-2), lambda: SignedDescent(1e-3)], ids=["native", "traced"])
def test_plan_changes_nothing(name: str, make: Callable[[], optim.Optimizer]) -> None:
    """Training goes on as if no plan had been made, before the first step and later."""
    case = MODELS[name]
    results = []
    for plans in (False, True):
        mx.random.seed(7)
        model, optimizer = case.make(), make()
        mx.eval(model.parameters())
        step = Step(model, optimizer, case.loss_fn)
        for batch in case.batches(3):
            if plans:
                before = snapshot(model, optimizer)
                plan = step.memory_plan(*batch)
                after = snapshot(model, optimizer)
                assert before.keys() == after.keys()
                assert all((before[key] == after[key]).all() for key in before)
                assert plan.peak > plan.parameters > 0
            step(*batch)
        results.append(snapshot(model, optimizer))
        assert len(step.stats.traces) == 1
        assert step.stats.steps == 3
    assert all((results[0][key] == results[1][key]).all() for key in results[0])


def test_plan_takes_no_memory_and_evaluates_nothing() -> None:
    """A model and a batch that have not been computed yet are not computed for a plan."""
    before = mx.get_active_memory()
    model, batch = mlp(512, 4096, 1 << 14)
    key = random_key()
    plan = Step(model, optim.Adam(1e-3), cross_entropy).memory_plan(*batch)
    assert mx.get_active_memory() - before < 1 << 16
    assert random_key() is key
    assert plan.parameters == 4 * (512 * 4096 + 2 * 4096**2 + 16 * 4096 + 3 * 4096 + 16)
    assert plan.optimizer_state >= 2 * plan.parameters
    assert plan.batch == batch[0].nbytes + batch[1].nbytes


def test_the_plan_s_trace_is_the_first_step_s() -> None:
    """The loss is called once for a plan and the steps after it."""
    calls = []

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        calls.append(x.shape)
        return cross_entropy(model, x, y)

    model, batch = mlp(32, 64, 8)
    step = Step(model, optim.Adam(1e-3), loss_fn)
    assert step.memory_plan(*batch) == step.memory_plan(*batch)
    assert step.stats.steps == 0
    step(*batch)
    step.memory_plan(*batch)
    assert len(calls) == 1


def test_plan_does_not_initialise_the_optimizer() -> None:
    """As long as there has been no step, the optimizer's state is what its constructor left."""
    optimizer = optim.Adam(1e-3)
    before = set(optimizer.state)
    step, batch = pair(optimizer)
    step.memory_plan(*batch)
    assert set(optimizer.state) == before


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((mx.zeros((8, 31)), mx.zeros((8,), mx.int32)), ValueError, "shape"),
        ((mx.zeros((8, 32)),), TypeError, "missing 1 required positional argument"),
        ((mx.zeros((8, 32)), object()), TypeError, "y"),
    ],
)
def test_a_bad_batch_raises_what_a_step_raises(batch: tuple[object, ...], error: type[Exception], message: str) -> None:
    """A plan fails as the step would have, and leaves everything as it was."""
    step, good = pair()
    before = snapshot(step.model, step.optimizer)
    with pytest.raises(error, match=message) as planned:
        step.memory_plan(*batch)
    with pytest.raises(error, match=message) as stepped:
        step(*batch)
    assert str(planned.value) == str(stepped.value)
    after = snapshot(step.model, step.optimizer)
    assert all((before[key] == after[key]).all() for key in before)
    step.memory_plan(*good)


def test_what_does_not_fit_is_warned_of() -> None:
    """A batch of more bytes than any machine has is planned for all the same."""
    model, _ = mlp(1 << 20, 64, 1)
    step = Step(model, optim.SGD(1e-2), cross_entropy)
    batch = mx.zeros((1 << 22, 1 << 20)), mx.zeros((1 << 22,), mx.int32)
    with pytest.warns(RuntimeWarning, match="a step will take up to"):
        plan = step.memory_plan(*batch)
    assert not plan.fits
    assert str(plan).splitlines()[-1].startswith("does not fit into")


def test_plan_prints_as_a_table() -> None:
    """Every number is there, in megabytes and as a share of the device's memory."""
    step, batch = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = step.memory_plan(*batch)
    assert isinstance(plan, MemoryPlan)
    assert plan.fits
    lines = str(plan).splitlines()
    assert [line[:16].strip() for line in lines[:4]] == ["parameters", "optimizer state", "gradients", "activations"]
    assert all(line.endswith("%") for line in lines[:-1])
    assert lines[-1].startswith("fits into")


def test_a_loss_that_reads_values_is_planned_uncompiled() -> None:
    """What cannot be traced is planned as it will run, with the warning that a step gives."""

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        loss = cross_entropy(model, x, y)
        return loss if loss.item() < 1e9 else 0 * loss

    model, batch = mlp(32, 64, 8)
    mx.eval(model.parameters(), batch)
    step = Step(model, optim.Adam(1e-3), loss_fn)
    with pytest.warns(RuntimeWarning, match="cannot be compiled"):
        plan = step.memory_plan(*batch)
    assert plan.peak > 4 * plan.parameters
    step(*batch)
    assert step.stats.way == "plain"
