"""A step that is recorded and launched again, beside the same one that MLX evaluates. On a CPU it has the same bits."""

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
from support.cuda import IS_CUDA, NEEDS_CUDA
from support.helpers import HOST_SCHEDULES, NATIVE, Row, assert_close, snapshot, to_numpy
from support.models import MODELS, WIDTH, cross_entropy
from support.places import Child
from support.replays import NEEDS_REPLAY, STEPS, is_captured, replayed, tolerance
from support.table import TABLE

pytestmark = [NEEDS_REPLAY, pytest.mark.timeout(600)]  # a first kernel of each kind costs seconds of CUDA's compiler

SHORT = [
    *(Row("mlp", optimizer, [None, 0.05][i % 2]) for i, optimizer in enumerate(NATIVE)),
    *(Row(model, "adamw", 0.05) for model in MODELS if model not in ("mlp", "decorated")),
    *(Row(model, "sgd-momentum", accumulate=2) for model in ("mlp", "conv", "bf16", "mixed", "lora")),
    *(Row(model, "adam", 0.05, 0.01) for model in ("conv", "tied", "mixed")),
]
ROWS = (
    list(dict.fromkeys([*SHORT, *(row for row in TABLE if row.way == "native")])) if IS_CUDA else SHORT
)  # on a CPU each has the same bits, or none


def trained(row: Row, replay: bool, **options: Any) -> tuple[dict[str, np.ndarray], Step]:
    """Train on a few batches; the state and all that came out, and the step."""
    pair = row.new()
    step = Step(*pair, row.case.loss_fn, **row.options, **options, replay=replay)
    mx.random.seed(11)
    outs = [step(*batch) for batch in row.case.batches(STEPS * row.accumulate)]
    state = snapshot(*pair, kept=step.state)
    state["losses"] = np.array([float(out.loss) for out in outs])
    state["norms"] = np.array([0.0 if out.grad_norm is None else float(out.grad_norm) for out in outs])
    return state, step


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_replayed_run_is_the_ordinary_one(row: Row) -> None:
    wanted, _ = trained(row, replay=False)
    got, step = trained(row, replay=True)
    assert is_captured(step), replayed(step)
    assert_close(got, wanted, tolerance(row.case.tolerance))


class Selective(nn.Module):
    """A selective state space (Gu and Dao, 2023), its scan one step after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.rate = nn.Linear(64, 34, bias=False), nn.Linear(2, 64)
        self.decay = mx.broadcast_to(mx.log(mx.arange(1.0, 17.0)), (64, 16))

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, seq, 64] to the same."""
        rate, b, c = mx.split(self.project(x), [2, 18], axis=-1)
        rate = mx.logaddexp(self.rate(rate), 0.0)  # its gradient needs what a product with a workspace gave
        decays = mx.exp(-rate[..., None] * mx.exp(self.decay))
        inputs = (rate * x)[..., None] * b[:, :, None]
        state, states = mx.zeros((x.shape[0], 64, 16)), []
        for t in range(x.shape[1]):
            state = decays[:, t] * state + inputs[:, t]
            states.append(state)
        return (mx.stack(states, axis=1) @ c[..., None]).squeeze(-1) + x


def test_memory_is_not_given_away_while_a_gradient_needs_it() -> None:
    ends = []
    for replay in (False, True):
        mx.random.seed(5)
        model, x = Selective(), mx.random.normal((4, 32, 64))
        step = Step(model, optim.Adam(1e-3), lambda model, x: model(x).square().mean(), replay=replay)
        ends.append([step(x).loss.item() for _ in range(STEPS)])
    assert is_captured(step), replayed(step)
    np.testing.assert_allclose(ends[1], ends[0], rtol=tolerance(1e-4))


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": mx.bfloat16},
        {"compute_dtype": mx.float16},
        {"ema_decay": 0.9},
        {"compute_dtype": mx.bfloat16, "ema_decay": 0.9, "max_loss": 1e3},
        {"nonfinite": "allow"},
        {"in_flight": 0},
    ],
    ids=str,
)
def test_options_are_those_of_the_ordinary_step(options: dict[str, Any], optimizer: str) -> None:
    row = Row("conv", optimizer, 0.05, accumulate=2 if "ema_decay" in options else 1)
    wanted, _ = trained(row, replay=False, **options)
    got, step = trained(row, replay=True, **options)
    assert is_captured(step), replayed(step)
    assert_close(got, wanted, tolerance(5e-3 if "compute_dtype" in options else row.case.tolerance))


