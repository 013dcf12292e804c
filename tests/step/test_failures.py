"""Failures from outside in the middle of training: Ctrl-C, a damaged file, a failure on the device."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import Row, assert_close, flat, snapshot
from support.models import cross_entropy
from support.places import Child

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")

# Train on one batch until ten Ctrl-C were met, each sent after a random time; then be where as many updates lead.
TRAIN = """
import faulthandler, os, random, signal, threading, time
import faststep
from support.helpers import Row, assert_close, snapshot

faulthandler.dump_traceback_later(280)
accumulate = {accumulate}
row = Row({model!r}, "adamw", 0.05, accumulate=accumulate)
pair = row.new()
step = faststep.Step(*pair, row.case.loss_fn, max_grad_norm=0.05, accumulate=accumulate)
batch = row.case.batches(1)[0]
rng, armed, caught = random.Random({seed}), False, 0

def on_signal(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

def interrupt():
    while caught < 10:
        time.sleep(rng.uniform(0.0005, 0.02))
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, on_signal)
for _ in range(accumulate):
    step(*batch)
thread = threading.Thread(target=interrupt)
thread.start()
while caught < 10:
    try:
        armed = True
        while True:
            step(*batch)
            if rng.random() < 0.2:
                step = faststep.Step(*pair, row.case.loss_fn, max_grad_norm=0.05, accumulate=accumulate)  # traced anew
    except KeyboardInterrupt:
        caught += 1
thread.join()
step.synchronize()
step.flush()
updates = pair[1].state["step"].item()
state = snapshot(*pair)

reference = row.new()
again = faststep.Step(*reference, row.case.loss_fn, max_grad_norm=0.05)
for _ in range(updates):
    again(*batch)
assert_close(state, snapshot(*reference), {tolerance})
"""


@pytest.mark.parametrize(("model", "accumulate"), [("mlp", 1), ("tied", 1), ("mlp", 3)])
def test_ctrl_c_at_any_moment_leaves_whole_updates(child: Child, model: str, accumulate: int) -> None:
    exact = accumulate == 1 and not (model == "tied" and mx.default_device() == mx.gpu)  # there scatters add atomically
    tolerance = 0 if exact else 1e-4  # a window is a sum by three
    child(TRAIN.format(model=model, accumulate=accumulate, seed=accumulate, tolerance=tolerance))


def cut_off(x: mx.array, folder: Path) -> mx.array:
    """Return the array as `mx.load` gives it, from a file that has lost its end since."""
    file = folder / "batch.safetensors"
    mx.save_safetensors(str(file), {"x": x})
    loaded = mx.load(str(file))
    assert isinstance(loaded, dict)
    os.truncate(file, 20_000)
    return loaded["x"]


@pytest.mark.parametrize("way", ["step", "gradients", "uncompiled", "derived"])
def test_a_batch_whose_file_is_damaged_changes_nothing(tmp_path: Path, way: str) -> None:
    row = Row("mlp", "adamw")
    pair = row.new()
    step = Step(*pair, row.case.loss_fn, compile=way != "uncompiled")
    x, y = row.case.batches(1)[0]
    x, y = mx.tile(x, (4000, 1)), mx.tile(y, (4000,))
    for _ in range(2):
        step(x, y)
    before = snapshot(*pair)
    damaged = cut_off(x, tmp_path)
    if way == "derived":
        damaged = damaged / 2 + 1
    with pytest.raises(RuntimeError, match=r"argument x: \[read\] Unable to read from file"):
        (step.gradients if way == "gradients" else step)(damaged, y)
    assert_close(snapshot(*pair), before, 0)
    step(x, y)
    assert pair[1].state["step"].item() == 3


# Arrays that MLX reads out of a file by Python, as it computes them. Who waits for them with the GIL waits for ever.
NPZ = """
    import faulthandler, os, sys
    faulthandler.dump_traceback_later(60, exit=True)
    import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    from faststep import Step
    from mlx.utils import tree_flatten, tree_unflatten

    def read(tree):
        flat = dict(tree_flatten(tree))
        mx.savez("file.npz", **flat)
        return tree_unflatten(list(mx.load("file.npz").items()))

    def loss_fn(model, x):
        y = model(x)
        if {changes}:
            norm.count = mx.ones(len(seen) % 3 + 1) * y.sum()
        seen.append(0)
        return (y - mx.stop_gradient(target(x))).square().mean()

    losses = []
    for reads in (False, True):
        seen = []
        mx.random.seed(1)
        model, target, norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.Module()
        model.norm, norm.count = norm, mx.zeros(1)
        norm.freeze()
        optimizer = optim.Adam(1e-2)
        x = mx.random.normal((8, 4))
        mx.eval(model.state, target.state, x)
        step = Step(model, optimizer, loss_fn, compile={compile}, ema_decay=0.9)
        here = lambda tree: read(tree) if reads else tree
        losses.append([])
        for place in ("", "parameters", "target", "batch", "optimizer", "average", "all"):
            if place in ("parameters", "all"):
                model.update(here(model.trainable_parameters()))
            if place in ("target", "all"):
                target.update(here(target.parameters()))
            if place in ("batch", "all"):
                x = here({{"x": x}})["x"]
            if place in ("optimizer", "all"):
                optimizer.state = here(optimizer.state)
            if place in ("average", "all"):
                state = step.state
                step.load_state({{**state, "ema": here(state["ema"])}})
            losses[-1].append(step(x).loss.item())
            mx.eval(step.gradients(x))
    assert losses[0] == losses[1], losses
    assert losses[0][-1] < losses[0][0]
    os._exit(0)  # threads with which MLX reads files may abort a process that ends otherwise, bare MLX's too
