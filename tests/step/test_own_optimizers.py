"""Optimizers of a user's own: what they keep beside arrays, what they draw, which of MLX's methods they replace."""

from __future__ import annotations

import collections
import itertools
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from faststep.checkpoints import Checkpoints, CheckpointWarning
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten
from support.helpers import Row, Tree, assert_close, flat, plain_step, random_key, snapshot, to_numpy
from support.models import cross_entropy

ROW, STILL = Row("conv", "adamw"), Row("mlp", "adamw")  # the first one draws random numbers
STEPS = 6
State = dict[str, Any]


class Own(optim.Optimizer):
    """Descent that keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", 1e-2)

    def init_single(self, parameter: mx.array, state: State) -> None:
        """Start with an average of zeros."""
        state["average"] = mx.zeros_like(parameter)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Go along the gradient."""
        return parameter - self.learning_rate.astype(gradient.dtype) * gradient


class Late(Own):
    """Makes a part of its state at the first update, which it counts in a number (ADOPT, MADGRAD)."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Average from the first gradient on, towards the first parameter."""
        if state.get("begun", 0) == 0:
            state.update(begun=1, first=parameter, square=gradient.square())
            return parameter
        state["square"] = 0.9 * state["square"] + 0.1 * gradient.square()
        moved = super().apply_single(gradient / (state["square"].sqrt() + 1e-3), parameter, state)
        return 0.9 * moved + 0.1 * state["first"]


class Begun(Own):
    """Begins with the values that `init_single` is given, which `apply_gradients` calls with the first gradients."""

    def init_single(self, parameter: mx.array, state: State) -> None:
        """Start with a copy."""
        state["average"], state["square"] = mx.array(parameter), parameter.square()

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Average gradients."""
        state["average"] = 0.9 * state["average"] + 0.1 * gradient
        state["square"] = 0.9 * state["square"] + 0.1 * gradient.square()
        return super().apply_single(state["average"] / (state["square"].sqrt() + 1e-3), parameter, state)


class Counting(Own):
    """Counts its updates in a number of each parameter (Shampoo, QHAdam)."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Average every second gradient."""
        state["updates"] = state.get("updates", 0) + 1
        if state["updates"] % 2:
            state["average"] = 0.5 * state["average"] + gradient
        return super().apply_single(state["average"], parameter, state)


class Attribute(Own):
    """Counts its updates in an attribute."""

    calls = 0

    def apply_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        """Go slower and slower."""
        self.calls = self.calls + 1
        return super().apply_gradients(tree_map(lambda g: g / self.calls, gradients), parameters)


class Containers(Own):
    """Keeps its arrays in lists and tuples that it makes anew."""

    def init_single(self, parameter: mx.array, state: State) -> None:
        """Start with zeros."""
        state["list"], state["tuple"] = [mx.zeros_like(parameter)], (mx.zeros_like(parameter),)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Average twice."""
        state["list"] = [0.5 * state["list"][0] + gradient]
        state["tuple"] = (0.5 * state["tuple"][0] + state["list"][0],)
        return super().apply_single(state["tuple"][0], parameter, state)


class Lists(Containers):
    """Keeps its arrays in lists that it makes anew."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Average."""
        state["list"] = [0.5 * state["list"][0] + gradient]
        return Own.apply_single(self, state["list"][0], parameter, state)


class Noisy(Own):
    """Draws noise (Kron, Langevin dynamics)."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Add noise."""
        return super().apply_single(gradient + mx.random.normal(gradient.shape), parameter, state)


class Pulled(optim.AdamW):
    """Replaces ``update``: parameters are pulled back to an average of theirs (Lookahead)."""

    def update(self, model: nn.Module, gradients: Tree) -> None:
        """Update, then average."""
        before = model.trainable_parameters()
        super().update(model, gradients)
        model.update(tree_map(lambda new, old: 0.5 * (new + old), model.trainable_parameters(), before))


