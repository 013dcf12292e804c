"""MLX's CPU kernels, compiled for this processor: the same bits, a cache of their own, and only when it is wanted."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.helpers import HOST_SCHEDULES, NATIVE, Row, assert_close, compiled_step, plain_step, run
from support.places import TESTS, Child

pytestmark = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and platform.machine() == "x86_64")
    or mx.default_device().type != mx.cpu
    or shutil.which("g++") is None,
    reason="MLX compiles these kernels with g++ on a CPU; elsewhere they stay as they are",
)
OURS = "-march=native"
REAL = shutil.which("g++")

# One kernel, and what it has to give.
USE = """
import faststep
import mlx.core as mx
a, b = mx.arange(1000) / 1000, mx.arange(1000) / 3000
f = lambda a, b: mx.exp(a) * b + a
assert mx.array_equal(mx.compile(f)(a, b), f(a, b)).item()
"""


class Places:
    """Directories of one test's processes, and the compiler that they find."""

    def __init__(self, root: Path) -> None:
        self.cache, self.temp, self.bin, self.log = (root / name for name in ("cache", "temp", "bin", "log"))
        for directory in (self.cache, self.temp, self.bin):
            directory.mkdir()
        self.compiler()

    def compiler(self, first: str = "") -> None:
        """Put a g++ on the path that notes its arguments and takes these steps before it compiles."""
        script = self.bin / "g++"
        script.write_text(f'#!/bin/sh\necho "$@" >> {self.log}\n{first}\nexec {REAL} "$@"\n')
        script.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "FASTSTEP_KERNELS": "1",
            "XDG_CACHE_HOME": os.fspath(self.cache),
            "TMPDIR": os.fspath(self.temp),
            "PATH": os.pathsep.join([os.fspath(self.bin), os.environ["PATH"]]),
        }

    @property
    def kept(self) -> list[Path]:
        """The libraries below the cache."""
        return sorted(self.cache.rglob("*.so"))

    @property
    def compiled(self) -> list[str]:
        """The commands that compiled a kernel."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if "-shared" in line]


def files(directory: Path) -> list[Path]:
    """All that lies below a directory."""
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def run_in(places: Places, code: str) -> None:
    """Run code in a process of its own, for fixtures of a module."""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **places.environment}, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def one_kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one kernel."""
    places = Places(tmp_path_factory.mktemp("one"))
    run_in(places, USE)
    return places.cache


@pytest.fixture
def used(places: Places, one_kernel: Path) -> Places:
    """Places in which one process has used one kernel."""
    shutil.copytree(one_kernel, places.cache, dirs_exist_ok=True)
    return places


def test_kernels_are_compiled_for_this_processor_and_kept_apart_from_mlx(child: Child, places: Places) -> None:
    child(USE, **places.environment)
    (command,) = places.compiled
    assert OURS in command
    (library,) = places.kept
    place, store, *rest = library.relative_to(places.cache).parts
    assert place == "mlx-faststep"
    assert re.fullmatch("kernels-[0-9a-f]{16}", store)
    assert rest[:-1] == ["mlx", mx.__version__, "cpu"]
    for directory in [places.cache / place, *(each for each in (places.cache / place).rglob("*") if each.is_dir())]:
        assert directory.stat().st_mode & 0o777 == 0o700
    assert files(places.temp) == []


def test_the_next_process_compiles_nothing(child: Child, places: Places) -> None:
    child(USE, **places.environment)
    places.log.unlink()
    child(USE, **places.environment)
    assert places.compiled == []


# Seven kernels, the later ones with MLX's header precompiled.
MANY = """
import faststep
import mlx.core as mx
a = mx.arange(1000) / 1000
for i in range(7):
    f = lambda a: mx.exp(a) * a ** i + sum([mx.sin(a)] * i, a)
    assert mx.array_equal(mx.compile(f)(a), f(a)).item(), i
"""


