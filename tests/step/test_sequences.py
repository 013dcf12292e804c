"""Any sequence of what a program may do between two steps, held against a plain loop of MLX.

`FASTSTEP_FUZZ=100000` tries 2,000 sequences; 100 otherwise.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, StepOutput, fast_step
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from support.helpers import HalvedAdam, Pair, Tree, branching, copy_tree, flat, is_matrix, snapshot
from support.plain_loop import Counts, PlainLoop, Rules, Taken, copy_loop, keys, restore_loop

pytestmark = pytest.mark.filterwarnings("ignore:faststep. .* traces have been made")
SEQUENCES = max(100, int(os.environ.get("FASTSTEP_FUZZ", "2000")) // 50)
TOLERANCE = 5e-5
PARTS = ("embedding", "hidden", "norm", "out")


class Failed(Exception):
    """Raised by the losses of these tests."""


class Net(nn.Module):
    """An embedding that is the output too, buffers, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 8, bias=False)  # whose gradient would be the noise of zero, before a norm
        self.norm = nn.BatchNorm(8)
        self.dropout = nn.Dropout(0.25)
        self.out = nn.Linear(8, 4)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens [batch] to logits [batch, 6]."""
        hidden = nn.relu(self.norm(self.hidden(self.embedding(tokens))))
        return self.embedding.as_linear(self.out(self.dropout(hidden)))


def cross_entropy(model: Net, tokens: mx.array, targets: mx.array, factor: mx.array, weight: mx.array) -> Tree:
    """Return the loss, its weight, and something beside it; three rows are an error."""
    logits = model(tokens)
    if len(tokens) == 3:
        raise Failed("three rows")
    return nn.losses.cross_entropy(logits, targets, reduction="mean") * factor, weight, logits.sum()


def squares(model: Net, tokens: mx.array, _: mx.array, factor: mx.array, weight: mx.array) -> Tree:
    """Return another loss, which draws nothing and uses the output layer not at all."""
    hidden = model.norm(model.hidden(model.embedding(tokens)))
    if len(tokens) == 3:
        raise Failed("three rows")
    return (hidden - 1).square().mean() * factor, weight, hidden.max()


LOSSES = [cross_entropy, squares]
OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.SGD(0.05, momentum=0.9),
    "adam": lambda: optim.Adam(1e-2, eps=1e-2),
    "scheduled": lambda: optim.AdamW(optim.cosine_decay(5e-2, 20), eps=1e-2, weight_decay=0.1),
    "own": lambda: HalvedAdam(1e-2, eps=1e-2),
    "on-the-host": lambda: optim.Adam(branching, eps=1e-2),
    "multi": lambda: optim.MultiOptimizer([optim.SGD(0.05, momentum=0.9), optim.Adam(1e-2, eps=1e-2)], [is_matrix]),
}
# what a step may be made with: the rules that its numbers follow, and what they do not depend on
OPTIONS: list[tuple[Rules, dict[str, Any]]] = [
    (Rules(), {}),
    (Rules(max_grad_norm=0.1), {"in_flight": 0}),
    (Rules(max_loss=10.0, ema_decay=0.5), {"in_flight": 1}),
    (Rules(weighted=True, max_grad_value=0.01), {}),
    (Rules(nonfinite="raise", max_loss=10.0, max_grad_norm=0.1), {}),
    (Rules(nonfinite="allow"), {}),
    (Rules(weighted=True, ema_decay=0.9), {"compile": False}),
]
# what stands in front of the loss, and the batch's weight
BATCHES = {"good": (1.0, 2.0), "nan": (float("nan"), 1.0), "large": (20.0, 1.0), "weightless": (1.0, 0.0)}
kinds = st.sampled_from(["good", "good", "good", *BATCHES])
numbers = st.integers(0, 3)
options = st.integers(0, len(OPTIONS) - 1)
losses = st.sampled_from(LOSSES)


def batch(number: int, kind: str, rules: Rules) -> tuple[mx.array, ...]:
    """Return a batch; a step that allows everything is given nothing bad."""
    rng = np.random.default_rng(number)
    rows = 5 if number == 3 else 4
    factor, weight = BATCHES["good" if rules.nonfinite == "allow" else kind]
    drawn = rng.integers(6, size=(2, rows), dtype=np.int32)
    return mx.array(drawn[0]), mx.array(drawn[1]), mx.array(factor), mx.array(weight)


def written(arrays: dict[str, mx.array]) -> bytes:
    """Return a safetensors file."""
    file = io.BytesIO()
    mx.save_safetensors(file, arrays)
    return file.getvalue()


def read(file: bytes) -> list[tuple[str, mx.array]]:
    """Read it again."""
    return list(mx.load(io.BytesIO(file), format="safetensors").items())


def assert_near(got: Tree, wanted: Tree, name: str = "") -> None:
    """Compare an array with the loop's, relative to the largest value in that."""
    got, wanted = np.array(got), np.array(wanted)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
    size = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
    np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE * size, err_msg=name)