def replaced(learning_rate: float = 1e-2) -> optim.Optimizer:
    """Make one of MLX's, of which a method has been replaced."""
    optimizer = optim.AdamW(learning_rate)
    theirs = optimizer.apply_single

    def apply_single(self: optim.Optimizer, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        updated: mx.array = theirs(mx.clip(gradient, -0.01, 0.01), parameter, state)
        return updated

    optimizer.apply_single = types.MethodType(apply_single, optimizer)  # type: ignore[method-assign]
    return optimizer


def pulled() -> optim.Optimizer:
    """Make one with its own ``update``."""
    return Pulled(1e-2)


class Averaging(Own):
    """Keeps arrays and counts in attributes that it makes as it goes (Nadam, Lookahead)."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.bounds = mx.array(1.0), [0.5, 2.0]

    def apply_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        """Go along an average of the gradients."""
        self.product = self.product * 0.9
        self.means = tree_map(
            lambda g, m: 0.5 * m + g, gradients, getattr(self, "means", tree_map(mx.zeros_like, gradients))
        )
        self.bounds[0] *= 0.5
        scaled = tree_map(lambda m: mx.clip(m / (1 - self.product), -self.bounds[0], self.bounds[1]), self.means)
        return super().apply_gradients(scaled, parameters)


class Wrapped(Own):
    """Delegates to another optimizer, which it holds (SAM, Lookahead)."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.updates = optim.Adam(1e-2), 0

    def apply_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        """Count, and delegate."""
        self.updates += 1
        return self.base.apply_gradients(tree_map(lambda g: g / self.updates, gradients), parameters)


class Helped(Own):
    """Hands the update to an object that keeps the averages."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = types.SimpleNamespace(averages=dict[str, mx.array]())

    def init_single(self, parameter: mx.array, state: State) -> None:
        """Keep nothing here."""

    def apply_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        """Go along an average of the gradients, by the parameter's path."""
        averages = self.helper.averages

        def along(path: str, gradient: mx.array, parameter: mx.array) -> mx.array:
            averages[path] = 0.9 * averages.get(path, mx.zeros_like(gradient)) + gradient
            return parameter - 0.01 * averages[path]

        return tree_map_with_path(along, gradients, parameters)


def several() -> optim.Optimizer:
    """Make one of two, of which one counts."""
    return optim.MultiOptimizer([Attribute(), optim.Adam(1e-2)], [lambda name, _: "weight" in name])


KEEPING = {"averaging": Averaging, "wrapped": Wrapped, "several": several}
Make = Callable[[], optim.Optimizer]
OWN: dict[str, Make] = {
    "counting": Counting,
    "attribute": Attribute,
    "containers": Containers,
    "helped": Helped,
    "late": Late,
    "begun": Begun,
    "lists": Lists,
    "noisy": Noisy,
    "pulled": pulled,
    "replaced": replaced,
}

CALLED = {  # and why; updates of the others are left out
    "counting": "changes what the optimizer keeps beside arrays",
    "attribute": "changes what the optimizer keeps beside arrays",
    "containers": "keeps an array in another place than the optimizer",
    "helped": "keeps an array in another place than the optimizer",
}


def arrays(model: nn.Module, optimizer: optim.Optimizer) -> State:
    """Return all parameters and the whole state, arrays as NumPy's."""
    found = flat({"model": model.parameters(), "state": optimizer.state})
    return {name: to_numpy(each) if isinstance(each, mx.array) else each for name, each in found.items()}


def same(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    numbers = [name for name, each in theirs.items() if isinstance(each, int | float)]
    assert {name: ours[name] for name in numbers} == {name: theirs[name] for name in numbers}
    assert_close(*({name: each for name, each in side.items() if name not in numbers} for side in (ours, theirs)), 1e-5)


@pytest.mark.parametrize("name", OWN)
def test_an_optimizer_of_ones_own_does_what_it_does_in_the_plain_loop(name: str) -> None:
    make = OWN[name]
    reference, ours = (ROW.new()[0], make()), (ROW.new()[0], make())
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    keys = []
    for side in (take, step):
        mx.random.seed(5)
        assert len([side(*batch) for batch in ROW.case.batches(2 * STEPS)]) == 2 * STEPS
        keys.append(random_key())
    same(arrays(*ours), arrays(*reference))
    assert mx.array_equal(*keys)
    reason = CALLED.get(name)
    assert step.stats.mode == ("called" if reason else "native")
    assert (step.stats.reason or "").endswith(f"{type(ours[1]).__name__}) {reason}" if reason else "")


@pytest.mark.parametrize("name", ["late", "counting"])
def test_a_step_that_is_skipped_changes_no_number(name: str) -> None:
    make = OWN[name]
    reference, ours = (STILL.new()[0], make()), (STILL.new()[0], make())
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    for number, (x, y) in enumerate(STILL.case.batches(STEPS)):
        if number in (0, 3):
            before = arrays(*ours)
            assert bool(step(x * float("nan"), y).skipped)
            if number:
                same(arrays(*ours), before)
        step(x, y)
        take(x, y)
    same(arrays(*ours), arrays(*reference))


def test_an_error_in_an_update_changes_no_number() -> None:
    class Failing(Counting):
        """Fails when it is told to, half way through."""

        fails = False

        def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
            """Fail at a vector."""
            updated = super().apply_single(gradient, parameter, state)
            if self.fails and parameter.ndim == 1:
                raise KeyError("no vectors")
            return updated

    ours, batches = (ROW.new()[0], Failing()), ROW.case.batches(4)
    step = Step(*ours, cross_entropy)
    for batch in batches[:3]:
        step(*batch)
    before = arrays(*ours)
    ours[1].fails = True
    with pytest.raises(KeyError, match="no vectors"):
        step(*batches[3])
    same(arrays(*ours), before)
    ours[1].fails = False
    assert bool(step(*batches[3]).updated)


@pytest.mark.parametrize("name", ["counting", "attribute", "containers", "wrapped", "several"])
def test_loss_and_gradients_are_captured_where_the_update_is_called_and_so_is_the_update(name: str) -> None:
    make: Make = (OWN | KEEPING)[name]
    ends = []
    for replay in (False, True):
        model, optimizer = ROW.new()[0], make()
        step = Step(model, optimizer, cross_entropy, max_grad_norm=0.1, replay=replay)
        mx.random.seed(3)
        for number, (x, y) in enumerate(ROW.case.batches(2 * STEPS)):
            out = step(x * float("nan") if number in (4, 8) else x, y)  # a bad batch calls no update
            assert bool(out.skipped) == (number in (4, 8))
        assert (step.stats.mode, step.stats.skipped) == ("called", 2)
        captured = {
            "update" in trace.cause: str(trace.replay).startswith("captured") for trace in step.stats.traces
        }  # of the last ones
        assert captured == {False: replay, True: replay and name in ("counting", "attribute", "wrapped", "several")}
        ends.append(arrays(model, optimizer))
    same(*ends)


def test_an_update_takes_what_the_loss_has_set() -> None:
    class Setting(nn.Module):
        """A linear layer, and a codebook that follows what the layer gives."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.code = nn.Linear(4, 2), mx.zeros(2)

        def __call__(self, x: mx.array) -> mx.array:
            """Move the codebook, and pull towards it."""
            y: mx.array = self.layer(x)
            self.code = 0.9 * self.code + 0.1 * mx.stop_gradient(y).mean(axis=0)
            return (y - self.code).square().mean()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        loss: mx.array = model(x)
        return loss

    mx.random.seed(1)
    x, pairs = mx.random.normal((8, 4)), []
    for replay in (False, True):
        mx.random.seed(2)
        pairs.append((Setting(), Attribute()))
        step = Step(*pairs[-1], loss_fn, replay=replay)
        for number in range(STEPS):
            step(x if number != 2 else x * float("inf"))
        assert (step.stats.mode, step.stats.skipped) == ("called", 1)
    mx.random.seed(2)
    reference = (Setting(), Attribute())
    take = plain_step(*reference, loss_fn)
    for _ in range(STEPS - 1):
        take(x)
    for pair in pairs:
        same(arrays(*pair), arrays(*reference))


def test_what_is_unfrozen_later_begins_late_too() -> None:
    reference, ours = (STILL.new()[0], Late()), (STILL.new()[0], Late())
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    modes = []
    for number, batch in enumerate(STILL.case.batches(STEPS)):
        for model in (reference[0], ours[0]):
            if number in (0, 3):
                last = [module for _, module in model.named_modules() if "weight" in module][-1]
                (last.freeze if number == 0 else last.unfreeze)()
        for optimizer in (reference[1], ours[1]):
            if number == 3:  # MLX has `init` called by hand for what is new
                optimizer._initialized = False
        take(*batch)
        step(*batch)
        modes.append(step.stats.mode)
    same(arrays(*ours), arrays(*reference))
    assert modes == ["called"] * STEPS


def test_noise_in_the_update_of_a_window_is_refused_with_words() -> None:
    ours = (ROW.new()[0], Noisy())
    step, batches = Step(*ours, cross_entropy, accumulate=2), ROW.case.batches(2)
    step(*batches[0])
    with pytest.raises(ValueError, match=r"Noisy\) draws random numbers in its update.*accumulate=1"):
        step(*batches[1])


def test_an_optimizer_may_write_into_the_models_buffers() -> None:
    class Marking(optim.SGD):
        """Scales the model's first frozen array."""

        def update(self, model: nn.Module, gradients: Tree) -> None:
            """Update, and write."""
            super().update(model, gradients)
            model.scale = model.scale * 0.5

    class Scaled(nn.Module):
        """A linear layer with a frozen factor."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 2), mx.array(1.0)
            self.freeze(keys=["scale"], recurse=False)

        def __call__(self, x: mx.array) -> mx.array:
            """Scale what the layer gives."""
            y: mx.array = self.layer(x) * self.scale
            return y

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return model(x).square().mean()

    mx.random.seed(1)
    theirs, ours = Scaled(), Scaled()
    ours.update(theirs.parameters())
    reference, pair = (theirs, Marking(0.1)), (ours, Marking(0.1))
    take, step = plain_step(*reference, loss_fn), Step(*pair, loss_fn)
    x = mx.random.normal((8, 4))
    for _ in range(3):
        step(x)
    for _ in range(3):
        take(x)
    assert_close(snapshot(*pair), snapshot(*reference), 1e-6)
    assert (ours.scale.item(), step.stats.mode) == (0.125, "called")


@pytest.mark.parametrize("name", ["late", "counting", "lists", "attribute", "averaging", "wrapped", "several"])
def test_a_checkpoint_has_what_it_made_at_the_first_update(name: str, tmp_path: Path) -> None:
    make: Make = (OWN | KEEPING)[name]
    ours, again, batches = (STILL.new()[0], make()), (STILL.new()[0], make()), STILL.case.batches(STEPS)
    step = Step(*ours, cross_entropy)
    for batch in batches[:3]:
        step(*batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, number=3)
    for batch in batches[3:]:
        step(*batch)
    other = Step(*again, cross_entropy)
    assert Checkpoints(tmp_path).restore(other)
    for batch in batches[3:]:
        other(*batch)
    same(arrays(*again), arrays(*ours))


def test_an_attribute_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Remembering(Attribute):
        """Keeps its last counts in what is no plain JSON."""

        def __init__(self) -> None:
            super().__init__()
            self.last, self.still = collections.deque([0], maxlen=2), np.zeros(3)

        def apply_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
            """Note the count."""
            self.last.append(self.calls)
            return super().apply_gradients(gradients, parameters)

    step = Step(STILL.new()[0], Remembering(), cross_entropy)
    step.optimizer.init(step.model.trainable_parameters())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, number=0)
        for number, batch in enumerate(STILL.case.batches(2)):
            step(*batch)
            with pytest.warns(CheckpointWarning, match=r"attribute last .*collections\.deque") as caught:
                checkpoints.save(step, number=1 + number)
            assert len(caught) == 1
    other = Step(STILL.new()[0], Remembering(), cross_entropy)
    Checkpoints(tmp_path).restore(other)
    assert other.attributes == {"calls": 2}
    Checkpoints(tmp_path).restore(other, which=0)
    assert other.attributes == {}


def test_it_is_called_once_where_other_steps_have_had_other_numbers_in_the_loss() -> None:
    weight = [1.0]

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return weight[0] * cross_entropy(model, x, y)

    batches = ROW.case.batches(STEPS)
    for weight[0] in (0.5, 0.75):
        Step(ROW.new()[0], optim.Adam(1e-2), loss_fn)(*batches[0])
    weight[0] = 0.25
    reference, ours = (ROW.new()[0], Helped()), (ROW.new()[0], Helped())
    for side in (plain_step(*reference, loss_fn), Step(*ours, loss_fn)):
        mx.random.seed(5)
        assert len([side(*batch) for batch in batches]) == STEPS
    same(arrays(*ours), arrays(*reference))


class KeepsVelocities:
    """It makes its arrays at its first update."""

    def __init__(self) -> None:
        self.velocities = dict[str, mx.array]()

    def update(self, model: nn.Module, gradients: Tree) -> None:
        for name, gradient in tree_flatten(gradients):
            self.velocities[name] = 0.9 * self.velocities.get(name, mx.zeros_like(gradient)) + gradient
        moved = tree_unflatten(list(self.velocities.items()))
        model.update(tree_map(lambda p, v: p - 0.05 * v, model.trainable_parameters(), moved))


@pytest.mark.parametrize("nonfinite", ["skip", "allow"])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("varies", [0, 1, 2])
def test_a_loss_counts_once_beside_an_update_of_ones_own(varies: int, window: int, nonfinite: Any) -> None:
    def run(native: bool) -> tuple[Any, ...]:
        seen: Any = types.SimpleNamespace(calls=0, log=[], total=mx.array(0.0))
        model: Any = nn.Linear(4, 3)
        model.update(tree_map(lambda p: mx.full(p.shape, 0.25), model.parameters()))
        model.calls = 0
        optimizer: Any = KeepsVelocities()

        def loss_fn(model: Any, x: mx.array, target: float) -> mx.array:
            seen.calls += 1
            model.calls += 2
            seen.log.append(7)
            seen.total = seen.total * 2 + 1
            return (model(x) - target).square().mean()

        step = Step(model, optimizer, loss_fn, accumulate=window, nonfinite=nonfinite)
        grad, sums = nn.value_and_grad(model, loss_fn), list[Tree]()
        for number in range(8):
            x = mx.random.normal((5, 4), key=mx.random.key(number))
            target = [1.0, float(number % 2), float(number)][varies]
            if native:
                mx.eval(step(x, target).loss)
                continue
            sums.append(grad(model, x, target)[1])
            if len(sums) == window:
                optimizer.update(model, tree_map(lambda *each: sum(each[1:], each[0]) / window, *sums))
                sums.clear()
            mx.eval(model.parameters())
        return seen.calls, model.calls, seen.log, seen.total.item(), model.weight.tolist()

    *seen, weight = run(native=True)
    *expected, expected_weight = run(native=False)
    assert seen == expected
    assert mx.allclose(mx.array(weight), mx.array(expected_weight))


class Slot:
    """What an optimizer keeps of one parameter."""

    velocity: mx.array | None = None


class KeepsSlots:
    """An optimizer of no class of MLX's that makes an object for each parameter at its first update."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = collections.defaultdict(Slot)

    def update(self, model: nn.Module, gradients: Tree) -> None:
        new = []
        for (name, parameter), (_, gradient) in zip(
            tree_flatten(model.parameters()), tree_flatten(gradients), strict=True
        ):
            slot = self.slots[name]
            slot.velocity = gradient if slot.velocity is None else 0.9 * slot.velocity + gradient
            new.append((name, parameter - 0.02 * slot.velocity))
        model.update(tree_unflatten(new))


def distances(model: nn.Module, x: mx.array) -> mx.array:
    return (model(x) - 1).square().mean()


def _train(
    ways: list[str],
    make: Callable[[], Any],
    between: Callable[[int, Any], Any],
    steps: int = 12,
    distances: Callable[..., mx.array] = distances,
) -> list[Any]:
    """Train beside each other in each way, with something done behind each step; the losses and what that returned."""
    taken = []
    for way in ways:
        mx.random.seed(0)
        model, optimizer = nn.Linear(3, 2), make()
        step, grad, found = Step(model, optimizer, distances), nn.value_and_grad(model, distances), []
        for number in range(steps):
            x = mx.random.normal((4, 3), key=mx.random.key(number))
            if way == "step":
                loss = step(x).loss
            elif way == "fast_step":
                loss = fast_step(model, optimizer, distances, x)
            else:
                loss, gradients = grad(model, x)
                optimizer.update(model, gradients)
            found += [loss.item(), between(number, optimizer)]
        taken.append(found)
    return taken


WAYS = ["plain", "step", "fast_step"]


def _stores() -> Callable[..., mx.array]:
    """Return a loss that stores an array where there is none."""
    kept = types.SimpleNamespace(last=None)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        kept.last = mx.stop_gradient(model(x)).mean(0)
        return distances(model, x)

    return loss_fn


def _takes() -> Callable[..., mx.array]:
    """Return a loss that may take from an iterator."""
    weights, kept = itertools.cycle([1.0, 2.0]), types.SimpleNamespace(takes=False)
    return lambda model, x: distances(model, x) * (next(weights) if kept.takes else 1.0)


LOSSES: dict[str, Callable[[], Callable[..., mx.array]]] = {
    "reads": lambda: distances,
    "stores": _stores,
    "may take": _takes,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("begun", [True, False])
def test_an_optimizer_may_make_objects_with_arrays_at_its_first_update(begun: bool, loss: str) -> None:
    def make() -> KeepsSlots:
        made = KeepsSlots()
        if begun:
            made.slots["weight"].velocity, made.slots["bias"].velocity = mx.zeros((2, 3)), mx.zeros((2,))
        return made

    plain, *others = _train(WAYS, make, lambda _, it: it.slots["weight"].velocity.sum().item(), 6, LOSSES[loss]())
    for other in others:
        np.testing.assert_allclose(other, plain, rtol=1e-5)


class Momentum:
    """An optimizer of no class of MLX's."""

    def __init__(self) -> None:
        self.rate, self.norm = 0.05, mx.array(0.0)
        self.velocities: dict[str, mx.array] = {}

    def update(self, model: nn.Module, gradients: Tree) -> None:
        flat = dict(tree_flatten(gradients))
        self.norm = 0.9 * self.norm + 0.1 * sum(each.square().sum() for each in flat.values())
        for name, gradient in flat.items():
            self.velocities[name] = 0.9 * self.velocities[name] + gradient if name in self.velocities else gradient
        parameters = dict(tree_flatten(model.parameters()))
        new = [(name, parameters[name] - self.rate * each) for name, each in self.velocities.items()]
        model.update(tree_unflatten(new))


def test_attributes_that_are_put_in_the_place_of_others_are_those_that_count() -> None:
    saved: State = {}

    def between(number: int, optimizer: Momentum) -> float:
        if number == 3:
            saved.update(vars(optimizer), velocities=dict(optimizer.velocities))
        if number == 7:  # back to the state of then, with another rate
            optimizer.__dict__ = {**saved, "rate": 0.02}  # type: ignore[assignment]
            saved.clear()
        return float(optimizer.norm.item())

    plain, *others = _train(WAYS, Momentum, between)
    for other in others:
        np.testing.assert_allclose(other, plain, rtol=1e-5)


class Around(Own):
    """Leaves the update to an optimizer within it, which begins with the first gradients."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__()
        self.inner = inner

    def apply_gradients(self, gradients: Tree, parameters: Tree) -> Tree:
        """Update by the one within."""
        updated: Tree = self.inner.apply_gradients(gradients, parameters)
        return updated


@pytest.mark.parametrize("way", ["counts", "reads", "draws"])
@pytest.mark.parametrize("among", [False, True])
def test_a_schedule_of_an_optimizer_within_is_called_at_each_update(way: str, among: bool) -> None:
    found: list[Any] = []
    for fast in (False, True):
        mx.random.seed(2)
        calls, setting, rng = [0], {"rate": 0.1}, np.random.default_rng(3)

        def rate(_: mx.array, calls: Any = calls, setting: Any = setting, rng: Any = rng) -> mx.array:
            if way == "counts":
                calls[0] += 1
                return mx.array(0.1 / calls[0])
            return mx.array(setting["rate"] if way == "reads" else 0.1 * rng.random())

        model, x, optimizer = nn.Linear(3, 2), mx.ones((4, 3)), Around(optim.SGD(rate))
        if among:
            optimizer = optim.MultiOptimizer([optimizer, optim.SGD(0.1)], [lambda path, _: "bias" in path])
        step, plain = Step(model, optimizer, distances), plain_step(model, optimizer, distances)
        losses = []
        for number in range(20):
            setting["rate"] = 0.1 if number < 12 else 0.02
            losses.append(float(step(x).loss if fast else plain(x)[0]))
        found.append([*losses, calls[0], rng.random()])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-7)  # losses come near zero


def test_what_an_update_reads_that_nobody_watches_is_seen() -> None:
    class Share:
        """What there is to be found among the subclasses."""

    class Half(Share):
        share = 0.5

    class Scaled(Own):
        def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
            assert time.perf_counter() > 0
            return super().apply_single(gradient * Share.__subclasses__()[0].share, parameter, state)  # type: ignore[attr-defined]

    def train(fast: bool) -> list[float]:
        mx.random.seed(2)
        Half.share = 0.5
        model, optimizer, x = nn.Linear(3, 2), Scaled(), mx.ones((4, 3))
        step, plain = Step(model, optimizer, distances), plain_step(model, optimizer, distances)
        losses = []
        for number in range(12):
            Half.share = 0.5 if number < 8 else 5.0
            losses.append(float(step(x).loss if fast else plain(x)[0]))
        return losses

    np.testing.assert_allclose(train(True), train(False), rtol=1e-5)


def test_an_optimizer_that_is_put_in_the_place_of_another_one_takes_the_next_step() -> None:
    mx.random.seed(0)
    model, plain, x = nn.Linear(3, 2), nn.Linear(3, 2), mx.ones((4, 3))
    plain.update(model.parameters())
    step = Step(model, optim.SGD(0.1), distances)
    for optimizer in (optim.SGD(0.1), optim.SGD(0.2), Momentum()):
        step.optimizer = optimizer
        twin = Momentum() if isinstance(optimizer, Momentum) else optim.SGD(optimizer.learning_rate)
        loss, gradients = nn.value_and_grad(plain, distances)(plain, x)
        twin.update(plain, gradients)
        assert step(x).loss.item() == pytest.approx(loss.item())
    assert_close(snapshot(model, optim.SGD(0.1)), snapshot(plain, optim.SGD(0.1)), 1e-5)


def test_the_dict_behind_the_state_is_current_and_what_is_put_there_counts() -> None:
    def between(number: int, optimizer: Any) -> float | None:
        moments = optimizer._state["weight"]
        if number == 7:  # no more momentum
            moments["m"], optimizer._state["bias"]["m"] = mx.zeros((2, 3)), mx.zeros((2,))
        return float(optimizer._state["weight"]["v"].sum().item()) if number % 3 == 0 else None

    plain, *others = _train(WAYS, lambda: optim.Adam(0.05), between)
    for other in others:
        np.testing.assert_allclose(
            [each for each in other if each is not None], [each for each in plain if each is not None], rtol=1e-4
        )


class Replaces(Momentum):
    """Makes its dicts anew at each update, one within the other, or goes on with those of the first."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.anew, self.nested, self.listed = anew, {"inner": {"sum": mx.array(0.0)}}, [mx.array(0.0)]

    def update(self, model: nn.Module, gradients: Tree) -> None:
        if self.anew:
            self.velocities = dict(self.velocities)
        super().update(model, gradients)
        total = self.nested["inner"]["sum"] + self.norm
        if self.anew:
            self.nested, self.listed = {"inner": {"sum": total}}, [self.listed[0] + total]
        else:
            self.nested["inner"]["sum"], self.listed[0] = total, self.listed[0] + total


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("anew", [True, False])
def test_who_holds_a_dict_that_the_update_replaces_has_what_was_in_it(anew: bool, at: int, compiled: bool) -> None:
    taken = []
    for plain in (True, False):
        mx.random.seed(0)
        model, optimizer = nn.Linear(3, 2), Replaces(anew)
        step = Step(model, optimizer, distances, compile=compiled)
        for number in range(9):
            x = mx.random.normal((4, 3), key=mx.random.key(number))
            if plain:
                _, gradients = nn.value_and_grad(model, distances)(model, x)
                optimizer.update(model, gradients)
            else:
                step(x)
            if number == at:
                velocities, inner, listed = optimizer.velocities, optimizer.nested["inner"], optimizer.listed
        held = [velocities["weight"], inner["sum"], listed[0]]
        if anew:
            now = [optimizer.velocities["weight"], optimizer.nested["inner"]["sum"], optimizer.listed[0]]
        else:
            assert optimizer.nested["inner"] is inner
            now = held
        taken.append([each.sum().item() for each in (*held, *now)])
    np.testing.assert_allclose(taken[1], taken[0], rtol=1e-5)


def test_a_dict_that_the_update_replaces_stays_the_same_one_until_it_does() -> None:
    model, optimizer = nn.Linear(3, 2), Replaces(anew=True)
    step = Step(model, optimizer, distances, accumulate=2)
    for number in range(12):
        held = optimizer.velocities
        step(mx.full((4, 3), 1.0 + number))
        assert (optimizer.velocities is held) == (number % 2 == 0)
