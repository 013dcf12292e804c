"""A machine without a C++ compiler, or without a place for what it makes: the same numbers, native and captured."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from support.places import Child

pytestmark = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and platform.machine() == "x86_64") or mx.default_device().type != mx.cpu,
    reason="MLX compiles kernels with g++ on a CPU; elsewhere they stay as they are",
)


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without a compiler, on which nothing has been compiled."""
    (tmp_path / "empty").mkdir()
    places = dict.fromkeys(("PATH", "TMPDIR", "XDG_CACHE_HOME"), os.fspath(tmp_path / "empty"))
    return {"FASTSTEP_KERNELS": "1", **places}


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a compiler, and no directory for libraries."""
    (tmp_path / "file").touch()
    places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), os.fspath(tmp_path / "file"))
    return {"FASTSTEP_KERNELS": "1", **places}


# Dropout, half precision, windows, clipping, quantized weights, checkpoints, an optimizer of the user's own.
ROWS = """
    Row("mlp", "adamw"),
    Row("mlp", "adamw", 0.1, accumulate=2),
    Row("conv", "adamw", 0.1),
    Row("gpt", "adamw", 0.1),
    Row("tied", "lion", max_grad_value=0.01),
    Row("bf16", "adamw"),
    Row("mixed", "sgd-momentum", 0.1),
    Row("lora", "adamw"),
    Row("decorated", "adamw"),
    Row("lstm", "adamw", 0.1),
    Row("graph", "adafactor"),
    Row("vae", "adam-bias-correction"),
"""
# Steps beside plain MLX.
STEPS = """
import warnings
import mlx.core as mx
from faststep import Step, _core
from support.helpers import Row, assert_close, plain_step, run, taking
from support.replays import is_captured, replayed

warnings.simplefilter("error")
for row in [{rows}]:
    reference, ours = row.new(), row.new()
    wanted = run(row, reference, plain_step(*reference, row.case.loss_fn, **row.options), 8)
    step = Step(*ours, row.case.loss_fn, **row.options, replay=True)
    assert_close(run(row, ours, taking(step), 8), wanted, max(2e-5, row.case.tolerance))
    wanted_mode = "called" if row.model == "decorated" else "native"
    assert step.stats.mode == wanted_mode, (row, step.stats.mode, step.stats.reason)
    assert is_captured(step), (row, replayed(step))
    assert "there is no compiler" in replayed(step)[0]
assert _core.compiled_kernels() == 0
"""


def test_steps_are_native_and_captured(child: Child, bare: dict[str, str]) -> None:
    child(STEPS.format(rows=ROWS), **bare)


def test_each_operation_has_its_bits(child: Child, bare: dict[str, str]) -> None:
    done = child("from support.block_cases import compare\ncompare()", **bare)
    assert done.stdout == ""


# What blocks have no loop for is computed operation by operation, in a captured step too.
USERS = """
import faststep
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim

a, b = mx.arange(2000).reshape(40, 50) / 2000, mx.arange(50) / 70 + 0.1
functions = {
    "loops": lambda a, b: (mx.exp(a) * b + a, a - b),
    "inverse": lambda a, b: mx.arcsin(a) * mx.arctanh(a) + mx.remainder(a, b) + mx.arccosh(1 + b),
    "complex": lambda a, b: mx.abs(a.astype(mx.complex64) * b + 1j),
    "short": lambda a, b: ((a * 100).astype(mx.int16) * 3 + (b * 10).astype(mx.int16)) * 2,
    "bits": lambda a, b: mx.bitwise_invert((a * 99).astype(mx.uint32) << 2) & (b * 50).astype(mx.uint32),
    "several": lambda a, b: [c := mx.abs(a.astype(mx.complex64) * b), c * 2 + a, (c - b) * c],
}
for name, f in functions.items():
    for layout, x in {"rows": a, "columns": mx.contiguous(a.T).T, "one": a[:1], "backwards": a[:, ::-1]}.items():
        for shapeless in (False, True):
            mx.disable_compile()
            wanted = f(x, b)
            mx.enable_compile()
            got = mx.compile(f, shapeless=shapeless)(x, b)
            one, other = (each if isinstance(each, list | tuple) else [each] for each in (wanted, got))
            same = [mx.array_equal(*pair).item() for pair in zip(one, other, strict=True)]
            assert all(same), (name, layout, shapeless, same)

def new():
    mx.random.seed(0)
    return nn.Linear(50, 40), optim.SGD(0.1)

def loss_fn(model, x):
    return mx.abs(model(x).astype(mx.complex64) * 2 + 1j).mean()

(reference, plain), pair = new(), new()
step = faststep.Step(*pair, loss_fn, replay=True)
for _ in range(8):
    loss, gradients = nn.value_and_grad(reference, loss_fn)(reference, a)
    plain.update(reference, gradients)
    mx.eval(loss, reference)
    assert mx.allclose(step(a).loss, loss, 1e-5).item()
assert mx.allclose(pair[0].weight, reference.weight, 1e-5, 1e-6).item()
assert step.stats.mode == "native", step.stats.reason
assert step.stats.traces[0].replay.startswith("captured"), step.stats.traces[0].replay
"""


def test_kernels_of_the_user_s_own_have_the_numbers_of_their_operations(child: Child, bare: dict[str, str]) -> None:
    child(USERS, **bare)


LATE = """
import warnings
import mlx.core as mx
assert mx.compile(lambda x: mx.exp(x) * 2)(mx.array(0.0)).item() == 2
from faststep import Step
from support.helpers import Row, taking, run
row = Row("mlp", "adamw")
step = Step(*row.new(), row.case.loss_fn)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step(*row.case.batches(1)[0])
assert "import faststep first" in str(caught[0].message), caught
assert step.stats.mode == "plain"
"""


def test_who_compiles_before_the_import_is_told(child: Child, bare: dict[str, str]) -> None:
    child(LATE, **bare)


def test_no_directory_for_libraries_is_as_no_compiler(child: Child, nowhere: dict[str, str]) -> None:
    child(STEPS.format(rows='Row("conv", "adamw", 0.1)'), **nowhere)


def test_the_doctor_says_that_none_is_needed(child: Child, bare: dict[str, str]) -> None:
    done = child("from faststep.doctor._environment import environment\nenvironment()", **bare)
    assert "there is no g++, and none is needed" in done.stdout, done.stdout
    assert "failure " not in done.stdout.replace("no failures", ""), done.stdout
