"""An error leaves everything as it was, and is the user's own; a loss that reads values is called at each step."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from support.helpers import Row, Tree, assert_close, flat, plain_step, random_key, snapshot
from support.models import cross_entropy
from support.places import Child

Pair = tuple[nn.Module, optim.Optimizer]


class Ours(Exception):
    """Raised by the losses of these tests."""


class Failing:
    """A loss that raises after it has touched model and random state, when told to."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __call__(self, model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        loss = cross_entropy(model, x, y)
        if self.error is not None:
            raise self.error
        return loss


def everything(pair: Pair) -> dict[str, np.ndarray]:
    """Copy all that may have changed, and touch every array so that a tracer left behind shows."""
    mx.eval(pair[0].parameters(), pair[1].state)
    return snapshot(*pair)


@pytest.mark.parametrize("error", [Ours("no"), ValueError("[eval] looks like it"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "user-adam", "multi"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_error_in_the_loss_changes_nothing(error: BaseException, optimizer: str, steps_before: int) -> None:
    row, loss_fn = Row("conv", optimizer), Failing()
    reference, ours = row.new(), row.new()
    plain, step = plain_step(*reference, cross_entropy), Step(*ours, loss_fn)
    batches = row.case.batches(5)
    mx.random.seed(3)
    for batch in batches[:steps_before]:
        plain(*batch)
    mx.random.seed(3)
    for batch in batches[:steps_before]:
        step(*batch)
    before, objects = everything(ours), [id(a) for a in flat(ours[0].parameters()).values()]
    loss_fn.error = error
    x, y = batches[3]
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            step(x[:3], y[:3])  # a new shape, so that the loss runs
        assert caught.value is error
        assert caught.traceback[-1].frame.code.name == "__call__"
        assert Path(caught.traceback[-1].path) == Path(__file__)
        assert_close(everything(ours), before, 0)
    assert [id(a) for a in flat(ours[0].parameters()).values()] == objects
    loss_fn.error = None
    mx.random.seed(4)
    wanted = [float(plain(*batch)[0]) for batch in batches[2:]]
    mx.random.seed(4)
    np.testing.assert_allclose([float(step(*batch).loss) for batch in batches[2:]], wanted, rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)


def test_the_traceback_shows_the_users_lines() -> None:
    def inner(x: mx.array) -> None:
        raise Ours(f"at {x.shape}")

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        inner(model(x))
        return mx.array(0.0)

    with pytest.raises(Ours) as caught:
        fast_step(*Row("mlp", "adamw").new(), loss_fn, *Row("mlp", "adamw").case.batches(1)[0])
    text = "".join(traceback.format_exception(caught.value))
    assert "inner(model(x))" in text
    assert 'raise Ours(f"at {x.shape}")' in text
    assert caught.value.__cause__ is None


def raised(call: Callable[[], object]) -> BaseException | None:
    """Return what a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("steps_before", [0, 2])
def test_wrong_shapes_change_nothing_and_read_as_in_plain_mlx(steps_before: int) -> None:
    row = Row("conv", "adamw")
    ours = row.new()
    step, batches = Step(*ours, cross_entropy), row.case.batches(3)
    for batch in batches[:steps_before]:
        step(*batch)
    before = everything(ours)
    with pytest.raises(ValueError, match=r"\[reshape\]") as wanted:
        cross_entropy(row.new()[0], mx.ones((8, 7)), batches[0][1])
    mx.random.seed(0)
    before["random"] = np.array(random_key())
    with pytest.raises(ValueError, match=r"\[reshape\]") as caught:
        step(mx.ones((8, 7)), batches[0][1])
    assert str(caught.value) == str(wanted.value)
    assert_close(everything(ours), before, 0)
    assert float(step(*batches[0]).loss) > 0


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, x, y: model(x).sum(axis=0),
        lambda model, x, y: 3.0,
        lambda model, x, y: (None, model(x)),
        lambda model, x, y: {"loss": model(x).sum()},
    ],
    ids=["vector", "number", "none-first", "dict"],
)
def test_a_loss_that_is_not_a_scalar_array_is_an_error(loss_fn: Callable[..., Tree]) -> None:
    row = Row("conv", "adamw")
    ours = row.new()
    step, batch = Step(*ours, loss_fn), row.case.batches(1)[0]
    before = everything(ours)
    error = raised(lambda: step(*batch))
    assert isinstance(error, (ValueError, TypeError))
    assert "loss" in str(error) or "scalar" in str(error)
    assert_close(everything(ours), before, 0)
    good = Step(*ours, cross_entropy)
    assert float(good(*batch).loss) > 0


def reading(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    loss = cross_entropy(model, x, y)
    if loss.item() == 1e6:
        return loss * 0
    return loss


def branching(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    loss = cross_entropy(model, x, y)
    return loss if loss < 1e6 else loss * 0


def converting(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    loss = cross_entropy(model, x, y)
    return loss + 0 * float(np.array(x).max())


@pytest.mark.parametrize("loss_fn", [reading, branching, converting])
@pytest.mark.parametrize("optimizer", ["adamw", "user-adam"])
def test_a_loss_that_reads_values_is_called_at_each_step(loss_fn: Callable[..., Tree], optimizer: str) -> None:
    row = Row("conv", optimizer)
    reference, ours = row.new(), row.new()
    plain, step = plain_step(*reference, loss_fn, 0.1), Step(*ours, loss_fn, max_grad_norm=0.1)
    batches = row.case.batches(4)
    mx.random.seed(3)
    wanted = [float(plain(*batch)[0]) for batch in batches]
    mx.random.seed(3)
    losses = [float(step(*batch).loss) for batch in batches]  # a warning would be an error
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    assert step.stats.mode == "called"
    assert step.stats.reason is not None
    assert ("reads the value of an array" if optimizer == "adamw" else "HalvedAdam") in step.stats.reason
    assert len(step.stats.traces) == (1 if optimizer == "adamw" else 2)  # a called update is a part of its own


def test_an_error_in_a_loss_that_reads_values_changes_nothing() -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        loss = cross_entropy(model, x, y)
        if float(loss) < 0 or fails:
            raise Ours("later")
        return loss

    fails: list[bool] = []
    row = Row("conv", "adamw")
    ours = row.new()
    step, batches = Step(*ours, loss_fn), row.case.batches(4)
    step(*batches[0])
    before = everything(ours)
    fails.append(True)
    with pytest.raises(Ours, match="later"):
        step(*batches[1])
    assert_close(everything(ours), before, 0)
    fails.clear()
    assert float(step(*batches[1]).loss) > 0


class Unwilling(optim.Adam):
    """A user's optimizer that fails while it is initialised, after it has begun."""

    willing = False

    def init_single(self, parameter: mx.array, state: dict[str, Tree]) -> None:
        """Refuse vectors."""
        if parameter.ndim == 1 and not self.willing:
            raise Ours("no vectors")
        super().init_single(parameter, state)


def test_an_optimizer_that_cannot_be_initialised_stays_as_it_was() -> None:
    row = Row("mlp", "adamw")
    model, optimizer = row.new()[0], Unwilling(1e-2)
    step, batch = Step(model, optimizer, cross_entropy), row.case.batches(1)[0]
    with pytest.raises(Ours, match="no vectors"):
        step(*batch)
    assert set(optimizer.state) == {"step", "learning_rate"}
    optimizer.willing = True
    assert float(step(*batch).loss) > 0


class Remembering(nn.Module):
    """A model that keeps its last activation."""

    def __init__(self, last: mx.array | None) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self._last = last

    def __call__(self, x: mx.array) -> mx.array:
        """Keep what comes out."""
        self._last = self.layer(x)
        return self._last


def remember(last: mx.array | None, fast: bool) -> tuple[dict[str, np.ndarray], str, list[str]]:
    """Train such a model; return what it remembers and learnt, the way it went, and the warnings."""
    mx.random.seed(1)
    model, optimizer = Remembering(last), optim.AdamW(1e-2)
    step = Step(model, optimizer, cross_entropy) if fast else plain_step(model, optimizer, cross_entropy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in Row("mlp", "adamw").case.batches(3):
            step(*batch)
    state = snapshot(model) | {"last": np.array(model._last)}
    return state, step.stats.mode if isinstance(step, Step) else "", [str(each.message) for each in caught]


def test_an_array_that_a_model_stores_where_there_was_none_is_a_buffer_from_then_on() -> None:
    state, way, messages = remember(None, fast=True)
    assert_close(state, remember(None, fast=False)[0], 1e-5)
    assert (way, messages) == ("called", [])


@pytest.mark.parametrize("compile", [True, False])
def test_gradients_of_a_model_that_stores_new_arrays_leave_them_on_it(compile: bool) -> None:
    model, optimizer = Remembering(None), optim.AdamW(1e-2)
    step = Step(model, optimizer, cross_entropy, compile=compile)
    _, gradients = step.gradients(*Row("mlp", "adamw").case.batches(1)[0])
    assert model._last.shape == (8, 4)
    mx.eval(gradients, model.state)


def test_an_array_that_is_stored_anew_in_each_step_is_a_buffer() -> None:
    state, way, messages = remember(mx.zeros((8, 4)), fast=True)
    assert_close(state, remember(mx.zeros((8, 4)), fast=False)[0], 1e-5)
    assert (way, messages) == ("native", [])


def test_an_array_out_of_an_iterator_is_an_input_of_the_step() -> None:
    row = Row("mlp", "adamw")
    reference, ours = row.new(), row.new()
    batch, other = row.case.batches(2)
    hidden = itertools.cycle([batch[0], other[0]])  # in a place where nobody can look

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        return cross_entropy(model, x + next(hidden), y)

    plain, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    wanted = [float(plain(*batch)[0]) for _ in range(6)]
    losses = [float(step(*batch).loss) for _ in range(6)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    assert step.stats.mode == "called"


class Scaled(nn.Module):
    """Scales by an array, where MLX takes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self._scale = nn.Linear(4, 4), 1 / mx.sqrt(mx.array(8.0))

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, length, 4] to [batch, 1, length, 4]."""
        y = self.layer(x)[:, None]
        return mx.fast.scaled_dot_product_attention(y, y, y, scale=self._scale)  # type: ignore[arg-type]


def test_an_array_in_the_place_of_a_number_is_read_and_a_wrong_argument_is_an_error() -> None:
    def loss_fn(model: nn.Module, x: mx.array, axis: int | str = 0) -> mx.array:
        return mx.square(model(x)).sum(axis=axis).sum()  # type: ignore[arg-type]

    losses = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer = Scaled(), optim.SGD(0.1)
        x = mx.random.normal((2, 5, 4))
        if not fast:
            plain = plain_step(model, optimizer, loss_fn)
            losses.append([float(plain(x)[0]) for _ in range(4)])
            continue
        step = Step(model, optimizer, loss_fn)
        for _ in range(2):  # of the user's: the next call is none
            with pytest.raises(TypeError, match="incompatible function arguments"):
                step(x, "first")
        losses.append([float(step(x).loss) for _ in range(4)])
        assert (step.stats.mode, step.stats.reason) == ("called", "reads the value of an array")
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)

    step = Step(nn.Linear(4, 4), optim.SGD(0.1), loss_fn)
    for _ in range(3):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            step(x, "first")
        step(x)
    assert step.stats.mode == "native"


def refused_by_the_device(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Multiply as MLX's CPU does not."""
    half = mx.ones((32, 32), mx.float16)
    product = mx.block_masked_mm(half, half, 32, mx.ones((1, 1), mx.bool_))
    return cross_entropy(model, x, y) + product.sum()


def refused_by_the_engine(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return what MLX has no gradient of."""
    return mx.linalg.svd(model(x), stream=mx.cpu)[1].sum()


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU computes these")
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("call", ["step", "gradients"])
def test_no_message_has_a_path_of_the_machine_that_built_it(call: str, compile: bool, tmp_path: Path) -> None:
    row = Row("mlp", "adamw")
    x, y = row.case.batches(1)[0]
    mx.save_safetensors(os.fspath(tmp_path / "100%s.safetensors"), {"x": x})
    lost = mx.load(os.fspath(tmp_path / "100%s.safetensors"))["x"]
    os.truncate(tmp_path / "100%s.safetensors", 100)
    for loss_fn, given in ((refused_by_the_device, x), (refused_by_the_engine, x), (cross_entropy, lost)):
        step = Step(*row.new(), loss_fn, compile=compile)
        take = step if call == "step" else step.gradients
        error = raised(functools.partial(take, given, y))
        assert isinstance(error, (ValueError, RuntimeError)), loss_fn
        assert str(error)
        assert not re.search(r" at /|\.cargo|\.(c|cpp|rs):\d", str(error)), str(error)


NO_COMPILER = """
import warnings, shutil
import mlx.core as mx, numpy as np
from support.helpers import Row, plain_step, snapshot, assert_close
from faststep import Step

assert shutil.which("g++") is None
row = Row("conv", "adamw", 0.1)
reference, ours = row.new(), row.new()
batches = row.case.batches(4)
loss_fn = row.case.loss_fn
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step = Step(*ours, loss_fn, max_grad_norm=0.1)
    mx.random.seed(3)
    losses = [float(step(*batch).loss) for batch in batches]
assert len(caught) == 1, [str(each.message) for each in caught]
assert "compil" in str(caught[0].message), caught[0].message
assert step.stats.mode == "plain", step.stats.mode
got = snapshot(*ours)
mx.disable_compile()
plain = plain_step(*reference, loss_fn, 0.1)
mx.random.seed(3)
np.testing.assert_allclose(losses, [float(plain(*batch)[0]) for batch in batches], rtol=1e-5)
assert_close(got, snapshot(*reference), 2e-5)
"""


@pytest.mark.skipif(not mx.default_device().type == mx.cpu or sys.platform == "win32", reason="only the CPU needs g++")
def test_no_compiler_on_the_machine(child: Child, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    child(NO_COMPILER, PATH=os.fspath(empty), TMPDIR=os.fspath(empty), FASTSTEP_KERNELS="0")  # with them none is needed


@pytest.mark.skipif(not mx.default_device().type == mx.cpu or sys.platform == "win32", reason="only the CPU needs g++")
def test_no_directory_for_kernels(child: Child, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), os.fspath(file))
    child(NO_COMPILER.replace("is None", "is not None", 1), **nowhere, FASTSTEP_KERNELS="0")


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_s_compiler_refuses_a_kernel() -> None:
    kernel = mx.fast.cuda_kernel(name="broken", input_names=["x"], output_names=["out"], source="this is no C++;")

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        (out,) = kernel(
            inputs=[mx.stop_gradient(x)],
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        return cross_entropy(model, x, y) + out.sum()

    row = Row("mlp", "adamw")
    pair = row.new()
    before = snapshot(*pair)
    step = Step(*pair, loss_fn)
    why = "the compiler of CUDA failed on one of MLX's kernels"
    with pytest.warns(RuntimeWarning, match=why), pytest.raises(RuntimeError, match=why):
        step(*row.case.batches(1)[0])
    assert_close(snapshot(*pair), before, 0)


def test_an_error_behind_another_one_has_its_own_text() -> None:
    def raises(model: nn.Module, x: mx.array) -> mx.array:
        raise KeyError("the first one")

    def indexes(model: nn.Module, x: mx.array) -> mx.array:
        return model.weight[mx.argpartition(model(x), 1, axis=-1)].sum()

    model, x = nn.Linear(4, 2), mx.ones((3, 4))
    with pytest.raises(KeyError, match="the first one"):
        Step(model, optim.SGD(0.1), raises)(x)
    with pytest.raises(ValueError, match="VJP with respect to indices"):
        Step(model, optim.SGD(0.1), indexes)(x)


def test_an_optimizer_that_is_none_is_refused_with_what_to_do() -> None:
    class Idle:
        pass

    for optimizer, name in ((Idle(), "Idle"), (nn.Linear(4, 2), "Linear"), ({}, "dict"), (optim.Adam, "type")):
        with pytest.raises(TypeError, match=rf"expected mlx.optimizers.Optimizer, or an object with .*, got .*{name}$"):
            Step(nn.Linear(4, 2), optimizer, cross_entropy)  # type: ignore[arg-type]


TRANSFORMATIONS: dict[str, Callable[[Callable[[mx.array], mx.array], mx.array], object]] = {
    "grad": lambda f, x: mx.grad(f)(x),
    "vmap": lambda f, x: mx.vmap(f)(mx.stack([x, x])),
    "compile": lambda f, x: mx.compile(f)(x),
    "another step": lambda f, x: Step(nn.Linear(2, 2), optim.SGD(0.1), lambda _, x: f(x))(x),
}


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("untouched", [True, False], ids=["batch of values", "batch of tracers"])
@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_a_step_inside_of_a_transformation_changes_nothing(
    transform: Callable[[Callable[[mx.array], mx.array], mx.array], object], untouched: bool, first: bool
) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x)).mean()

    def new() -> Pair:
        mx.random.seed(3)
        return nn.Linear(4, 4), optim.Adam(1e-2)

    (model, optimizer), reference = new(), new()
    step, plain, x = Step(model, optimizer, loss_fn), plain_step(*reference, loss_fn), mx.ones((2, 4))
    if not first:
        step(x)
        plain(x)
    for call in (lambda x: step(x).loss, lambda x: fast_step(model, optimizer, loss_fn, x)):
        with pytest.raises(RuntimeError, match=r"inside of a function that is transformed .* nothing has changed"):
            transform(lambda t, call=call: call(x) if untouched else call(x * t), mx.array(2.0))
        assert step(x).loss.item() == pytest.approx(plain(x)[0].item(), rel=1e-6)
    assert_close(everything((model, optimizer)), everything(reference), 2e-6)
