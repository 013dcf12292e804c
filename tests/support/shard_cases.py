"""Cases of a model that is shared by the ranks of a ring: `python shard_cases.py PATTERN FOLDER` in each process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import RankError, Step, fast_step
from faststep.data import Loader
from faststep.training import Trainer
from mlx.nn.layers.distributed import shard_linear, sum_gradients
from mlx.utils import tree_map, tree_unflatten

from support.helpers import flat
from support.plain_loop import PlainLoop, Rules
from support.rank_cases import FOLDER, GROUP, RANK, SIZE, Case, assert_equal, ends, main, refused

WIDTH, VOCABULARY, LENGTH = 16, 32, 6
Batch = tuple[mx.array, ...]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Block(nn.Module):
    """A block of a transformer: three layers that read one array, whose gradients are summed in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)]
        self.q_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)  # whose bias has gradients of zero
        self.up, self.gate, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH)
        self.heads = 4

    def __call__(self, x: mx.array) -> mx.array:
        normed = self.norms[0](x)
        q, k, v = (
            mx.unflatten(layer(normed), -1, (self.heads, -1)).swapaxes(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask="causal")
        x = x + self.o_proj(attended.swapaxes(1, 2).flatten(-2))
        normed = self.norms[1](x)
        return x + self.down(nn.silu(self.gate(normed)) * self.up(normed))

    def shard(self) -> None:
        for name in ("q_proj", "k_proj", "v_proj", "up", "gate"):
            self[name] = shard_linear(self[name], "all-to-sharded", group=GROUP)
        for name in ("o_proj", "down"):
            self[name] = shard_linear(self[name], "sharded-to-all", group=GROUP)
        self.heads //= SIZE


class Model(nn.Module):
    """A language model, of one block or more."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = [Block() for _ in range(blocks)]
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def __call__(self, tokens: mx.array, recomputes: bool = False) -> mx.array:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = nn.utils.checkpoint(block)(x) if recomputes else block(x)
        return self.head(x)

    def shard(self) -> Model:
        for block in self.blocks:
            block.shard()
        mx.eval(self.parameters())
        return self


def whole() -> Model:
    mx.random.seed(1)
    model = Model()
    mx.eval(model.parameters())
    return model


def sharded() -> Model:
    return whole().shard()


def half(make: Callable[[], Model]) -> Model:
    mx.random.seed(1)
    model = Model()
    model.set_dtype(mx.bfloat16)
    return model.shard() if make is sharded else model


def adamw() -> Any:
    return optim.AdamW(optim.cosine_decay(1e-2, 40), eps=1e-3, weight_decay=0.1)  # rounding stays what it is


def loss_fn(model: nn.Module, tokens: mx.array, labels: mx.array, scale: mx.array) -> tuple[mx.array, mx.array]:
    out = model(tokens)
    return nn.losses.cross_entropy(out, labels, reduction="mean") * scale, out.sum()


def recomputing(model: nn.Module, tokens: mx.array, labels: mx.array, scale: mx.array) -> tuple[mx.array, mx.array]:
    out = model(tokens, recomputes=True)
    return nn.losses.cross_entropy(out, labels, reduction="mean") * scale, out.sum()


def batch(step: int) -> Batch:
    random = np.random.default_rng([step, 5])
    tokens, labels = (mx.array(random.integers(0, VOCABULARY, (3, LENGTH)), mx.int32) for _ in range(2))
    return tokens, labels, mx.array(1.0)


def spoiled(step: int) -> Batch:
    tokens, labels, scale = batch(step)
    return tokens, labels, scale * (float("nan") if step in (1, 5) else 1)


def parts(named: Any) -> dict[str, Any]:
    """Return this rank's parts of arrays that the whole model has."""
    model = whole()
    model.update(tree_unflatten([(name, mx.array(value)) for name, value in named.items()]))
    return flat(model.shard().parameters())


def assert_parts(ours: Any, whole_arrays: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert_equal(flat(ours), parts(flat(whole_arrays)), rtol, atol)


def moments(state: Any, kind: str) -> dict[str, Any]:
    return {name.removesuffix(f".{kind}"): each for name, each in flat(state).items() if name.endswith(f".{kind}")}


@dataclass
class Same:
    """A training that gives the numbers of one process with the whole model."""

    batch: Callable[[int], Batch] = batch
    loss: Any = loss_fn
    rules: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    group: Any = GROUP
    steps: int = 20
    atol: float = 2e-6

    def __call__(self) -> None:
        model, optimizer = sharded(), adamw()
        loop = PlainLoop((whole(), adamw()), mx.random.key(0))
        step = Step(
            model, optimizer, self.loss, group=self.group, accumulate=self.accumulate, **self.rules, **self.options
        )
        for number in range(self.steps):
            out = step(*self.batch(number))
            taken = loop.step(loss_fn, self.batch(number), Rules(**self.rules), self.accumulate)
            assert bool(out.updated) == taken.updated, number
            assert bool(out.skipped) == taken.skipped, number
            np.testing.assert_allclose(out.loss, taken.value[0], rtol=1e-5)
            if taken.norm is not None:
                np.testing.assert_allclose(out.grad_norm, taken.norm, rtol=1e-5)
        assert_parts(model.parameters(), loop.pair[0].parameters(), atol=self.atol)
        for kind in "mv":
            assert_equal(
                moments(optimizer.state, kind), parts(moments(loop.pair[1].state, kind)), rtol=1e-4, atol=self.atol
            )
        if "ema_decay" in self.rules:
            assert_equal(flat(step.state["ema"]), parts(loop.average), atol=self.atol)
        step.check_ranks()


CASES |= {
    "plain": Same(rules={"nonfinite": "allow"}),
    "clipped": Same(rules={"max_grad_norm": 0.5}),
    "without_a_group": Same(rules={"max_grad_norm": 0.5}, group=None, steps=6),
    "value_clipped": Same(rules={"max_grad_norm": 0.5, "max_grad_value": 0.01}, steps=6),
    "window": Same(rules={"max_grad_norm": 0.5}, accumulate=3),
    "skips": Same(spoiled),
    "recomputed": Same(loss=recomputing, rules={"max_grad_norm": 0.5}, steps=6),
    "limit": Same(rules={"max_loss": 3.6}),
    "average": Same(rules={"ema_decay": 0.5}),
    "uncompiled": Same(rules={"max_grad_norm": 0.5}, options={"compile": False}, steps=6),
    "replayed": Same(rules={"max_grad_norm": 0.5}, options={"replay": "auto"}, accumulate=2, steps=24),
    "transformed": Same(
        rules={"max_grad_norm": 0.5},
        options={"transform": lambda model, gradients: tree_map(lambda g: 1 * g, gradients)},
    ),
}


@case
def half_precision() -> None:
    """Masters are updated; with float16 the scale is that of all ranks, though one alone overflows."""
    ours, reference = half(sharded), half(whole)
    step = Step(ours, adamw(), loss_fn, group=GROUP, compute_dtype=mx.float32, max_grad_norm=0.5)
    plain = Step(reference, adamw(), loss_fn, compute_dtype=mx.float32, max_grad_norm=0.5)
    for steps, atol in ((4, 2e-6), (16, 1e-3)):  # sooner or later a master is at the edge between two bfloat16 numbers
        for number in range(steps):
            losses = [each(*batch(number)).loss for each in (step, plain)]
            np.testing.assert_allclose(*losses, rtol=1e-3)
        assert_parts(step.state["masters"], plain.state["masters"], atol=atol)
    model = sharded()
    if RANK == 1:
        model.blocks[0].up.weight = model.blocks[0].up.weight * 1e4
    step = Step(model, adamw(), loss_fn, group=GROUP, compute_dtype=mx.float16)
    for number in range(4):
        out = step(*batch(number))
        scales = mx.distributed.all_gather(step.state["loss_scale"][None], group=GROUP)
        assert (scales == scales[0]).all().item(), scales
        assert bool(out.skipped) == bool(mx.distributed.all_sum(mx.array(bool(out.skipped)), group=GROUP).item())


@case
def a_shard_that_is_no_number() -> None:
    """Is one for all ranks, which skip, or raise, at the same update."""
    for kind in ("skip", "raise"):
        model = sharded()
        step = Step(model, adamw(), loss_fn, group=GROUP, nonfinite=kind)
        step(*batch(0))
        before = flat(model.parameters())

        def spoils(model: nn.Module, *given: mx.array) -> mx.array:
            loss, _ = loss_fn(model, *given)
            up = model.blocks[0].up.weight
            return loss + poison(up, RANK == 1)

        step.loss_fn = spoils
        if kind == "skip":
            assert step(*batch(1)).skipped.item()
        else:
            message = "gradient of blocks.0.up.weight" if RANK == 1 else "another rank"
            with refused(message, None, FloatingPointError):
                step(*batch(1))
        assert_equal(model.parameters(), before, 0, 0)
        step.loss_fn = loss_fn
        assert step(*batch(2)).updated
        step.check_ranks()
        assert step.stats.updates == 2


def poison(weight: mx.array, is_bad: bool) -> mx.array:
    """Add nothing to a loss, and on one rank NaN to the gradient of a weight."""

    @mx.custom_function
    def nothing(weight: mx.array) -> mx.array:
        return mx.array(0.0)

    @nothing.vjp
    def nothing_vjp(weight: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return mx.full(weight.shape, float("nan") if is_bad else 0.0)

    return mx.distributed.all_sum(nothing(weight), group=GROUP)


@case
def called_in_another_way_on_one_rank() -> None:
    """The loss may count its calls on one rank, and batches may have two shapes; all ranks compile it, or none."""
    count = [0]

    def counts(model: nn.Module, *given: mx.array) -> tuple[mx.array, mx.array]:
        if RANK == 1:
            count[0] += 1
        return loss_fn(model, *given)

    model, loop, rules = sharded(), PlainLoop((whole(), adamw()), mx.random.key(0)), {"max_grad_norm": 0.5}
    options: dict[str, Any] = {"replay": "auto" if RANK == 1 else False, "max_traces": 4}
    step = Step(model, adamw(), counts, accumulate=2, **rules, **options)
    for number in range(20):
        rows = tuple(each[: 2 + number % 2] if each.ndim else each for each in batch(number))
        step(*rows)
        loop.step(loss_fn, rows, Rules(**rules), 2)
    assert step.stats.mode == "called", step.stats
    assert count[0] == (20 if RANK == 1 else 0)
    assert_parts(model.parameters(), loop.pair[0].parameters(), atol=2e-6)
    with refused("rank 1: the options differ", [1]):
        Step(sharded(), adamw(), loss_fn, compile=RANK != 1)(*batch(0))


@case
def an_error_on_one_rank() -> None:
    """All ranks raise at the same update, before they wait for each other, and go on from there."""
    for accumulate in (1, 3):
        model, optimizer = sharded(), adamw()
        step = Step(model, optimizer, loss_fn, group=GROUP, accumulate=accumulate, max_grad_norm=0.5)
        for number in range(accumulate):
            step(*batch(number))
        before, state = flat(model.parameters()), flat(optimizer.state)
        tokens, labels, scale = batch(1)
        wrong = (tokens, labels[:, : LENGTH - (RANK == 1)], scale)
        message, kind = (".", ValueError) if RANK == 1 else ("update 2: rank 1 failed", RankError)
        for call in (step, step.gradients):
            with refused(message, None, kind):
                call(*wrong)
        assert_equal(model.parameters(), before, 0, 0)
        assert_equal(optimizer.state, state, 0, 0)
        for number in range(accumulate):
            out = step(*batch(number))
        assert out.updated
        step.check_ranks()


@case
def another_on_one_rank() -> None:
    """What differs is an error on all ranks, before anything is exchanged for it."""
    one = batch(0)
    with refused("rank 1: the batches differ from rank 0's, but ranks that share a model train on the same", [1]):
        Step(sharded(), adamw(), loss_fn, group=GROUP)(*(batch(1) if RANK == 1 else one))
    with refused("rank 1: the random states differ", [1]):
        Step(seeded(sharded(), RANK == 1), adamw(), loss_fn, group=GROUP)(*one)
    mx.random.seed(0)
    model = sharded()
    if RANK == 1:
        model.head.bias = model.head.bias + 1e-3
    with refused("rank 1: the values of head.bias differ", [1]):
        Step(model, adamw(), loss_fn, group=GROUP)(*one)
    step = Step(sharded(), adamw(), loss_fn, group=GROUP, max_grad_norm=1.0)
    step(*one)
    if RANK == 1:
        step.max_grad_norm = 2.0
    with refused("rank 1 has other options", [1]):
        step(*one)
    step.max_grad_norm = 1.0
    with refused("rank 1 would exchange other arrays than rank 0", [1]):
        step(*(each[: 2 - (RANK == 1)] if each.ndim else each for each in one))
    state = step.state
    if RANK == 1:
        step.load_state(state | {"updates": 7})
    with refused("rank 0 at 2, rank 1 at 8", [1]):
        step(*one)
    step.load_state(state)
    assert step(*one).updated
    step.check_ranks()


def seeded(model: Model, other: bool) -> Model:
    mx.random.seed(int(other))
    return model


@case
def gradients_alone() -> None:
    """Are those of this rank's part, as nn.value_and_grad gives them."""
    step = Step(sharded(), adamw(), loss_fn, group=GROUP)
    (loss, _), grads = step.gradients(*batch(0))
    (wanted, _), plain = nn.value_and_grad(model := whole(), loss_fn)(model, *batch(0))
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert_parts(grads, plain)


@case
def a_loss_that_reads() -> None:
    """Is refused: the ranks would wait for each other within it."""

    def reads(model: nn.Module, *given: mx.array) -> tuple[mx.array, mx.array]:
        loss, out = loss_fn(model, *given)
        assert np.isfinite(mx.stop_gradient(loss).item())
        return loss, out

    for options in ({}, {"compile": False}):
        step = Step(sharded(), adamw(), reads, group=GROUP, **options)
        with refused("expected a loss that reads no values", None, ValueError):
            step(*batch(0))


@case
def a_model_of_mlx_lm() -> None:
    """A Llama that its own `shard` shares, beside the whole one."""
    llama = pytest.importorskip("mlx_lm.models.llama")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    others = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY}

    def made(shares: bool) -> Any:
        mx.random.seed(1)
        model = llama.Model(llama.ModelArgs(**sizes, **others, num_key_value_heads=4, tie_word_embeddings=True))
        mx.eval(model.parameters())
        if shares:
            model.shard(GROUP)
        return model

    for freezes in (False, True):
        ours, reference = made(True), made(False)
        if freezes:
            for model in (ours, reference):
                model.freeze()
                model.model.layers[1].unfreeze()
        step = Step(ours, adamw(), loss_fn, max_grad_norm=0.5)
        loop = PlainLoop((reference, adamw()), mx.random.key(0))
        for number in range(20):
            out = step(*batch(number))
            taken = loop.step(loss_fn, batch(number), Rules(max_grad_norm=0.5), 1)
            np.testing.assert_allclose(out.loss, taken.value[0], rtol=1e-5)
            np.testing.assert_allclose(out.grad_norm, taken.norm, rtol=1e-5)
        reference.shard(GROUP)
        assert_equal(ours.parameters(), reference.parameters(), atol=2e-6)


@case
def flushed() -> None:
    model, loop = sharded(), PlainLoop((whole(), adamw()), mx.random.key(0))
    step = Step(model, adamw(), loss_fn, group=GROUP, accumulate=3, max_grad_norm=0.5)
    assert not step.flush()
    for number in range(2):
        step(*batch(number))
        loop.step(loss_fn, batch(number), Rules(max_grad_norm=0.5), 3)
    assert step.flush()
    loop.flush(Rules(max_grad_norm=0.5))
    assert_parts(model.parameters(), loop.pair[0].parameters())


@case
def broadcast() -> None:
    """Takes rank 0's replicas, and leaves shards alone."""
    model = sharded()
    before = flat(model.parameters())
    model.head.bias = model.head.bias + RANK
    step = Step(model, optim.SGD(0.0), loss_fn, group=GROUP, sync="broadcast")
    step(*batch(0))
    step.check_ranks()
    assert_equal(model.parameters(), before, 0, 0)


class PartlyShared(nn.Module):
    """A norm within a head: all ranks have it, and each computes its own heads with it."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.RMSNorm(4)
        self.group = [group]

    def __call__(self, x: mx.array) -> mx.array:
        hidden = mx.unflatten(self.up(x), -1, (-1, 4))
        if self.group[0] is None:
            return self.down(self.norm(hidden).flatten(-2))
        weight = sum_gradients(self.group[0])(self.norm.weight)
        return self.down(mx.fast.rms_norm(hidden, weight, self.norm.eps).flatten(-2))


@case
def replicas_within_shards() -> None:
    """A parameter of which each rank has a part of the gradient is named; summed as the error says, it is right."""

    def squares(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x)).mean()

    def part(group: Any, is_sharded: bool = True) -> nn.Module:
        mx.random.seed(1)
        model = PartlyShared(group)
        if is_sharded:
            model.up = shard_linear(model.up, "all-to-sharded", group=GROUP)
            model.down = shard_linear(model.down, "sharded-to-all", group=GROUP)
        return model

    x = mx.random.normal((5, WIDTH), key=mx.random.key(3))
    for options in ({}, {"compile": False}):
        with refused("gradients of norm.weight that are the same on all ranks.*sum_gradients", None, ValueError):
            Step(part(None), adamw(), squares, **options)(x)
    (model, plain), optimizer = (part(GROUP), part(None, False)), adamw()
    step = Step(model, adamw(), squares, max_grad_norm=0.1)
    reference = Step(plain, optimizer, squares, max_grad_norm=0.1)
    for _ in range(8):
        losses = [each(x).loss for each in (step, reference)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(model.norm.weight, plain.norm.weight, rtol=1e-5)
    model = part(None)
    model.norm.freeze()
    assert Step(model, adamw(), squares)(x).updated

    def of_a_part(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model.up(x)).mean()

    with refused("expected a loss that is the same on all ranks", None, ValueError):
        Step(part(None), adamw(), of_a_part)(x)


@case
def optimizers() -> None:
    """Those that compute with a whole matrix are refused for shards, but not for the rest of the model."""
    for name, make in {"Muon": lambda: optim.Muon(1e-2), "Adafactor": lambda: optim.Adafactor(1e-2)}.items():
        for options in ({}, {"transform": lambda model, gradients: gradients}):
            message = f"expected an optimizer that updates element by element, got {name}"
            with refused(message, None, ValueError):
                Step(sharded(), make(), loss_fn, group=GROUP, **options)(*batch(0))
    assert Step(sharded(), optim.Lion(1e-3), loss_fn, check_ranks=1)(*batch(0)).updated
    for make in (lambda: optim.SGD(0.1, momentum=0.9), lambda: optim.RMSprop(1e-2, eps=1e-2)):
        model, optimizer, loop = sharded(), make(), PlainLoop((whole(), make()), mx.random.key(0))
        for number in range(6):
            fast_step(model, optimizer, loss_fn, *batch(number), max_grad_norm=0.5)
            loop.step(loss_fn, batch(number), Rules(max_grad_norm=0.5), 1)
        assert_parts(model.parameters(), loop.pair[0].parameters(), rtol=1e-4, atol=1e-5)
    two = optim.MultiOptimizer([optim.Muon(1e-2), optim.AdamW(1e-2)], [lambda name, _: name.startswith("head.w")])
    assert Step(sharded(), two, loss_fn, group=GROUP)(*batch(0)).updated


@case
def segments() -> None:
    """Of a layer that joins others are cut one by one, and put together again."""
    for cut in (3, [32, 64], [0.5, 0.75]):
        layer = nn.Linear(WIDTH, 96)
        model = nn.Sequential(shard_linear(layer, "all-to-sharded", segments=cut, group=GROUP))
        model.layers.append(shard_linear(nn.Linear(96, WIDTH), "sharded-to-all", segments=cut, group=GROUP))
        model.layers[0].segments = cut
        step = Step(model, adamw(), lambda model, x: mx.square(model(x)).mean())
        with step.whole_optimizer():
            if RANK == 0:
                np.testing.assert_array_equal(step.parts[0]["layers"][0]["weight"], layer.weight)
        for name in ("weight", "bias"):
            np.testing.assert_array_equal(step.own_part(f"layers.0.{name}", layer[name]), model.layers[0][name])


@case
def refused_options() -> None:
    for options in ({"shard_optimizer": True}, {"state_bits": 8}):
        with refused(f"{next(iter(options))}: expected a step without it where the model is sharded", None, ValueError):
            Step(sharded(), adamw(), loss_fn, group=GROUP, **options)


def can_scatter() -> bool:
    try:
        mx.eval(mx.distributed.sum_scatter(mx.zeros((SIZE, 2)), group=GROUP))
    except RuntimeError:
        return False
    return True


def scattered(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
    """Compute what a ring cannot from what it can."""
    each = x.shape[0] // group.size()
    return mx.distributed.all_sum(x, group=group)[group.rank() * each :][:each]


def fully(model: Model) -> Model:
    """Share the blocks, one by one, and leave embedding and head on each rank."""
    model.blocks = [nn.fully_shard(block, group=GROUP) for block in model.blocks]
    mx.eval(model.parameters())
    return model


@case
def fully_sharded() -> None:
    """Each rank has batches of its own: the numbers of one process with all rows in one batch."""
    if not can_scatter():
        mx.distributed.sum_scatter = scattered
    rules = {"max_grad_norm": 0.5, "ema_decay": 0.5}
    for accumulate in (1, 2):
        model, loop = fully(whole()), PlainLoop((whole(), adamw()), mx.random.key(0))
        step = Step(model, adamw(), loss_fn, group=GROUP, accumulate=accumulate, **rules)
        for number in range(12):
            batches = [
                spoiled(number) if number == 5 and rank == 1 else batch(SIZE * number + rank) for rank in range(SIZE)
            ]
            tokens, labels, scales = (list(each) for each in zip(*batches, strict=True))
            out = step(*batches[RANK])
            joined = mx.concatenate(tokens), mx.concatenate(labels), mx.stack(scales).mean()
            taken = loop.step(loss_fn, joined, Rules(**rules), accumulate)
            assert bool(out.updated) == taken.updated, number
            assert bool(out.skipped) == taken.skipped, number
            if taken.updated:
                np.testing.assert_allclose(out.grad_norm, taken.norm, rtol=1e-4)
        wanted = whole()
        wanted.update(loop.pair[0].parameters())
        assert_equal(model.parameters(), fully(wanted).parameters(), 1e-4, 1e-5)
        with step.whole_optimizer():
            found = {name.replace(".module.", "."): each for name, each in flat(step.parts[0]).items()}
            if RANK == 0:
                assert_equal(found, loop.pair[0].parameters(), 1e-4, 1e-5)
        step.check_ranks()
    with refused("weighted: expected a step without it where the model is sharded", None, ValueError):
        Step(fully(whole()), adamw(), loss_fn, group=GROUP, weighted=True)
    with refused("got one with both", None, ValueError):
        both = fully(whole())
        both.head = shard_linear(both.head, "all-to-sharded", group=GROUP)
        Step(both, adamw(), loss_fn, group=GROUP)


def trainer(name: str, make: Callable[[], Model] = sharded, group: Any = GROUP, **options: Any) -> Trainer:
    """Make a training that validates and is saved; of ranks that share the model, with the same batches on all."""
    step = Step(make(), adamw(), of_row, group=group, max_grad_norm=0.5, ema_decay=0.5)
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (26, LENGTH + 1)).astype(np.int32)
    loader, validation = Loader(rows, 4, shuffle=True, seed=3), Loader(rows[:11], 4)
    mx.random.seed(7)
    often = {"validate_every": 3, "checkpoint_every": 4, "log_every": 1, "loggers": []}
    return Trainer(step, loader, run=FOLDER / name, validation=validation, **(often | {"steps": 12} | options))


def of_row(model: nn.Module, rows: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    loss, out = loss_fn(model, rows[:, :-1], rows[:, 1:], mx.array(1.0))
    return loss, {"out": out}


@case
def begun() -> None:
    """A training that any number of ranks goes on with; one that is not interrupted is that of one process."""
    trainer("begun", steps=5).train()
    result, training = None, trainer("uninterrupted")
    result = training.train()
    one = trainer("one", whole, None)
    if RANK == 0:
        wanted = one.train()
        assert_parts(training.step.model.parameters(), one.step.model.parameters(), 1e-4, 1e-5)
        for name, value in wanted.metrics.items():
            np.testing.assert_allclose(result.metrics[name], value, rtol=1e-3, atol=1e-4)
        texts = [(FOLDER / run / "log.jsonl").read_text() for run in ("uninterrupted", "one")]
        logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
        for kind, key in [("step", "loss"), ("step", "samples"), ("validation", "loss"), ("validation", "batches")]:
            got, known = ([each[key] for each in log if each["kind"] == kind] for log in logs)
            np.testing.assert_allclose(got, known, rtol=1e-4)


@case
def continued() -> None:
    """By these ranks, or by one process without shards, from what was saved whole."""
    makes: dict[str, tuple[Callable[[], Model], Any]] = {"sharded": (sharded, GROUP), "whole": (whole, None)}
    for name, (make, group) in makes.items():
        if group is None and RANK > 0:
            continue
        if RANK == 0:
            shutil.copytree(FOLDER / "begun", FOLDER / f"{name}-{SIZE}")
        if group is not None:
            ends()
        training = trainer(f"{name}-{SIZE}", make, group, load_best_at_end=True)
        assert training.train().steps == 12
        shutil.copytree(FOLDER / "one", FOLDER / f"one-{name}-{SIZE}-{RANK}")
        one = trainer(f"one-{name}-{SIZE}-{RANK}", whole, None, load_best_at_end=True)
        assert one.train().steps == 12  # nothing is left to train: the best weights are loaded
        check = assert_parts if make is sharded else assert_equal
        check(training.step.model.parameters(), one.step.model.parameters(), 1e-4, 2e-5)
    with refused("expected the same on all ranks, which share a model", None, ValueError):
        if SIZE == 1:
            raise ValueError("expected the same on all ranks, which share a model")
        step = Step(sharded(), adamw(), of_row, group=GROUP)
        Trainer(step, Loader(np.zeros((8, 2)), 2, rank=RANK, world_size=SIZE), run=FOLDER / "refused", epochs=1)


if __name__ == "__main__":
    main(CASES)
