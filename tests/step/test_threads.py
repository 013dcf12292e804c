"""Threads: a step belongs to one, a lazy array to another, and waiting lets all others run."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from faststep._step._program import Program
from faststep._step._user_optimizer import StepCache
from support.helpers import Row, Tree, assert_close, plain_step, snapshot
from support.models import cross_entropy

ROW = Row("mlp", "adamw")


def elsewhere(work: Callable[[], Tree]) -> Tree:
    """Run work in another thread; return what it returns, or raise what it raises."""
    results: list[Tree] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_belongs_to_its_thread(steps_before: int) -> None:
    model, optimizer = ROW.new()
    step, batches = Step(model, optimizer, cross_entropy), ROW.case.batches(4)
    for batch in batches[:steps_before]:
        step(*batch)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="thread"):
        elsewhere(lambda: step(*batches[2]))
    assert_close(snapshot(model, optimizer), before, 0)
    assert float(step(*batches[3]).loss) > 0


def test_another_thread_makes_a_step_of_its_own() -> None:
    reference, ours = ROW.new(), ROW.new()
    plain, batches = plain_step(*reference, cross_entropy), ROW.case.batches(6)
    here = Step(*ours, cross_entropy)
    there: list[Step] = []

    def train() -> None:
        there.append(Step(*ours, cross_entropy))
        for batch in batches[2:4]:
            there[0](*batch)
        there[0].synchronize()

    for batch in batches:
        plain(*batch)
    for batch in batches[:2]:
        here(*batch)
    here.synchronize()
    elsewhere(train)
    for batch in batches[4:]:
        here(*batch)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-6)
    with pytest.raises(RuntimeError, match="thread"):
        there[0](*batches[0])


@pytest.mark.parametrize("optimizer", ["adamw", "user-adam", "multi"])
def test_fast_step_goes_on_in_any_thread(optimizer: str) -> None:
    """It makes a step of its own there; model, optimizer and what the loss counts are the same ones."""
    row = Row("mlp", optimizer)
    reference, ours, calls = row.new(), row.new(), [0]

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        calls[0] += 1
        return cross_entropy(model, x, y)

    plain, batches = plain_step(*reference, cross_entropy), row.case.batches(12)
    wanted = [float(plain(*batch)[0]) for batch in batches]

    def train(first: int) -> list[float]:
        return [float(fast_step(*ours, loss_fn, *batch)) for batch in batches[first : first + 3]]

    losses = train(0) + elsewhere(lambda: train(3)) + train(6) + elsewhere(lambda: train(9))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert calls == [12]
    elsewhere(lambda: mx.eval(ours[0].parameters(), ours[1].state))
    assert_close(snapshot(*ours), snapshot(*reference) | {"random": snapshot(*ours)["random"]}, 1e-5)


@pytest.mark.parametrize("kind", ["sgd", "user-adam"])
def test_the_programs_of_fast_step_go_with_their_thread(kind: str) -> None:
    """One that runs on keeps its own."""
    row = Row("mlp", kind)
    model, optimizer = row.new()
    batch = row.case.batches(1)[0]
    fast_step(model, optimizer, cross_entropy, *batch)
    cache = StepCache.at(model, optimizer)
    assert cache is not None
    (mine,) = cache.programs
    theirs = elsewhere(lambda: weakref.ref((fast_step(model, optimizer, cross_entropy, *batch), newest(cache))[1]))
    assert list(cache.programs) == [mine]
    assert theirs() is None
    assert float(fast_step(model, optimizer, cross_entropy, *batch)) > 0


def newest(cache: StepCache) -> Program:
    program: Program = list(cache.programs.values())[-1][2]
    return program


def tree_loss(model: nn.Module, batch: dict[str, Tree], rest: list[mx.array]) -> mx.array:
    return cross_entropy(model, batch["x"], batch["y"]) + rest[1].sum()


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("fast", [True, False], ids=["fast_step", "Step"])
def test_a_lazy_array_of_another_thread_is_named(steps_before: int, fast: bool) -> None:
    model, optimizer = ROW.new()
    step = Step(model, optimizer, cross_entropy)
    x, y = ROW.case.batches(1)[0]

    def take(x: mx.array, y: mx.array) -> mx.array:
        return fast_step(model, optimizer, cross_entropy, x, y) if fast else step(x, y).loss

    for _ in range(steps_before):
        take(x, y)
    before = snapshot(model, optimizer)
    lazy_x, lazy_y = elsewhere(lambda: (x + 1, y * 1))
    with pytest.raises(ValueError, match=r"\bx\b.*thread|thread.*\bx\b"):
        take(lazy_x, y)
    with pytest.raises(ValueError, match=r"\by\b.*thread|thread.*\by\b"):
        take(x, lazy_y)
    assert_close(snapshot(model, optimizer), before, 0)
    assert float(take(x, y)) > 0


def test_a_lazy_array_in_a_tree_is_named_by_its_path() -> None:
    model, optimizer = ROW.new()
    step = Step(model, optimizer, tree_loss)
    x, y = ROW.case.batches(1)[0]
    lazy = elsewhere(lambda: x + 1)
    with pytest.raises(ValueError, match=r'batch\["x"\]'):
        step({"x": lazy, "y": y}, [y, x])
    with pytest.raises(ValueError, match=r"rest\[1\]"):
        step({"x": x, "y": y}, [y, lazy])
    assert float(step({"x": x, "y": y}, [y, x]).loss) != 0


def test_evaluated_arrays_of_another_thread_are_good() -> None:
    reference, ours = ROW.new(), ROW.new()
    plain, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)

    def load(x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        batch = (x * 2, mx.array(np.array(y)))
        mx.eval(batch)
        return batch

    for x, y in ROW.case.batches(4):
        wanted, _ = plain(x * 2, y)
        batch = elsewhere(functools.partial(load, x, y))
        np.testing.assert_allclose(step(*batch).loss, wanted, rtol=1e-6)


def test_lazy_arrays_of_this_thread_are_good() -> None:
    reference, ours = ROW.new(), ROW.new()
    plain, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    for x, y in ROW.case.batches(4):
        np.testing.assert_allclose(step(x * 2 + 1, y).loss, plain(x * 2 + 1, y)[0], rtol=1e-6)


def test_each_thread_has_steps_of_its_own() -> None:
    row = Row("mlp", "sgd-momentum")
    batches = row.case.batches(4)
    starts = [row.new() for _ in range(2)]

    def train(pair: tuple[nn.Module, optim.Optimizer]) -> list[float]:
        step = Step(*pair, cross_entropy)
        return [float(step(*batch).loss) for batch in batches]

    np.testing.assert_allclose(elsewhere(lambda: train(starts[0])), train(starts[1]), rtol=1e-6)


def test_the_results_of_a_step_are_readable_elsewhere() -> None:
    model, optimizer = ROW.new()
    step = Step(model, optimizer, cross_entropy)
    out = step(*ROW.case.batches(1)[0])
    step.synchronize()
    mx.eval(out.loss, model.parameters())
    assert elsewhere(lambda: float(out.loss)) == float(out.loss)
    wanted = np.array(model.layers[0].weight)
    np.testing.assert_array_equal(elsewhere(lambda: np.array(model.layers[0].weight)), wanted)


@pytest.fixture
def patient() -> Iterator[None]:
    """Let Python change threads only where one lets go of the lock by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("patient")