"""


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("changes", [False, True], ids=["", "a buffer of other shapes"])
def test_arrays_that_python_reads_out_of_a_file_are_waited_for_without_the_gil(
    changes: bool, compile: bool, child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    child(NPZ.format(changes=changes, compile=compile))


def doubtful(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Compute a loss that fails on the device, in the thread that computes, where x is zero."""
    inverse = mx.linalg.inv(x.mean() * mx.eye(4), stream=mx.cpu)
    return cross_entropy(model, x, y) + 1e-9 * mx.stop_gradient(inverse).sum()


def fail_once(in_flight: int) -> None:
    """Take a step that fails on the device, and go on with the weights of before."""
    row = Row("mlp", "adamw")
    pair = row.new()
    step = Step(*pair, doubtful, in_flight=in_flight)
    x, y = row.case.batches(1)[0]
    x = mx.abs(x)
    for _ in range(3):
        step(x, y)
    names = snapshot(*pair).keys()
    weights = [(name, mx.array(value)) for name, value in flat(pair[0].parameters()).items()]

    def go_on() -> None:
        for batch in (0 * x, x, x, x):
            step(batch, y)
        step.synchronize()

    with pytest.raises(RuntimeError, match=r"(?s)a step failed on the device.*Inverse.*load them from a checkpoint"):
        go_on()
    assert snapshot(*pair).keys() == names  # whoever reads what is left does not hang
    pair[0].load_weights(weights)
    assert np.isfinite(float(step(x, y).loss))
    assert all(np.isfinite(value).all() for value in snapshot(*pair).values())


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU's step is not where MLX inverts matrices")
@pytest.mark.parametrize(("in_flight", "times"), [(0, 1), (2, 30)])
def test_a_failure_on_the_device_is_raised_once_and_says_what_is_lost(in_flight: int, times: int) -> None:
    for _ in range(times):  # it may show in any value that is read meanwhile
        fail_once(in_flight)


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU's step is not where MLX inverts matrices")
def test_a_failure_is_raised_by_the_large_step_that_waits_for_it() -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        large = mx.broadcast_to(x[:1, :1], (90 << 10, 1 << 10)) + mx.arange(1 << 10)  # 360 MB, gone before the failure
        slow = mx.eye(700) + 0 * mx.stop_gradient(large).max()
        for _ in range(60):
            slow = slow @ mx.eye(700)
        inverse = mx.linalg.inv(x.mean() * mx.eye(4) + 0 * slow[0, 0], stream=mx.cpu)
        return model(x + 1e-9 * mx.stop_gradient(inverse).sum()).square().mean()

    step, x = Step(nn.Linear(16, 16), optim.SGD(1e-3), loss_fn, nonfinite="allow"), mx.ones((32, 16))
    for _ in range(4):
        step(x)

    def go_on() -> None:
        step(0 * x)
        time.sleep(0.25)  # the failure is to come while nothing large is left of that step
        for _ in range(3):
            step(x)
        step.synchronize()

    with pytest.raises(RuntimeError, match=r"(?s)a step failed on the device.*Inverse"):
        go_on()


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="a GPU's stream is not that of the failure")
@pytest.mark.parametrize(("accumulate", "steps"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 70)])
def test_a_failure_beside_the_step_is_raised_by_it(accumulate: int, steps: int) -> None:
    mx.random.seed(0)
    pair = nn.Linear(512, 512), optim.SGD(1e-3)
    step, x = Step(*pair, lambda model, x: model(x).square().mean(), accumulate=accumulate), mx.ones((8, 512))
    for _ in range(steps):
        step(x)
    step.synchronize()
    before = snapshot(*pair)

    slow = mx.eye(700)
    for _ in range(40):
        slow = slow @ mx.eye(700)
    inverse = mx.linalg.inv(0 * slow[:4, :4])
    mx.async_eval(inverse)
    with pytest.raises((RuntimeError, ValueError), match="Inverse") as raised:
        mx.eval(step(x + inverse.sum()).loss)
    if "beside the step" in str(raised.value):
        assert_close(snapshot(*pair), before, 0)
    losses = [step(x).loss.item() for _ in range(3)]
    assert np.isfinite(losses).all()