def test_random_numbers_and_buffers_are_those_of_the_ordinary_step() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(8, 16), nn.BatchNorm(16), nn.Dropout(0.5), nn.Linear(16, 4)]

        def __call__(self, x: mx.array) -> mx.array:
            for layer in self.layers:
                x = layer(x)
            return x + 0.01 * mx.random.normal(x.shape)

    ends = []
    for replay in (False, True):
        mx.random.seed(3)
        model, optimizer = Noisy(), optim.Adam(1e-3)
        step = Step(model, optimizer, cross_entropy, replay=replay)
        x, y = mx.random.normal((32, 8)), mx.random.randint(0, 4, (32,))
        losses = [step(x, y).loss for _ in range(STEPS)]
        drawn = mx.random.uniform(shape=(3,))  # the state goes on behind the step
        ends.append(
            snapshot(model, optimizer) | {"losses": np.array([float(a) for a in losses]), "drawn": to_numpy(drawn)}
        )
    assert len(set(ends[1]["losses"].tolist())) == STEPS
    assert is_captured(step), replayed(step)
    assert_close(ends[1], ends[0], tolerance(2e-6))


def test_shapes_may_change_back_and_forth() -> None:
    row = Row("mlp", "adamw", 0.05)
    ends = []
    for replay in (False, True):
        pair = row.new()
        step = Step(*pair, row.case.loss_fn, max_grad_norm=0.05, replay=replay)
        losses = []
        for i, (x, y) in enumerate(row.case.batches(40)):
            n = (x.shape[0], 3, 5)[i % 3] if i < 30 else x.shape[0]
            losses.append(step(x[:n] if i % 2 else mx.contiguous(x[:n].T).T, y[:n]).loss)
        ends.append(snapshot(*pair) | {"losses": np.array([float(a) for a in losses])})
    assert len(step.stats.traces) == 3
    assert is_captured(step), replayed(step)
    assert_close(ends[1], ends[0], tolerance(row.case.tolerance))


def test_auxiliary_outputs_and_what_the_loss_reaches() -> None:
    masks = [mx.array(np.random.default_rng(i).integers(0, 2, 8).astype(np.float32)) for i in range(4)]
    ends = []
    for replay in (False, True):
        mx.random.seed(3)
        model, optimizer = nn.Linear(8, 4), optim.SGD(1e-2)
        current = {"mask": masks[0], "scale": 1.0}

        def loss(model: nn.Module, x: mx.array, y: mx.array, current: dict[str, Any] = current) -> tuple[mx.array, ...]:
            logits = model(x * current["mask"]) * current["scale"]
            return nn.losses.cross_entropy(logits, y, reduction="mean"), logits, model.weight

        step = Step(model, optimizer, loss, replay=replay)
        x, y = mx.random.normal((16, 8)), mx.random.randint(0, 4, (16,))
        outs = []
        for i in range(14):
            current["mask"] = masks[i % 4]
            outs.append(step(x, y))
        kept = {
            f"{i} {j}": to_numpy(array) for i, out in enumerate(outs) for j, array in enumerate((out.loss, *out.aux))
        }
        ends.append(snapshot(model, optimizer) | kept)
    assert is_captured(step), replayed(step)
    assert_close(ends[1], ends[0], tolerance(2e-6))


def test_steps_and_other_work_share_the_device() -> None:
    rows = [Row("mlp", "adamw", 0.05), Row("conv", "lion")]
    ends = []
    for replay in (False, True):
        pairs = [row.new() for row in rows]
        steps = [
            Step(*pair, row.case.loss_fn, **row.options, replay=replay) for row, pair in zip(rows, pairs, strict=True)
        ]
        noise = mx.ones((64, 64))
        for batches in zip(*(row.case.batches(12) for row in rows), strict=True):
            for step, batch in zip(steps, batches, strict=True):
                noise = mx.tanh(noise @ noise)  # memory that comes and goes, lazily and not
                mx.async_eval(noise)
                step(*batch)
        second = {f"second {name}": array for name, array in snapshot(*pairs[1]).items()}
        ends.append(snapshot(*pairs[0]) | second | {"noise": np.array(noise)})
        assert not replay or all(is_captured(step) for step in steps)
    assert_close(ends[1], ends[0], tolerance(2e-6))


def test_auto_captures_once_the_kernels_are_there_and_false_never() -> None:
    row = Row("mlp", "adamw", 0.05)
    batch, *_ = row.case.batches(1)
    auto, never = (Step(*row.new(), row.case.loss_fn, replay=replay) for replay in ("auto", False))
    auto(*batch)
    assert replayed(auto) == ["not replayed yet"]
    while not is_captured(auto):  # on a CPU a compiler makes the kernels meanwhile
        auto(*batch)
    for _ in range(2 * STEPS):
        never(*batch)
    assert replayed(never) == ["None"]