def test_other_threads_run_while_a_step_is_waited_for() -> None:
    size = 8192 if mx.default_device().type == mx.gpu else 1024

    class Heavy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.eye(size)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        for _ in range(8):
            x = x @ model.weight
        return x.mean()

    step, x = Step(Heavy(), optim.SGD(1e-3), loss_fn), mx.ones((size, size))
    step(x)
    step.synchronize()
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        before = ticks[0]
        for _ in range(4):
            step(x)
        step.synchronize()
        after = ticks[0]
    finally:
        stop.set()
        thread.join()
    assert after - before >= 10


@pytest.mark.parametrize("pool", [False, True])
def test_a_process_ends_well_whose_step_has_run_in_a_thread(pool: bool) -> None:
    program = """
        import sys, threading
        from concurrent.futures import ThreadPoolExecutor
        import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        from faststep import fast_step

        def train():
            model, optimizer = nn.Linear(4, 2), optim.Adam(1e-2)
            for _ in range(3):
                loss = fast_step(model, optimizer, lambda model, x: model(x).square().mean(), mx.ones((3, 4)))
            loss.item()

        if sys.argv[1] == "True":
            ThreadPoolExecutor(1).submit(train).result()
        else:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
    """
    for _ in range(4):  # of ten that did not wait nine aborted
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), str(pool)], check=False, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