def assert_all_near(got: dict[str, Tree], wanted: dict[str, Tree]) -> None:
    """Compare arrays by name."""
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert_near(got[name], array, name)


def leaves(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """Return the optimizers that update."""
    return getattr(optimizer, "optimizers", [optimizer])


class Sequence(RuleBasedStateMachine):
    """Model, optimizer and their steps, and the loop that they are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Step, int, Counts]] = []
        self.given_out: list[tuple[mx.array, np.ndarray]] = []  # and what the loop has for each
        self.held: list[tuple[mx.array, np.ndarray]] = []  # and its value when it was taken hold of
        self.held_state: Tree = None
        self.saved: list[dict[str, Any]] = []

    @initialize(optimizer=st.sampled_from(list(OPTIMIZERS)), number=options, watched=st.booleans())
    def begin(self, optimizer: str, number: int, watched: bool) -> None:
        self.optimizer, self.watched = optimizer, watched  # whether all is compared behind every rule
        self.plain, self.ours = PlainLoop(self.new_pair(), mx.random.key(5)), self.new_pair()
        for model, each in self.pairs:
            each.init(model.trainable_parameters())
        mx.random.seed(5)
        self.new_step(number)

    def new_pair(self) -> Pair:
        """Build model and optimizer, equal each time."""
        key = keys()[0]
        mx.random.seed(1)
        model = Net()
        mx.eval(model.parameters())
        keys()[0] = key
        return model, OPTIMIZERS[self.optimizer]()

    @property
    def pairs(self) -> list[Pair]:
        """The loop's model and optimizer, and ours."""
        return [self.plain.pair, self.ours]

    def take(self, which: int) -> tuple[Step, Rules, Counts]:
        """Choose a step."""
        step, number, counts = self.steps[which % len(self.steps)]
        return step, OPTIONS[number][0], counts

    def averaging(self) -> list[Step]:
        """Return the steps that keep an average."""
        return [step for step, number, _ in self.steps if OPTIONS[number][0].ema_decay is not None]

    # what is compared

    @rule()
    def look(self) -> None:
        """Compare everything that a program can read."""
        with self.plain.random():
            wanted = snapshot(*self.plain.pair)
        assert_all_near(snapshot(*self.ours), wanted)
        for array, value in self.given_out:
            assert_near(array, value)
        for array, value in self.held:
            np.testing.assert_array_equal(array, value)
        for step, _, counts in self.steps:
            assert (step.stats.steps, step.stats.updates, step.stats.skipped) == tuple(vars(counts).values())
        self.look_at_the_window()

    def look_at_the_window(self) -> None:
        """Compare what is summed so far; what was frozen for all of it may be missing."""
        state, loop = self.steps[-1][0].state, self.plain
        assert state["batches"] == loop.batches
        assert ("window" in state, "weight" in state) == (loop.batches > 0, loop.batches > 0)
        if loop.batches:
            assert_near(state["weight"], np.float32(sum(weight for _, weight in loop.window)))
            for name, summed in flat(state["window"]).items():
                assert_near(summed, loop.summed(name, summed), name)

    def settle(self) -> None:
        """Behind a rule: compare, or leave the device alone."""
        if self.watched:
            self.look()

    def teardown(self) -> None:
        """Compare what the sequence has left."""
        if self.steps:
            self.look()

    # steps

    def call(self, ours: Callable[[], Tree], loss_fn: Any, given: Tree, rules: Rules, accumulate: int) -> Tree:
        """Take a step of the loop and one of ours; None where both raise."""
        try:
            taken = self.plain.step(loss_fn, given, rules, accumulate)
        except (FloatingPointError, Failed, ValueError) as error:  # the last where all is frozen
            with pytest.raises(type(error)):
                ours()
            return None
        return ours(), taken

    @rule(which=numbers, number=numbers, kind=kinds, loss_fn=losses, calls=st.integers(1, 3))
    def step(self, which: int, number: int, kind: str, loss_fn: Any, calls: int) -> None:
        step, rules, counts = self.take(which)
        step.loss_fn = loss_fn
        given = batch(number, kind, rules)
        for _ in range(calls):
            if both := self.call(lambda: step(*given), loss_fn, given, rules, step.accumulate):
                self.note(*both, rules, counts)
        self.settle()

    def note(self, out: StepOutput, taken: Taken, rules: Rules, counts: Counts) -> None:
        """Note what a step gave, to be compared later, and what it counts."""
        counts.steps += 1
        counts.updates += taken.updated
        counts.skipped += taken.skipped
        loss, *aux = taken.value[:1] + taken.value[1 + rules.weighted :]
        assert (len(out.aux), out.grad_norm is None) == (len(aux), taken.norm is None)
        self.given_out += [
            (mx.array(out.skipped), np.array(taken.skipped)),
            (mx.array(out.updated), np.array(taken.updated)),
        ]
        values = zip([out.loss, *out.aux], [loss, *aux], strict=True)
        self.given_out += [(mine, np.array(plain)) for mine, plain in values]
        if out.grad_norm is not None:
            self.given_out.append((out.grad_norm, np.array(taken.norm)))

    @rule(number=options, at=numbers, kind=kinds, loss_fn=losses, accumulate=st.integers(1, 3))
    def fast_step(self, number: int, at: int, kind: str, loss_fn: Any, accumulate: int) -> None:
        rules, others = OPTIONS[number]
        given = batch(at, kind, rules)

        def take() -> Tree:
            return fast_step(*self.ours, loss_fn, *given, accumulate=accumulate, **vars(rules), **others)

        if both := self.call(take, loss_fn, given, rules, accumulate):
            value, taken = both
            self.given_out += [(mine, np.array(plain)) for mine, plain in zip(value, taken.value, strict=True)]
        self.settle()

    @rule(which=numbers, in_the_loss=st.booleans())
    def fail(self, which: int, in_the_loss: bool) -> None:
        step, rules, _ = self.take(which)
        tokens, *rest = batch(0, "good", rules)
        given = (tokens[:3], rest[0][:3], *rest[1:]) if in_the_loss else ("tokens", *rest)
        with pytest.raises((Failed, TypeError, ValueError)):
            step(*given)
        self.settle()

    @rule(which=numbers)
    def flush(self, which: int) -> None:
        step, rules, counts = self.take(which)
        try:
            flushed, updated = self.plain.flush(rules)
        except ValueError:
            with pytest.raises(ValueError, match="train"):
                step.flush()
            return
        assert step.flush() == flushed
        counts.updates += updated
        self.settle()

    @rule(which=numbers, number=numbers, loss_fn=losses)
    def gradients(self, which: int, number: int, loss_fn: Any) -> None:
        step, rules, _ = self.take(which)
        step.loss_fn = loss_fn
        given = batch(number, "good", rules)
        try:
            plain_value, plain_grads = self.plain.gradients(loss_fn, given)
        except ValueError:
            with pytest.raises(ValueError, match="train"):
                step.gradients(*given)
            return
        value, grads = step.gradients(*given)
        assert_near(value, plain_value)
        assert_all_near(flat(grads), plain_grads)
        self.settle()

    @rule(which=numbers)
    def average(self, which: int) -> None:
        if not (steps := self.averaging()):
            return
        step = steps[which % len(steps)]
        with step.average() as model:
            shown = {name: np.array(array) for name, array in flat(model.trainable_parameters()).items()}
            with pytest.raises(RuntimeError):
                step.flush()
        parameters = flat(self.plain.pair[0].trainable_parameters())
        assert_all_near(
            shown, parameters | {name: array for name, array in self.plain.average.items() if name in shown}
        )
        self.settle()

    @rule(which=numbers, number=numbers)
    def memory_plan(self, which: int, number: int) -> None:
        if flat(self.ours[0].trainable_parameters()):
            step, rules, _ = self.take(which)
            step.memory_plan(*batch(number, "good", rules))
            self.settle()

    @rule(which=numbers)
    def synchronize(self, which: int) -> None:
        self.take(which)[0].synchronize()

    @precondition(lambda self: len(self.steps) < 3)
    @rule(number=options)
    def new_step(self, number: int) -> None:
        rules, others = OPTIONS[number]
        self.steps.append((Step(*self.ours, cross_entropy, **vars(rules), **others), number, Counts()))

    @precondition(lambda self: len(self.steps) > 1)
    @rule()
    def drop_a_step(self) -> None:
        self.steps.pop(0)

    @rule(which=numbers, accumulate=st.integers(1, 4))
    def accumulate(self, which: int, accumulate: int) -> None:
        self.take(which)[0].accumulate = accumulate

    # what a program changes

    @rule(part=st.sampled_from([*PARTS, "bias", "all"]), freezes=st.booleans())
    def freeze(self, part: str, freezes: bool) -> None:
        for model, _ in self.pairs:
            # by part: `model.unfreeze()` would make parameters of the buffers too
            for each in [part] if part in PARTS else PARTS:
                (model[each].freeze if freezes else model[each].unfreeze)(keys="bias" if part == "bias" else None)

    @rule(part=st.sampled_from(["norm", "dropout", None]), trains=st.booleans())
    def mode(self, part: str | None, trains: bool) -> None:
        for model, _ in self.pairs:
            (model[part] if part else model).train(trains)

    @rule(rate=st.sampled_from([1e-3, 3e-2]))
    def learning_rate(self, rate: float) -> None:
        for _, optimizer in self.pairs:
            for each in leaves(optimizer):
                each.learning_rate = rate

    @rule(low=st.booleans())
    def moments(self, low: bool) -> None:
        for _, optimizer in self.pairs:
            for each in leaves(optimizer):
                if hasattr(each, "betas"):
                    each.betas = [0.5, 0.6] if low else [0.9, 0.999]
                else:
                    each.momentum = 0.5 if low else 0.9

    @rule(part=st.sampled_from(PARTS), way=st.sampled_from(["update", "load", "add", "row"]), seed=numbers)
    def weights(self, part: str, way: str, seed: int) -> None:
        value = np.random.default_rng(seed).standard_normal(self.ours[0][part].weight.shape, dtype=np.float32)
        if way in ("add", "row"):  # which change the array that is there, for whoever holds it
            changed = id(self.ours[0][part].weight)
            self.held = [(array, copy) for array, copy in self.held if id(array) != changed]
        for model, _ in self.pairs:
            if way == "update":
                model.update({part: {"weight": mx.array(value)}})
            elif way == "load":
                model.load_weights([(f"{part}.weight", mx.array(value))], strict=False)
            elif way == "add":
                model[part].weight += 0.1
            else:
                model[part].weight[0] = 0.3

    @rule(mean=st.sampled_from([-1.0, 0.5]))
    def buffer(self, mean: float) -> None:
        for model, _ in self.pairs:
            model.norm.running_mean = mx.full((8,), mean)

    @rule(way=st.sampled_from(["halved", "copied", "one entry", "step"]))
    def optimizer_state(self, way: str) -> None:
        for _, optimizer in self.pairs:
            for each in leaves(optimizer):
                if way == "step":
                    each.state["step"] = mx.array(0, mx.uint64)
                elif way == "one entry":
                    entry = each.state.get("hidden", {}).get("weight", {})
                    entry.update({name: mx.full(array.shape, 0.01) for name, array in entry.items()})
                elif each is optimizer:
                    state = copy_tree(optimizer.state)
                    scalars = {name: state.pop(name) for name in ("step", "learning_rate")}
                    by = 0.5 if way == "halved" else 1.0
                    optimizer.state = tree_map(lambda array, by=by: array * by, state) | scalars

    @rule(seed=numbers)
    def seed(self, seed: int) -> None:
        mx.random.seed(seed)
        self.plain.key = mx.random.key(seed)

    # what a program keeps

    @rule()
    def hold_arrays(self) -> None:
        model, optimizer = self.ours
        arrays = [model.hidden.weight, model.norm.running_var, model.embedding.weight]
        arrays += list(flat(optimizer.state).values())[:3]
        self.held = [(array, np.array(array)) for array in arrays]

    @rule(holds=st.booleans())
    def hold_the_optimizers_state(self, holds: bool) -> None:
        self.held_state = self.ours[1].state if holds else None

    @rule(which=numbers)
    def save(self, which: int) -> None:
        step, _, counts = self.take(which)
        model, optimizer = self.ours
        state = dict(tree_flatten(step.state))
        arrays = flat(step.state)
        trees = [flat(model.parameters()), flat(optimizer.state), arrays]
        bundle = {"files": [written(tree) for tree in trees], "trains": set(flat(model.trainable_parameters()))}
        bundle |= {"numbers": json.dumps({name: state[name] for name in state.keys() - arrays.keys()})}
        bundle |= {"plain": copy_loop(self.plain), "counts": vars(counts).copy(), "key": keys()[0]}
        self.saved = [*self.saved[-1:], bundle]

    @precondition(lambda self: self.saved)
    @rule(which=numbers, at=numbers, into=st.sampled_from(["step", "new step", "new pair"]), late=st.booleans())
    def load(self, which: int, at: int, into: str, late: bool) -> None:
        bundle = self.saved[at % len(self.saved)]
        if into == "new pair":
            self.begin_anew()
        which %= len(self.steps)
        step, number, _ = self.steps[which]
        if into == "new step":
            step = Step(*self.ours, cross_entropy, **vars(OPTIONS[number][0]), **OPTIONS[number][1])
        self.steps[which] = (step, number, Counts(**bundle["counts"]))
        for model, _ in self.pairs:
            for part in PARTS:
                model[part].unfreeze()
                frozen = [name for name in model[part] if f"{part}.{name}" not in bundle["trains"]]
                model[part].freeze(keys=frozen, recurse=False)
        weights, moments, kept = (read(file) for file in bundle["files"])
        state = tree_unflatten([*kept, *json.loads(bundle["numbers"]).items()])
        if not late:
            step.load_state(state)
        self.ours[0].load_weights(weights)
        self.ours[1].state = tree_unflatten(moments)
        if late:
            step.load_state(state)
        keys()[0] = bundle["key"]
        restore_loop(self.plain, bundle["plain"])
        self.settle()

    def begin_anew(self) -> None:
        """Replace model, optimizer and steps by new ones with the same modes and options, as another process would."""
        model, optimizer = self.new_pair()
        model.train(self.ours[0].training)
        for part in ("norm", "dropout"):
            model[part].train(self.ours[0][part].training)
        for new, old in zip(leaves(optimizer), leaves(self.ours[1]), strict=True):
            for name in {"betas", "momentum"} & vars(old).keys():
                setattr(new, name, getattr(old, name))
        self.ours, self.held_state = (model, optimizer), None
        before, self.steps = self.steps, []
        for _, number, _ in before:
            self.new_step(number)


TestSequence = Sequence.TestCase
TestSequence.settings = settings(
    max_examples=SEQUENCES, stateful_step_count=30, deadline=None, derandomize=SEQUENCES == 100, database=None,
    print_blob=True, suppress_health_check=list(HealthCheck),
)  # fmt: skip
