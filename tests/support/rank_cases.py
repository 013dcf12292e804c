"""Cases of a step with a group, each run by every rank of a ring: `python rank_cases.py PATTERN` in each process."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import RankError, Step, fast_step
from faststep.checkpoints import CheckpointError, Checkpoints
from faststep.data import Loader
from faststep.loggers import Progress
from faststep.metrics import LossWithMetrics, OfAll, scikit_learn
from faststep.report import read_log
from faststep.training import Callback, Trainer, TrainingError, validate

from support.helpers import Pair, flat
from support.plain_loop import PlainLoop, Rules

GROUP = mx.distributed.init()
RANK, SIZE = GROUP.rank(), GROUP.size()
WIDTH = 8
FOLDER = Path(sys.argv[2] if len(sys.argv) > 2 else ".")
Batch = tuple[mx.array, ...]
Case = Callable[[], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def frozen() -> nn.Module:
    model = sequential()
    model.layers[0].freeze()
    return model


def large() -> nn.Module:
    """Make one of more gradients than a message takes where ranks share few processors."""
    return nn.Sequential(nn.Linear(WIDTH, 800), nn.Linear(800, 800), nn.Linear(800, WIDTH))


def pair(make: Callable[[], nn.Module] = sequential, optimizer: Any = None) -> Pair:
    mx.random.seed(1)
    model = make()
    mx.eval(model.parameters())
    return model, optimizer() if optimizer else optim.AdamW(1e-2)


def mean_loss(model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
    out = model(x)
    return mx.square(out - y).mean(), out.sum()


def weighted_loss(model: nn.Module, x: mx.array, y: mx.array, mask: mx.array) -> tuple[mx.array, mx.array]:
    weight = mask.sum()
    return (mx.square(model(x) - y).mean(-1) * mask).sum() / mx.maximum(weight, 1), weight


def batch(step: int, rank: int, rows: int = 4) -> Batch:
    random = np.random.default_rng([step, rank])
    return tuple(mx.array(random.normal(size=(rows, WIDTH)), mx.float32) for _ in range(2))


def masked(step: int, rank: int) -> Batch:
    rows = 2 + 3 * rank + step % 3  # another number on each rank
    mask = mx.array(np.random.default_rng([step, rank, 1]).integers(0, 2, rows), mx.float32)
    return *batch(step, rank, rows), mask


def spoiled(step: int, rank: int) -> Batch:
    x, y = batch(step, rank)
    return (x * float("nan") if (step, rank) in [(1, 1), (3, 0)] else x), y


def assert_equal(ours: nn.Module | Any, reference: nn.Module | Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    got, wanted = flat(ours), flat(reference)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=atol, err_msg=name)


@contextmanager
def refused(message: str, ranks: list[int] | None, kind: type[Exception] = RankError) -> Iterator[None]:
    """Expect an error that says this, and names these ranks."""
    with pytest.raises(kind, match=message) as caught:
        yield
    assert ranks is None or getattr(caught.value, "ranks", None) == ranks


@dataclass
class Same:
    """A training that gives the numbers of one process with the batches of all ranks."""

    loss_fn: Any = mean_loss
    batch: Callable[[int, int], Batch] = batch
    rules: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] = sequential
    optimizer: Any = None
    accumulate: int = 1
    joined: bool = False  # the other process has one batch of all rows; otherwise a window of all batches
    here: Callable[[int], dict[str, Any]] = lambda rank: {}  # options of one rank
    steps: int = 6

    def reference(self) -> Iterator[Any]:
        loop = self.loop = PlainLoop(pair(self.make, self.optimizer), mx.random.key(0))
        rules = Rules(weighted=self.loss_fn is weighted_loss, **self.rules)
        for step in range(self.steps):
            batches = [self.batch(step, rank) for rank in range(SIZE)]
            if self.joined:
                whole = tuple(map(mx.concatenate, zip(*batches, strict=True)))
                yield loop.step(self.loss_fn, whole, rules, self.accumulate)
                continue
            losses = []
            for each in batches:
                taken = loop.step(self.loss_fn, each, rules, SIZE * self.accumulate)
                losses.append(taken.value)
            yield taken

    def __call__(self) -> None:
        ours = pair(self.make, self.optimizer)
        options = {**self.rules, **self.here(RANK), "weighted": self.loss_fn is weighted_loss}
        step = Step(*ours, self.loss_fn, group=GROUP, accumulate=self.accumulate, **options)
        for number, taken in enumerate(self.reference()):
            out = step(*self.batch(number, RANK))
            assert bool(out.updated) == taken.updated, number
            if self.joined:
                assert bool(out.skipped) == taken.skipped, number
                loss = taken.value[0] if isinstance(taken.value, tuple) else taken.value
                np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
            if taken.norm is not None:
                np.testing.assert_allclose(out.grad_norm, taken.norm, rtol=1e-5)
        assert_equal(ours[0].parameters(), self.loop.pair[0].parameters())
        assert_equal(ours[1].state, self.loop.pair[1].state)
        if "replay" in options:
            captured = ["captured" in str(each.replay) for each in step.stats.traces]
            assert captured == 2 * [options["replay"]]
        if "ema_decay" in self.rules:
            assert_equal(step.state["ema"], self.loop.average)


class Signs(optim.Optimizer):
    """An optimizer of one's own, which keeps a sum."""

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        state["sum"] = mx.zeros_like(parameter)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        state["sum"] = 0.5 * state["sum"] + gradient
        return parameter - 0.01 * state["sum"] / (1 + mx.abs(state["sum"]))