@pytest.fixture(scope="module")
def many_kernels(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Places in which one process has used them."""
    places = Places(tmp_path_factory.mktemp("many"))
    run_in(places, MANY)
    return places


@pytest.fixture
def header_alone(places: Places, many_kernels: Places) -> Path:
    """The header that it has left behind, in a cache without libraries."""
    shutil.copytree(many_kernels.cache, places.cache, dirs_exist_ok=True)
    for library in places.kept:
        library.unlink()
    (header,) = places.cache.rglob("*.gch")
    return header


def test_the_header_of_many_kernels_is_precompiled(many_kernels: Places) -> None:
    (header,) = many_kernels.cache.rglob("*.gch")
    assert header.parts[-6:-4] == (mx.__version__, "precompiled")
    assert [path for path in header.parent.iterdir() if path != header] == []
    flag = f"-I {header.parents[3]}"
    with_header = [flag in command for command in many_kernels.compiled]
    assert not any(with_header[:5])
    assert all(with_header[5:])


def test_a_process_that_finds_the_header_uses_it_for_its_first_kernel(
    child: Child, places: Places, header_alone: Path
) -> None:
    child(MANY, **places.environment)
    assert all(f"-I {header_alone.parents[3]}" in command for command in places.compiled)
    assert len(places.compiled) == len(places.kept) == 7


@pytest.mark.parametrize("damage", [0, 5_000_000])
def test_a_damaged_header_is_replaced(child: Child, places: Places, header_alone: Path, damage: int) -> None:
    os.truncate(header_alone, damage)
    child(MANY, **places.environment)
    assert len(places.kept) == 7
    assert [path.stat().st_size > 5_000_000 for path in places.cache.rglob("*.gch")] == [True]


def test_another_compiler_has_kernels_of_its_own(child: Child, used: Places) -> None:
    child(USE, **used.environment, CPATH=os.fspath(used.temp))  # other headers may come of it
    assert len(used.compiled) == 1
    assert len({path.parents[3] for path in used.kept}) == 2


def test_faststep_kernels_0_leaves_mlx_as_it_is(child: Child, places: Places) -> None:
    child(USE, **{**places.environment, "FASTSTEP_KERNELS": "0"})
    assert files(places.cache) == []
    assert len(list((places.temp / "mlx" / mx.__version__ / "cpu").glob("lib*.so"))) == 1
    (command,) = places.compiled
    assert OURS not in command


def test_mlx_alone_keeps_its_own(child: Child, used: Places) -> None:
    child(USE.replace("import faststep", ""), **used.environment)
    assert [OURS in command for command in used.compiled] == [False]


# Muon aside, of which MLX fuses operations that differ by themselves
@pytest.mark.parametrize(
    "optimizer", [name for name in NATIVE if name not in (*HOST_SCHEDULES, "muon", "muon-momentum", "multi")]
)
def test_compiled_steps_have_the_bits_of_the_plain_loop(optimizer: str) -> None:
    row = Row("mlp", optimizer)
    eager, compiled = row.new(), row.new()
    wanted = run(row, eager, plain_step(*eager, row.case.loss_fn), 5)
    assert_close(run(row, compiled, compiled_step(*compiled, row.case.loss_fn), 5), wanted, 0)


# Numbers of every size, and those at which functions branch.
VALUES = """
import faststep
import mlx.core as mx, numpy as np
rng = np.random.default_rng(0)
sizes = [1e-40, 1e-3, 1, 1, 10, 100, 1e10, 1e38]
x = np.concatenate([rng.standard_normal(1000) * size for size in sizes])
x[::1000] = [0, -0.0, 88.8, -88.8, 1e-45, np.nan, np.inf, -np.inf]
x = x.astype(np.float32)
x, y = mx.array(x), mx.array(rng.permutation(x))
"""

FUNCTIONS = """
names = "exp sigmoid tanh erf sin cos sqrt rsqrt log log1p expm1 square abs sign floor".split()
def f(x, y):
    each = [getattr(mx, name)(-x) * y for name in names]
    return each + [mx.maximum(x, y) / y - x, mx.power(mx.abs(x), y) + x, mx.where(x > y, x * y + x, x - y)]
for dtype in (mx.float32, mx.bfloat16, mx.float16):
    a, b = x.astype(dtype), y.astype(dtype)
    for name, got, wanted in zip([*names, "divide", "power", "where"], mx.compile(f)(a, b), f(a, b)):
        assert mx.array_equal(got, wanted, equal_nan=True).item(), (name, dtype)
for dtype in (mx.int32, mx.uint32, mx.int64, mx.uint64):  # numbers out of range and all
    f = lambda x: (-x).astype(dtype) + 1
    assert mx.array_equal(mx.compile(f)(x), f(x)).item(), dtype
"""

# The first input of each call is nobody else's, so that its memory becomes the output's.
STRIDES = """
x, y = x.reshape(40, 25, 8), y.reshape(40, 25, 8)
def f(x, y):
    return x * mx.sigmoid(x + y) - y
g = mx.compile(f)
for other in (y[0], y[0, 0], y[:, :, :1], y[:, :1], y[::-1], y[:, ::-1, ::2], y.swapaxes(0, 1), y[0, 0, 0]):
    if other.shape == (25, 40, 8):
        new = lambda: -x.swapaxes(0, 1)
    else:
        new = lambda: -x[..., :4] if other.shape[-1:] == (4,) else -x
    assert mx.array_equal(g(new(), other), f(new(), other), equal_nan=True).item(), other.shape
"""


@pytest.mark.parametrize("code", [FUNCTIONS, STRIDES], ids=["functions", "strides"])
def test_kernels_have_the_bits_of_the_uncompiled_operations(child: Child, code: str) -> None:
    child(VALUES + code, FASTSTEP_KERNELS="1")


STEPS = """
import sys
import faststep
import mlx.core as mx, numpy as np
from support.helpers import Row, run, taking
for name in ("mlp-adamw", "mlp-adamax", "mlp-muon", "gpt-adafactor", "bf16-sgd-momentum", "lstm-lion", "vae-adam"):
    row = Row(*name.split("-", 1), max_grad_norm=0.05)
    pair = row.new()
    state = run(row, pair, taking(faststep.Step(*pair, row.case.loss_fn, max_grad_norm=0.05)), 3)
    np.savez(f"{sys.argv[1]}.{name}.npz", **state)
"""


@pytest.mark.slow
def test_steps_have_the_bits_of_mlx_s_own_kernels(child: Child, tmp_path: Path) -> None:
    for setting in "01":
        child(f"import sys; sys.argv = ['', {str(tmp_path / setting)!r}]\n{STEPS}", FASTSTEP_KERNELS=setting)
    files = sorted(tmp_path.glob("0.*.npz"))
    assert len(files) == 7
    for file in files:
        with np.load(file) as wanted, np.load(file.with_name("1" + file.name[1:])) as got:
            for name in wanted:
                np.testing.assert_array_equal(got[name], wanted[name])


def test_processes_that_start_at_once_share_the_cache(places: Places) -> None:
    go = places.temp / "go"
    code = f"import os, time\nwhile not os.path.exists({os.fspath(go)!r}): time.sleep(0.001)\n{USE}"
    environment = {**os.environ, **places.environment, "PYTHONPATH": os.fspath(TESTS)}
    start = [sys.executable, "-c", code]
    children = [
        subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(4)
    ]
    go.touch()
    for each in children:
        output, _ = each.communicate(timeout=300)
        assert each.returncode == 0, output
    assert sorted(path.suffix for path in files(places.cache)) == [".cpp", ".so"]
    assert files(places.temp) == [go]


def test_a_cache_that_cannot_be_made_is_replaced_by_one_below_the_temporary_directory(
    child: Child, places: Places
) -> None:
    places.cache.rmdir()
    places.cache.write_text("a file, where a directory is expected")
    child(USE, **places.environment)
    child(USE, **places.environment)
    assert len(places.compiled) == 1
    (directory,) = places.temp.iterdir()
    assert directory.name == f"mlx-faststep-{os.geteuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert len(list(directory.rglob("*.so"))) == 1


@pytest.mark.parametrize("options", ["ro", "noexec"])
def test_a_cache_that_no_library_can_be_loaded_from_is_replaced_too(places: Places, options: str) -> None:
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]  # a view of the file system of its own
    (places.cache / "mlx-faststep").mkdir(mode=0o700)
    mount = f"mount --bind {places.cache} {places.cache}; mount -o remount,bind,{options} {places.cache}"
    if shutil.which("unshare") is None or subprocess.run([*inside, mount], capture_output=True).returncode:
        pytest.skip("this user may not mount anything, not even for itself")
    script = places.temp.with_name("use.py")
    script.write_text(USE)
    environment = {**os.environ, **places.environment}
    subprocess.run([*inside, f"{mount}; exec {sys.executable} {script}"], env=environment, check=True, timeout=300)
    assert places.kept == []
    assert len(list(places.temp.glob("mlx-faststep-*/**/*.so"))) == 1


def spoil(path: Path, how: str) -> None:
    """Make something of the cache somebody else's, or writable by others."""
    if how == "writable by others":
        path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        pytest.skip("only root can give something away")


@pytest.mark.parametrize("how", ["somebody else's", "writable by others"])
@pytest.mark.parametrize("what", ["place", "store", "mlx", "version", "cpu"])
def test_what_others_may_have_written_is_not_loaded(child: Child, used: Places, how: str, what: str) -> None:
    (library,) = used.kept
    library.write_bytes(b"no library: an error if it were loaded")
    spoil(library.parents[["cpu", "version", "mlx", "store", "place"].index(what)], how)
    child(USE, **used.environment)
    assert len(used.compiled) == 1


def test_where_nothing_can_be_kept_a_process_has_a_directory_of_its_own(child: Child, places: Places) -> None:
    for directory in (places.cache / "mlx-faststep", places.temp / f"mlx-faststep-{os.geteuid()}"):
        directory.mkdir()
        spoil(directory, "writable by others")
    theirs = places.temp / "mlx" / mx.__version__ / "cpu"  # where MLX alone would look, and anybody could write
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    for _ in range(2):
        child(USE, **places.environment)
        assert files(places.temp) == files(places.cache) == []
    assert [OURS in command for command in places.compiled] == [True, True]
    assert not any("/temp/mlx/" in command for command in places.compiled)
    assert sorted(each.name for each in places.temp.iterdir()) == ["mlx", f"mlx-faststep-{os.geteuid()}"]


def test_a_compiler_that_refuses_the_flags_is_used_without(child: Child, places: Places) -> None:
    places.compiler(f'case "$*" in *{OURS}*) echo unknown option; exit 1;; esac')
    for _ in range(2):
        child(USE, **places.environment)
    (command,) = places.compiled
    assert OURS not in command
    assert len(places.kept) == 1
    assert files(places.temp) == []


# Files as a power cut, a full disk or a bad block leaves them.
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda library: b"",
    "cut off": lambda library: library[: len(library) // 2],
    "cut off by a byte": lambda library: library[:-1],
    "zeros": lambda library: bytes(len(library)),
    "zeros in the middle": lambda library: library[:4096] + bytes(4096) + library[8192:],
    "garbage": lambda library: b"no library" * 1000,
    "without a seal": lambda library: library[:-32],
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_library_is_compiled_again(child: Child, used: Places, how: str) -> None:
    (library,) = used.kept
    sound = library.read_bytes()
    library.write_bytes(BROKEN[how](sound))
    child(USE, **used.environment)
    assert used.kept == [library]
    assert len(library.read_bytes()) == len(sound)
    assert len(used.compiled) == 1
    child(USE, **used.environment)
    assert len(used.compiled) == 1


def test_what_a_killed_compiler_left_behind_is_deleted(child: Child, used: Places) -> None:
    (library,) = used.kept
    old, young = (library.with_name(f"tmp_{number}.so") for number in ("0a1b2c3d", "4e5f6a7b"))
    for each in (old, young):
        each.write_bytes(b"half a library")
    hours = 2 * 3600
    os.utime(old, (old.stat().st_atime - hours, old.stat().st_mtime - hours))
    child(USE, **used.environment)
    assert used.kept == sorted([library, young])


def test_a_compiler_that_fails_with_the_flags_gets_mlx_s_own_command(child: Child, places: Places) -> None:
    places.compiler(f'case "$*" in *-shared*{OURS}*) echo no such instruction; exit 1;; esac')
    child(USE, **places.environment)
    assert [OURS in command for command in places.compiled] == [True, False]
    assert len(places.kept) == 1


def test_a_compiler_that_fails_is_mlx_s_own_error(child: Child, places: Places) -> None:
    places.compiler('case "$*" in *-shared*) echo the disk is full; exit 1;; esac')
    done = child(USE, check=False, **places.environment)
    assert "[Compile::eval_cpu] Failed to compile function" in done.stderr
    assert "the disk is full" in done.stderr


def test_a_library_deleted_from_the_cache_is_compiled_again(child: Child, used: Places) -> None:
    used.kept[0].unlink()
    child(USE, **used.environment)
    assert len(used.compiled) == 1
    assert len(used.kept) == 1


LENGTHS = """
import sys
import faststep, mlx.core as mx
from support.helpers import Row
row = Row({model!r}, "adamw")
pair = row.new()
def loss_fn(model, x, y):
    loss = row.case.loss_fn(model, x, y)
    return (loss, mx.array(float(y.size))) if {weighted} else loss
step = faststep.Step(*pair, loss_fn, max_grad_norm=1.0, accumulate={accumulate}, weighted={weighted})
x, y = row.case.batches(1)[0]
for n in range(2, 2 + {sizes}):
    for _ in range(2):
        step(x[:n], y[:n])
step.synchronize()
"""


@pytest.mark.parametrize(("model", "accumulate", "weighted"), [("mlp", 1, False), ("tied", 2, True)])
def test_a_batch_of_another_size_needs_no_new_kernel(
    child: Child, places: Places, model: str, accumulate: int, weighted: bool
) -> None:
    counts = []
    for sizes in (2, 5):
        child(LENGTHS.format(model=model, accumulate=accumulate, weighted=weighted, sizes=sizes), **places.environment)
        counts.append(len(places.kept))
    assert counts[0] == counts[1]


# --- what is computed before it is compiled


def test_a_kernel_that_is_not_compiled_has_the_bits_of_its_operations(child: Child, places: Places) -> None:
    done = child("from support.block_cases import compare\ncompare()", **places.environment)
    assert done.stdout == ""
    assert places.compiled == []


# A step that is taken until a file appears below the cache, or a line in the compiler's log, and some times more.
AGAIN = """
import time
import faststep
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
from pathlib import Path
def new():
    mx.random.seed(3)
    return nn.Linear(4, 3), optim.SGD(0.1)
loss_fn = lambda model, x: mx.sigmoid(model(x) * 3).mean()
step, (model, optimizer) = faststep.Step(*new(), loss_fn), new()
x = mx.ones((2, 4))
losses = [step(x).loss.item() for _ in range(15)]
while not ({until}):
    losses.append(step(x).loss.item())
    time.sleep(0.01)
losses += [step(x).loss.item() for _ in range({more})]
for number, loss in enumerate(losses):
    wanted, gradients = nn.value_and_grad(model, loss_fn)(model, x)
    optimizer.update(model, gradients)
    mx.eval(wanted, model.state)
    assert abs(loss - wanted.item()) <= 1e-5 * wanted.item(), (number, loss, wanted)
"""


def test_a_kernel_that_is_needed_again_and_again_is_compiled_meanwhile(child: Child, places: Places) -> None:
    child(AGAIN.format(until=True, more=0), **places.environment)
    assert places.compiled == []
    kept = f"[*Path({os.fspath(places.cache)!r}).rglob('lib*.so')]"
    child(AGAIN.format(until=kept, more=40), **places.environment)
    assert places.compiled


def test_what_a_process_has_compiled_too_late_for_itself_is_the_next_one_s(child: Child, places: Places) -> None:
    made = f"[*Path({os.fspath(places.cache)!r}).rglob('ahead_*.so')]"
    late = AGAIN.format(until=True, more=5) + f"while not {made}: time.sleep(0.01)\nimport os; print(os.getpid())"
    first = child(late, **places.environment).stdout.strip()
    assert not [each for each in places.kept if each.name.startswith("lib")]
    long_ago = time.time() - 2 * 3600
    for each in places.kept:
        os.utime(each, (long_ago, long_ago))
    child(AGAIN.format(until=True, more=0), **places.environment)
    # by the first process alone, whose last compiler may begin, and note its command, while that process ends
    assert not [command for command in places.compiled if f"tmp_{first}_" not in command]
    taken = [each for each in places.kept if each.name.startswith("lib")]
    assert taken
    # young while MLX names it anew, or another process could delete it as what a killed compiler left behind
    assert all(each.stat().st_mtime > long_ago + 3600 for each in taken)


def test_a_kernel_that_no_compiler_makes_stays_as_it_is(child: Child, places: Places) -> None:
    places.compiler('case "$*" in *-shared*) exit 1;; esac')
    tried = f"Path({os.fspath(places.log)!r}).exists() and '-shared' in Path({os.fspath(places.log)!r}).read_text()"
    done = child(AGAIN.format(until=tried, more=100), **places.environment)
    assert "g++" not in done.stderr
    assert places.kept == []