class Blocks(nn.Module):
    """Layers that are computed once more for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to the same."""
        for layer in self.layers:
            x = nn.utils.checkpoint(layer)(x)
        return x


def test_the_arrays_of_a_capture_make_no_other_graph() -> None:
    """`depends` is computed on the stream of what it passes on, and a checkpoint passes parameters on."""
    ends = []
    for replay in (False, True):
        mx.random.seed(0)
        step = Step(Blocks(), optim.Adam(1e-3), lambda model, x: model(x).square().mean(), replay=replay)
        ends.append([step(mx.ones((4, WIDTH))).loss.item() for _ in range(2 * STEPS)])
    assert step.stats.mode == "called"
    assert is_captured(step), replayed(step)
    assert len(step.stats.traces) == 1, step.stats.traces
    np.testing.assert_allclose(ends[1], ends[0], rtol=tolerance(1e-5))


def test_host_schedules_are_called_at_each_step() -> None:
    for name in HOST_SCHEDULES[:1]:  # with the other one the step is not compiled
        wanted, _ = trained(Row("mlp", name), replay=False)
        got, step = trained(Row("mlp", name), replay=True)
        assert is_captured(step), replayed(step)
        assert_close(got, wanted, tolerance(2e-6))


KERNELS = """
import mlx.core as mx
from faststep import Step, _core
from support.helpers import Row

row = Row("mlp", "adamw", 0.05)
step = Step(*row.new(), row.case.loss_fn, max_grad_norm=0.05)
losses = [step(*batch).loss.item() for batch in row.case.batches(2)]
print(_core.compiled_kernels(), losses)
"""


@NEEDS_CUDA
def test_kernels_are_kept_for_the_next_process(child: Child, tmp_path: Path) -> None:
    cache, own = tmp_path / "cache", tmp_path / "own"
    kept = {"XDG_CACHE_HOME": str(cache), "FASTSTEP_KERNELS": "1"}
    first, second, mlx_s, others = (
        child(KERNELS, **environment).stdout.split(maxsplit=1)
        for environment in (kept, kept, kept | {"MLX_PTX_CACHE_DIR": str(own)}, kept | {"FASTSTEP_KERNELS": "0"})
    )
    assert first[1] == second[1] == mlx_s[1]
    np.testing.assert_allclose(json.loads(others[1]), json.loads(first[1]), rtol=1e-6)  # sums in another order
    files = list(cache.rglob("*.cubin"))
    assert len(files) == int(first[0]) > 0
    assert not [file for file in cache.rglob("*") if file.name.startswith("tmp_")]
    assert int(second[0]) == 0
    assert int(mlx_s[0]) == int(first[0])
    assert list(own.glob("*.ptx"))  # those of MLX: it keeps no kernels of others
    files[0].write_bytes(files[0].read_bytes()[:-100])  # as a disk that was full leaves it
    assert child(KERNELS, **kept).stdout.split(maxsplit=1) == ["1", first[1]]


# Every model's captured step, by so many threads as the environment says.
THREADS = """
import hashlib
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np
from mlx.utils import tree_flatten
from faststep import Step
from support.helpers import Row, run, taking
from support.models import MODELS
from support.replays import is_captured, replayed

def hashed(name, step, arrays):
    assert is_captured(step), (name, replayed(step))
    print(name, hashlib.sha256(b"".join(np.array(array).tobytes() for array in arrays)).hexdigest())

for name in MODELS:
    row = Row(name, "adamw", 0.1)
    pair = row.new()
    step = Step(*pair, row.case.loss_fn, max_grad_norm=0.1, replay=True)
    hashed(name, step, run(row, pair, taking(step), 8).values())

mx.random.seed(0)
model = nn.TransformerEncoder(2, 96, num_heads=4, norm_first=True)
step = Step(model, optim.AdamW(1e-3), lambda model, x: mx.square(model(x, None)).mean(), max_grad_norm=1.0, replay=True)
for number in range(30):
    step(mx.random.normal((4, 32, 96), key=mx.random.key(number)))
hashed("large", step, [value for _, value in tree_flatten([model.parameters(), step.optimizer.state])])
"""


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="a CPU's captured step")
def test_several_threads_have_the_bits_of_one(child: Child) -> None:
    ends = {threads: child(THREADS, OPENBLAS_NUM_THREADS=threads).stdout for threads in ("1", "2", "8")}
    assert len(set(ends.values())) == 1, ends