# MLX counts each tenth task before it hands it over, which throws the error of one before: about every tenth of these
# failures leaves it counting one that nobody will ever do. It waits for that one at its memory limit.
COUNTED = """
import faulthandler
import faststep, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
from mlx.utils import tree_flatten

def loss(model, x):
    inverse = mx.linalg.inv(x.mean() * mx.eye(4), stream=mx.cpu)
    return mx.square(model(x + 1e-9 * mx.stop_gradient(inverse).sum())).mean()

model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(24)))
x = mx.random.normal((32, 16))
step = faststep.Step(model, optim.SGD(1e-6), loss)
step(x)
step.synchronize()
weights = [(name, mx.array(value)) for name, value in tree_flatten(model.parameters())]
mx.eval([value for _, value in weights])
for _ in range(25):
    try:
        step(0 * x)
        step.synchronize()
        raise SystemExit("no failure")
    except RuntimeError:
        model.load_weights(weights)
faulthandler.dump_traceback_later(100, exit=True)
mx.set_memory_limit(1)
print(float(step(x).loss))
"""


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU's step is not where MLX inverts matrices")
def test_failures_leave_no_task_to_wait_for_at_the_memory_limit(child: Child) -> None:
    assert np.isfinite(float(child(COUNTED).stdout))


def most_of_memory(room: int) -> mx.array:
    """Hold so much of the device's memory that no quarter of it is left, beside what other processes hold."""
    for quarters in (3, 2, 1):
        held = mx.zeros((room * quarters // 4, 1 << 20))
        try:
            mx.eval(held)
        except RuntimeError:
            continue
        return held
    raise AssertionError("other processes hold nearly all of the device's memory")


@pytest.mark.skipif(not mx.cuda.is_available(), reason="a CPU's allocation that is refused ends the process")
def test_a_step_without_memory_is_completed_when_there_is_some() -> None:
    room = int(mx.device_info()["total_memory"]) // (4 << 20)  # rows of a million float32

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
        large = mx.stop_gradient(x[0, 0]) + mx.zeros((room // 4, 1 << 20))
        return cross_entropy(model, x, y) + 0 * mx.cumsum(large, axis=1)[0, 0]

    row = Row("mlp", "adamw")
    ends = []
    for fails in (False, True):
        pair = row.new()
        step = Step(*pair, loss_fn, in_flight=0)
        for i, batch in enumerate(row.case.batches(4)):
            if fails and i == 2:
                held = most_of_memory(room)
                with pytest.raises(RuntimeError, match=r"(?s)no memory.*(malloc|out of memory).*next call"):
                    step(*batch)
                del held
                mx.clear_cache()
            else:
                step(*batch)
        step.synchronize()
        ends.append(snapshot(*pair))
    assert_close(ends[1], ends[0], row.case.tolerance)


# Trace again and again a loss that reaches arrays, and be interrupted at any moment of it: in the loss, in Python code
# of the package before and behind it, and while MLX differentiates, which a Ctrl-C has to wait for.
TRACE = """
import random, signal, sys
import faststep
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim

mx.random.seed(0)
reached, late = [mx.array(2.0), mx.array(3.0)], False
model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(60))), mx.ones((2, 4))
mx.eval(model.parameters())
optimizer = optim.SGD(0.0)

def loss(model, x):
    y = (model(x) * reached[0]).square().mean() + reached[1]
    if late:  # pending when MLX is done with the gradients
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
    return y

def on_alarm(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

wanted = float(loss(model, x))
rng, caught, lost = random.Random(7), 0, []
sys.unraisablehook = lambda ignored: lost.append(repr(ignored.object)[:80])
signal.signal(signal.SIGALRM, on_alarm)
for trial in range(300):
    late = trial % 2 == 0
    step = faststep.Step(model, optimizer, loss)
    try:
        armed = True
        if not late:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.02))
        step(x)
        armed = False
    except KeyboardInterrupt:
        caught += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    late = False
    assert sys.gettrace() is None and sys.getprofile() is None, trial
    assert float(loss(model, x)) == wanted, trial
    assert not lost, lost
assert caught > 50, caught
"""


def test_ctrl_c_at_any_moment_of_a_trace_leaves_what_the_loss_reaches(child: Child) -> None:
    child(TRACE)


# Be interrupted at any moment of the first calls of a loss that appends to a list, behind whose update it is looked at
# anew what the loss reaches: the model and the optimizer are those before a call or behind it.
APPENDS = """
import random, signal
import faststep
import numpy as np
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
from mlx.utils import tree_flatten

def begin():
    mx.random.seed(0)
    model, log = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm(8), nn.Linear(8, 1)), [0.0]
    optimizer = optim.SGD(0.02, momentum=0.9)
    optimizer.init(model.trainable_parameters())
    def loss(model, x):
        log.append(1.0)
        return (model(x) - 1).square().mean()
    return model, optimizer, loss

def state(model, optimizer):
    mx.eval(model.state, optimizer.state)
    return [np.array(each) for _, each in tree_flatten([model.parameters(), optimizer.state])]

def equal(one, other):
    return all(np.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(one, other, strict=True))

batches = [mx.random.normal((4, 4), key=mx.random.key(number)) for number in range(4)]
model, optimizer, loss = begin()
gradients, wanted = nn.value_and_grad(model, loss), [state(model, optimizer)]
for x in batches:
    optimizer.update(model, gradients(model, x)[1])
    wanted.append(state(model, optimizer))

def on_alarm(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, on_alarm)
rng, caught = random.Random(7), 0
for trial in range(150):
    model, optimizer, loss = begin()
    step, done = faststep.Step(model, optimizer, loss), 0
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.06))
        for x in batches:
            step(x)
            done += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        caught += 1
        now = state(model, optimizer)
        assert any(equal(now, each) for each in wanted[done : done + 2]), (trial, done)
        number = next(number for number in (done, done + 1) if number < 5 and equal(now, wanted[number]))
        for at in range(number, 4):
            step(batches[at])
        assert equal(state(model, optimizer), wanted[4]), (trial, done)
assert caught > 20, caught
"""


def test_ctrl_c_behind_an_update_leaves_no_half_of_a_step(child: Child) -> None:
    child(APPENDS)