def reading(model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
    """Read a value, which cannot be compiled, on one rank."""
    loss = mean_loss(model, x, y)
    if RANK == 0:
        assert mx.isfinite(mx.stop_gradient(x)).all().item()
    return loss


CASES |= {
    "joined": Same(joined=True, rules={"max_grad_norm": 0.5}, steps=20),
    "joined_large": Same(
        joined=True, make=large, optimizer=lambda: optim.SGD(0.01), rules={"nonfinite": "allow"}, steps=3
    ),
    "window": Same(accumulate=3, rules={"max_grad_norm": 0.5, "max_grad_value": 0.05}),
    "weighted": Same(weighted_loss, masked),
    "weighted_window": Same(weighted_loss, masked, accumulate=2),
    "skips": Same(batch=spoiled, joined=True),
    "limit": Same(joined=True, rules={"max_loss": 1.9}),
    "allowed": Same(joined=True, rules={"nonfinite": "allow"}),
    "frozen": Same(make=frozen, joined=True),
    "average": Same(joined=True, rules={"ema_decay": 0.5}),
    "own_optimizer": Same(optimizer=Signs, accumulate=2),
    "transform": Same(joined=True, here=lambda rank: {"transform": lambda model, gradients: dict(gradients)}),
    "uncompiled": Same(joined=True, here=lambda rank: {"compile": rank != 1}),
    "plain": Same(reading, joined=True, here=lambda rank: {"compile": rank != 0}),
    "replayed": Same(joined=True, rules={"max_grad_norm": 0.5}, here=lambda rank: {"replay": rank == 1}, steps=12),
}


@case
def the_loop_of_mlx() -> None:
    (model, optimizer), ours = pair(), pair()
    gradients = nn.value_and_grad(model, mean_loss)
    for number in range(8):
        x, y = batch(number, RANK)
        (loss, _), grads = gradients(model, x, y)
        optimizer.update(model, nn.average_gradients(grads, GROUP))
        loss = mx.distributed.all_sum(loss, group=GROUP) / SIZE
        mx.eval(loss, model.state, optimizer.state)
        np.testing.assert_allclose(fast_step(*ours, mean_loss, x, y, group=GROUP)[0], loss, rtol=1e-5)
    assert_equal(ours[0].parameters(), model.parameters())


@case
def half_precision() -> None:
    """Masters are updated by float32 sums; one rank's overflow is one for all, and halves the scale of all."""

    def make() -> nn.Module:
        model = sequential()
        model.set_dtype(mx.bfloat16)
        return model

    ours, reference = pair(make), pair(make)
    step = Step(*ours, mean_loss, group=GROUP, compute_dtype=mx.bfloat16)
    plain = Step(*reference, mean_loss, accumulate=SIZE, compute_dtype=mx.bfloat16)
    for number in range(6):
        step(*batch(number, RANK))
        for rank in range(SIZE):
            plain(*batch(number, rank))
    assert_equal(step.state["masters"], plain.state["masters"])
    step = Step(*pair(), mean_loss, group=GROUP, compute_dtype=mx.float16)
    for number in range(3):
        x, y = batch(number, RANK)
        out = step(x * (1e4 if (number, RANK) == (2, 1) else 1), y)
        scale = 65536 / 2 ** (number // 2 + 1)  # the first one is too large for both
        np.testing.assert_array_equal(step.state["loss_scale"], scale)
        assert bool(out.skipped) == (number != 1)
        assert bool(mx.isfinite(out.loss)) == (number < 2)


@case
def raises() -> None:
    """A batch that is no number is an error on its own rank, which the others name; a loss above a limit on all."""
    model, optimizer = pair()
    step = Step(model, optimizer, mean_loss, group=GROUP, nonfinite="raise", max_loss=100.0)
    step(*batch(0, RANK))
    before = flat(model.parameters())
    message, kind = ("gradient of layers", FloatingPointError) if RANK == 1 else ("update 2: rank 1 failed", RankError)
    with refused(message, None if RANK == 1 else [1], kind):
        step(*spoiled(1, RANK))
    with refused("over all ranks the loss is", None, FloatingPointError):
        step(mx.full((4, WIDTH), 1e3 * RANK), batch(0, RANK)[1])
    assert_equal(model.parameters(), before, 0, 0)
    assert step(*batch(1, RANK)).updated
    assert step.stats.updates == 2


@case
def uneven() -> None:
    """A rank without a batch flushes, and adds nothing; with none on any rank nothing is updated."""
    ours, loop = pair(), PlainLoop(pair(), mx.random.key(0))
    step = Step(*ours, mean_loss, group=GROUP)
    assert not step.flush()  # before any step, too
    step(*batch(0, RANK))
    if RANK == 0:
        step(*batch(1, RANK))
    else:
        assert step.flush()
    assert not step.flush()
    for rank in range(SIZE):
        loop.step(mean_loss, batch(0, rank), Rules(), SIZE)
    loop.step(mean_loss, batch(1, 0), Rules(), 1)
    assert_equal(ours[0].parameters(), loop.pair[0].parameters())
    np.testing.assert_array_equal(ours[1].state["step"], 2)
    assert step.stats.updates == 2


@case
def gradients_alone() -> None:
    model, optimizer = pair()
    step = Step(model, optimizer, weighted_loss, group=GROUP, weighted=True)
    (loss, _), grads = step.gradients(*masked(0, RANK))
    batches = [masked(0, rank) for rank in range(SIZE)]
    joined = tuple(map(mx.concatenate, zip(*batches, strict=True)))
    (wanted, _), plain = nn.value_and_grad(model, weighted_loss)(model, *joined)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert_equal(grads, plain)
    message, kind = (".", ValueError) if RANK == 1 else ("update 1: rank 1 failed", RankError)
    with refused(message, None, kind):
        step.gradients(*masked(0, RANK)[: 2 if RANK == 1 else 3], **({"mask": mx.zeros(999)} if RANK == 1 else {}))


@case
def resumes_in_a_window() -> None:
    """State of an open window goes on in another step, its losses too."""
    ours, others = pair(), pair()
    step, again = (Step(*each, mean_loss, group=GROUP, accumulate=2) for each in (ours, others))
    step(*batch(0, RANK))
    again.load_state(step.state)
    outs = [each(*batch(1, RANK)) for each in (step, again)]
    np.testing.assert_array_equal(outs[0].loss, outs[1].loss)
    local = [each[0].item() for each in (mean_loss(pair()[0], *batch(n, r)) for n in range(2) for r in range(SIZE))]
    np.testing.assert_allclose(outs[0].loss, np.mean(local), rtol=1e-5)
    assert_equal(ours[0].parameters(), others[0].parameters(), 0, 0)


@case
def an_exception_on_one_rank() -> None:
    """All ranks raise at the same update, within a window too, and go on from there."""
    for accumulate in (1, 3):
        model, optimizer = pair()
        step = Step(model, optimizer, mean_loss, group=GROUP, accumulate=accumulate)
        for number in range(accumulate):
            step(*batch(number, RANK))
        before, state = flat(model.parameters()), flat(optimizer.state)
        calls = 0
        with refused("addmm" if RANK == 1 else "update 2: rank 1 failed", None, ValueError if RANK == 1 else RankError):
            for _ in range(accumulate):
                calls += 1
                step(mx.zeros((4, WIDTH + (RANK == 1))), mx.zeros((4, WIDTH)))
        assert calls == (1 if RANK == 1 else accumulate)
        assert_equal(model.parameters(), before, 0, 0)
        assert_equal(optimizer.state, state, 0, 0)
        for number in range(accumulate):
            out = step(*batch(number, RANK))
        assert out.updated
        step.check_ranks()


@case
def another_on_one_rank() -> None:
    """What differs is an error on all ranks before anything is updated."""
    here: dict[str, tuple[Callable[[], Pair], dict[str, Any]]] = {
        "the options differ": (pair, {"max_grad_norm": 1.0}),
        "the optimizers differ": (lambda: pair(optimizer=lambda: optim.SGD(0.1)), {}),
        "parameters and state differ": (lambda: pair(frozen), {}),
        "the values of optimizer.state.learning_rate differ": (lambda: pair(optimizer=lambda: optim.AdamW(0.1)), {}),
    }
    for message, (make, options) in here.items():
        step = Step(*(make() if RANK == 1 else pair()), mean_loss, group=GROUP, **(options if RANK == 1 else {}))
        with refused(f"rank 1: {message}", [1]):
            step(*batch(0, RANK))
    model, optimizer = pair()
    step = Step(model, optimizer, mean_loss, group=GROUP)
    if RANK == 1:
        model.layers[2].bias = model.layers[2].bias + 1e-3
    with refused("rank 1: the values of layers.2.bias differ", [1]):
        step(*batch(0, RANK))


@case
def another_later_on_one_rank() -> None:
    model, optimizer = pair()
    step = Step(model, optimizer, mean_loss, group=GROUP, max_grad_norm=1.0)
    step(*batch(0, RANK))
    before = flat(model.parameters())
    state = step.state
    changes: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("rank 1 has other options", lambda: set_norm(step, 2.0), lambda: set_norm(step, 1.0)),
        ("rank 1 trains other parameters", model.layers[0].freeze, model.layers[0].unfreeze),
        ("rank 0 at 2, rank 1 at 8", lambda: step.load_state(state | {"updates": 7}), lambda: step.load_state(state)),
    ]
    for message, change, back in changes:
        if RANK == 1:
            change()
        with refused(message, [1]):
            step(*batch(1, RANK))
        if RANK == 1:
            back()
    assert_equal(model.parameters(), before, 0, 0)
    assert step(*batch(1, RANK)).updated
    step.check_ranks()


def set_norm(step: Step, norm: float) -> None:
    step.max_grad_norm = norm


def mixed() -> nn.Module:
    """Make a model with a frozen part, a buffer and parameters in half precision."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    model.layers[2].freeze()
    model.layers[0].set_dtype(mx.bfloat16)
    return model


@case
def broadcast() -> None:
    """Whatever the ranks begin with, they go on from rank 0's, to the bit; with "check" frozen parts are told of."""
    for make_optimizer in (lambda: optim.Adam(1e-2), Signs):
        mx.random.seed(RANK)
        model, optimizer = mixed(), make_optimizer()
        model.layers[0].bias = mx.array([-0.0, float("nan"), *[float(RANK)] * (WIDTH - 2)], mx.bfloat16)
        optimizer.init(model.trainable_parameters())
        optimizer.state["layers"][0]["weight"] = {"m": mx.full((WIDTH, WIDTH), RANK), "v": mx.ones((WIDTH, WIDTH))}
        optimizer.state["layers"][0]["weight"]["sum"] = mx.full((WIDTH, WIDTH), RANK)
        begun = mx.distributed.all_gather(model.layers[2].weight[None], group=GROUP)[0]
        step = Step(model, optimizer, mean_loss, group=GROUP, sync="broadcast")
        assert step(*batch(0, RANK)).skipped  # by the NaN
        step.check_ranks()
        np.testing.assert_array_equal(model.layers[2].weight, begun)
        bias = np.array(model.layers[0].bias.astype(mx.float32))
        np.testing.assert_array_equal(bias, [0, np.nan, *[0] * (WIDTH - 2)])
        assert np.signbit(bias[0])
    model, optimizer = pair(frozen)
    model.layers[0].weight = model.layers[0].weight + RANK
    wanted = f"layers.0.weight and 0 more arrays that are not trained differ from rank {int(RANK == 0)}'s"
    with pytest.warns(RuntimeWarning, match=wanted):
        Step(model, optimizer, mean_loss, group=GROUP)(*batch(0, RANK))


@case
def checked_at_intervals() -> None:
    """A parameter that another program changes on one rank is found behind the update that is due."""
    model, optimizer = pair()
    step = Step(model, optimizer, mean_loss, group=GROUP, check_ranks=3, accumulate=2)
    for number in range(10):
        step(*batch(number, RANK))
    assert step.flush() is False
    if RANK == 1:
        model.layers[2].bias = model.layers[2].bias + 1e-6
    step(*batch(10, RANK))
    with refused("rank 1: the values of layers.2.bias differ from rank 0's. The replicas have drifted", [1]):
        step(*batch(11, RANK))
    assert step.stats.updates == 6
    with refused("rank 1: the options differ", [1]):
        Step(*pair(), mean_loss, group=GROUP, check_ranks=RANK)(*batch(0, RANK))


@case
def moments_in_8_bits() -> None:
    """The ranks round by the same chance, so that their codes have the same bits; and train as one process does."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, WIDTH))

    model, optimizer = pair(wide)
    step = Step(model, optimizer, mean_loss, group=GROUP, state_bits=8, check_ranks=2)
    alone = Step(*pair(wide), mean_loss, state_bits=8)
    for number in range(6):
        step(*batch(number, RANK))
        alone(*(mx.concatenate(parts) for parts in zip(*(batch(number, rank) for rank in range(SIZE)), strict=True)))
    assert "m_codes" in optimizer.state["layers"][0]["weight"]
    assert_equal(model, alone.model, atol=1e-3)  # a code that is rounded otherwise moves a weight by a part of the rate


@case
def buffers() -> None:
    """Buffers are each rank's own; a loss that sets a parameter is refused."""
    model, optimizer = pair(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm(WIDTH)))
    step = Step(model, optimizer, mean_loss, group=GROUP)
    for number in range(3):
        step(*batch(number, RANK))
    step.check_ranks()
    means = mx.distributed.all_gather(model.layers[1].running_mean[None], group=GROUP)
    assert (means[0] != means[1]).any().item()

    def sets(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        loss = mx.square(model(x) - y).mean()
        model.layers[0].bias = mx.stop_gradient(mx.tile(x.mean(0), 2))
        return loss

    with refused("assigns to a trainable parameter", None, ValueError):
        Step(*pair(), sets, group=GROUP)(*batch(0, RANK))


@case
def a_group_of_one() -> None:
    """Is none, and so is None; another object is refused."""
    with refused("group: expected mx.distributed.Group or None, got int", None, TypeError):
        Step(*pair(), mean_loss, group=1)  # type: ignore[arg-type]
    step = Step(*pair(), mean_loss)
    out = step(*batch(0, RANK))
    assert out.loss is out.local_loss
    assert step.stats.given == 0
    step.check_ranks()


class Stop(Callback):
    """A signal to one rank at a step, or an error."""

    def __init__(self, step: int, error: bool = False) -> None:
        self.step, self.error = step, error

    def on_step(self, trainer: Trainer, number: int) -> None:
        if RANK == SIZE - 1 and number == self.step:
            if self.error:
                raise OSError("the disk is full")
            os.kill(os.getpid(), signal.SIGTERM)


def trainer(name: str, dropout: float = 0.0, group: Any = GROUP, shards: bool = False, **options: Any) -> Trainer:
    """Make a training of 26 samples, in batches of 8 over all ranks, that validates and is saved."""
    mx.random.seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Dropout(dropout), nn.Linear(2 * WIDTH, 1))
    mx.eval(model.parameters())
    rank, size = (0, 1) if group is None else (RANK, SIZE)

    def loss_fn(model: nn.Module, x: mx.array) -> tuple[mx.array, int, dict[str, mx.array]]:
        out = model(x)
        return mx.square(out - 1).mean(), x.shape[0], {"mean": out.mean()}

    chosen: dict[str, Any] = {"weighted": True, "max_grad_norm": 1.0, "shard_optimizer": shards}
    step = Step(model, optim.AdamW(1e-2), loss_fn, group=group, **chosen)
    samples = np.random.default_rng(0).normal(size=(26, WIDTH)).astype(np.float32)
    shared = {"batch_size": 8 // size, "rank": rank, "world_size": size}
    loader, validation = Loader(samples, shuffle=True, seed=3, **shared), Loader(samples[:11], **shared)
    mx.random.seed(7 + rank)
    often = {"validate_every": 3, "checkpoint_every": 4, "log_every": 1, "loggers": []}
    run = FOLDER / name
    return Trainer(step, loader, run=run, epochs=3, validation=validation, **(often | options))


@case
def a_training_is_that_of_one_process() -> None:
    training = trainer("two")
    result = training.train()
    trainer("fewer", steps=5).train()
    if RANK == 0:
        alone = trainer("fewer", group=None)  # goes on with what the ranks began
        assert alone.train().steps == 12
        one = trainer("one", group=None)
        wanted = one.train()
        assert result.steps == wanted.steps == 12
        assert_equal(training.step.model.parameters(), one.step.model.parameters(), 1e-4, 1e-5)
        assert_equal(alone.step.model.parameters(), one.step.model.parameters(), 1e-4, 1e-5)
        for name, value in wanted.metrics.items():
            if name != "train/mean":  # a metric of this rank's batches
                np.testing.assert_allclose(result.metrics[name], value, rtol=1e-4)
        texts = [(FOLDER / run / "log.jsonl").read_text() for run in ("two", "one")]
        logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
        for kind, key in [("step", "loss"), ("step", "samples"), ("validation", "loss"), ("validation", "batches")]:
            got, known = ([each[key] for each in log if each["kind"] == kind] for log in logs)
            np.testing.assert_allclose(
                got, known if key != "batches" else [SIZE * each for each in known], rtol=1e-3, atol=1
            )
        assert len(list((FOLDER / "two" / "checkpoints").glob("step-*"))) > 1
    else:
        assert result.reason == "done"


@case
def sharded_optimizer() -> None:
    """Each rank has its part of the state; the numbers are those of whole optimizers, and so is what is saved."""
    makes: dict[str, Callable[[], Any]] = {
        "AdamW": lambda: optim.AdamW(optim.cosine_decay(1e-2, 40), weight_decay=0.1),
        "Adafactor": lambda: optim.Adafactor(1e-2),
        "Muon": lambda: optim.Muon(1e-2),
    }
    options: dict[str, Any] = {"group": GROUP, "max_grad_norm": 0.5, "accumulate": 2}
    for name, make in makes.items():
        model = frozen if name == "Muon" else sequential
        ours, whole = pair(model, make), pair(model, make)
        is_captured = name == "AdamW"
        step = Step(*ours, mean_loss, **options, shard_optimizer=True, check_ranks=2, replay=is_captured)
        reference = Step(*whole, mean_loss, **options)
        for number in range(16):
            for each in (step, reference):
                out = each(*spoiled(number, RANK))
        assert out.updated
        assert step.stats.mode == "native"
        assert all(is_captured == ("captured" in str(each.replay)) for each in step.stats.traces)
        assert_equal(ours[0].parameters(), whole[0].parameters(), 1e-6, 1e-7)
        parts = [set(flat(each.state)) for each in (ours[1], whole[1])]
        assert parts[0] < parts[1]
        sizes = [sum(value.size for value in flat(each.state).values()) for each in (ours[1], whole[1])]
        all_sizes = mx.distributed.all_sum(mx.array(sizes[0]), group=GROUP).item()
        assert all_sizes == pytest.approx(sizes[1], abs=8)  # numbers such as the step are on each
        with step.whole_optimizer():
            if RANK == 0:
                assert_equal(ours[1].state, whole[1].state, 1e-5, 1e-7)
        assert set(flat(ours[1].state)) == parts[0]
        step(*batch(9, RANK))
    ours[0].unfreeze()  # of Muon's, the last one
    if RANK == 0:
        with refused("expected a save in a `with step.whole_optimizer", None, CheckpointError):
            Checkpoints(FOLDER / "part").save(step, None, number=1)
    with refused("layers.0.[a-z]* was frozen at the first step", None, ValueError):
        for number in range(2):
            step(*batch(number, RANK))
    changed = Step(*pair(), mean_loss, group=GROUP, shard_optimizer=True, transform=lambda model, gradients: gradients)
    with refused("shard_optimizer: expected an update that the step computes itself", None, ValueError):
        changed(*batch(0, RANK))
    with refused("expected neither ema_decay", None, ValueError):
        Step(*pair(), mean_loss, group=GROUP, shard_optimizer=True, ema_decay=0.9)
    with refused("got MultiOptimizer", None, ValueError):
        Step(*pair(optimizer=lambda: optim.MultiOptimizer([Signs()])), mean_loss, group=GROUP, shard_optimizer=True)


@case
def sharded_trainings_are_saved_whole() -> None:
    """And go on in one process, or in several, sharded or not."""
    whole = trainer("unsharded")
    whole.train()
    for name, first, then in (("alone", True, False), ("ranks", True, True), ("into", False, True)):
        part = trainer(name, shards=first, steps=5)
        part.train()
        if name == "alone":
            if RANK > 0:
                continue
            rest = trainer(name, group=None)
        else:
            rest = trainer(name, shards=then)
        assert rest.train().steps == 12
        assert_equal(rest.step.model.parameters(), whole.step.model.parameters(), 1e-4, 1e-5)
        if then:
            assert len(flat(rest.step.optimizer.state)) < len(flat(whole.step.optimizer.state))


@case
def metrics_of_all_predictions() -> None:
    """Are those of one process: where the last batches are uneven, and where only one rank has a batch."""
    samples = np.random.default_rng(0).normal(size=(13, WIDTH)).astype(np.float32)
    labels = (samples[:, 0] > 0).astype(np.int32)
    metrics = {
        "auc": scikit_learn("roc_auc"),
        "f1": scikit_learn("f1"),
        "order": OfAll(lambda labels, outputs: {"sum": (outputs * np.arange(len(labels))).sum(), "rows": len(labels)}),
    }

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        out = model(x)[:, 0]
        return nn.losses.binary_cross_entropy(out, y.astype(mx.float32)), out

    def validated(group: Any, batches: Any) -> Any:
        step = Step(*pair(), LossWithMetrics(loss_fn, metrics, weighted=False), group=group)
        return validate(step, batches)

    whole = Loader((samples, labels), 4 * SIZE)
    wanted = validated(None, whole)
    shared = Loader((samples, labels), 4, rank=RANK, world_size=SIZE)
    found = validated(GROUP, shared)
    assert found.metrics.keys() == wanted.metrics.keys()
    for name, value in wanted.metrics.items():
        np.testing.assert_allclose(found.metrics[name], value, rtol=1e-6, err_msg=name)
    step = Step(*pair(), loss_fn, group=GROUP)
    batches = [(mx.array(samples), mx.array(labels))] if RANK == 1 else []
    data = Loader((samples, labels), 4, rank=RANK, world_size=SIZE)
    often: dict[str, Any] = {"loggers": [], "metrics": metrics, "validate_at_start": True}
    training = Trainer(step, data, run=FOLDER / "all", steps=1, validation=batches, **often)
    seen: list[dict[str, float]] = []
    training.callbacks = [Seen(seen)]
    training.train()
    np.testing.assert_allclose(seen[0]["auc"], wanted.metrics["auc"], rtol=1e-6)
    broken = {"mine": OfAll(lambda labels, outputs: 1 / 0)}
    step.loss_fn = LossWithMetrics(loss_fn, broken, weighted=False)
    with refused("division" if RANK == 0 else "rank 0 failed", None, ZeroDivisionError if RANK == 0 else RankError):
        validate(step, shared)


class Seen(Callback):
    """The metrics of validations."""

    def __init__(self, seen: list[dict[str, float]]) -> None:
        self.seen = seen

    def on_validation(self, trainer: Trainer, loss: float, best: bool) -> None:
        assert trainer.validated is not None
        self.seen.append(trainer.validated.metrics)


@case
def a_signal_to_one_rank_ends_all() -> None:
    """At one step, with one checkpoint, from which all go on exactly, each with its own random state."""
    whole = trainer("whole", dropout=0.5)
    whole.train()
    part = trainer("part", dropout=0.5, callbacks=[Stop(5)])
    result = part.train()
    assert result.reason == "signal"
    assert is_alike(result.steps), result.steps
    assert result.steps in (5, 6)
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.name == f"step-{result.steps:08}"
    rest = trainer("part", dropout=0.5)
    assert rest.train().steps == 12
    assert_equal(rest.step.model.parameters(), whole.step.model.parameters(), 0, 0)


@case
def an_error_in_a_training_ends_all() -> None:
    training = trainer("error", callbacks=[Stop(5, error=True)])
    message = "the disk is full" if RANK == SIZE - 1 else f"rank {SIZE - 1} failed"
    with refused(message, None, TrainingError):
        training.train()
    with refused("expected one that is shared by the ranks", None, ValueError):
        Trainer(training.step, Loader(np.zeros((8, 2))), run=FOLDER, epochs=1)


class SlowRows:
    """Rows that the last rank waits for, a second a batch of four."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if RANK == SIZE - 1:
            time.sleep(0.25)
        return np.full(WIDTH, index, np.float32)


@case
def the_slowest_rank_is_named() -> None:
    shown = io.StringIO()
    training = trainer("slow", steps=4, log_every=2, loggers=[Progress(shown)])
    training.loader = Loader(SlowRows(), 4, rank=RANK, world_size=SIZE)
    training.train()
    if RANK == 0:
        records = read_log(FOLDER / "slow").intervals.records
        told = [each["rank_seconds"] for each in records if "rank_seconds" in each]
        for seconds in told:
            assert list(seconds) == [str(rank) for rank in range(SIZE)]
            assert max(seconds, key=lambda rank: seconds[rank]) == str(SIZE - 1)
        assert sum(each[str(SIZE - 1)] for each in told) >= 3  # of all steps but the first
        assert shown.getvalue().count(f"\nrank {SIZE - 1} is the slowest: between exchanges the others take") == 1


def is_alike(number: int) -> bool:
    return bool(mx.distributed.all_sum(mx.array(number), group=GROUP).item() == SIZE * number)


def ends() -> None:
    """All ranks have the same, and go on together."""
    np.testing.assert_array_equal(mx.distributed.all_sum(mx.array(1.0), group=GROUP), SIZE)


def main(cases: dict[str, Case]) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "faststep: the batch of step")
    for name, run in cases.items():
        if re.search(sys.argv[1], name):
            started = time.monotonic()
            run()
            ends()
            print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)


if __name__ == "__main__":
    main(CASES)
